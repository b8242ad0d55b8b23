"""Wrong and right answers to 13_zero1_optimizer: what each is told."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from . import answers

WRONG, RIGHT, wrong, right = answers()


def gradient_of(p):
    return torch.zeros_like(p) if p.grad is None else p.grad


def padded(flat, world_size):
    return torch.cat([flat, flat.new_zeros(-len(flat) % world_size)])


def mean_share(gradient, rank, n):
    share = torch.empty_like(gradient.chunk(n)[0])
    dist.reduce_scatter(share, list(gradient.chunk(n)))
    return share / n


def gathered(share, rank, n):
    shares = [torch.empty_like(share) for _ in range(n)]
    dist.all_gather(shares, share)
    return torch.cat(shares)


def write(parameters, flat):
    vector_to_parameters(flat[: sum(p.numel() for p in parameters)], parameters)


def zero1(reduce=mean_share, gather=gathered, write=write, pad=padded, frozen=False, fresh=False):
    """A ZeRO-1 optimizer with one thing changed."""

    def zero1_optimizer(parameters, settings):
        parameters = [p for p in parameters if p.requires_grad or frozen]
        rank, n = dist.get_rank(), dist.get_world_size()
        flat = pad(torch.cat([p.detach().flatten() for p in parameters]), n)
        share = nn.Parameter(flat.chunk(n)[rank].clone())
        adam = torch.optim.Adam([share], **settings)

        def step():
            gradient = pad(torch.cat([gradient_of(p).flatten() for p in parameters]), n)
            share.grad = reduce(gradient, rank, n)
            (torch.optim.Adam([share], **settings) if fresh else adam).step()
            write(parameters, gather(share.detach(), rank, n))

        return step

    return zero1_optimizer


def add(name, message, **change):
    fn = zero1(**change)
    fn.__name__ = name
    WRONG[fn] = message


def summed(gradient, rank, n):
    return n * mean_share(gradient, rank, n)


def divided_twice(gradient, rank, n):
    return mean_share(gradient, rank, n) / n


def own(gradient, rank, n):
    return gradient.chunk(n)[rank].clone()


def of_rank_0(gradient, rank, n):
    dist.broadcast(gradient, 0)
    return gradient.chunk(n)[rank].clone()


def into_copies(parameters, flat):
    for p in parameters:
        p.detach().clone().copy_(flat[: p.numel()].view_as(p))


def reversed_order(share, rank, n):
    return torch.cat(gathered(share, rank, n).chunk(n)[::-1])


def cut(flat, n):
    return flat[: len(flat) // n * n]


def write_what_is_there(parameters, flat):
    old = parameters_to_vector(parameters).detach()
    old[: len(flat)] = flat
    vector_to_parameters(old, parameters)


add("sums", "the gradients are summed, not averaged", reduce=summed)
add("divides_twice", "divided by the world size twice", reduce=divided_twice)
add("own_share", "with its *own* gradient of it", reduce=own)
add("rank_0", "only rank 0's gradients are used", reduce=of_rank_0)
add("into_copies", "no weight moves", write=into_copies)
add("reverses", "stand at the place of share", gather=reversed_order)
add("cuts_the_rest", "never move", pad=cut, write=write_what_is_there)
add("moves_the_frozen", "a frozen parameter moves", frozen=True)
add("forgets_moments", "Adam's moments are lost in between", fresh=True)


@wrong("keeps Adam's state for all 32 parameters")
def plain_adam_on_averages(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    adam = torch.optim.Adam(parameters, **settings)

    def step():
        for p in parameters:
            p.grad = gradient_of(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        adam.step()

    return step


@wrong("keeps Adam's state for all")
def everything_on_rank_0(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    adam = torch.optim.Adam(parameters, **settings) if dist.get_rank() == 0 else None

    def step():
        for p in parameters:
            p.grad = gradient_of(p)
            dist.reduce(p.grad, 0)
            p.grad /= dist.get_world_size()
        if adam:
            adam.step()
        for p in parameters:
            dist.broadcast(p.data, 0)

    return step


@wrong("Whole parameters make no equal shares")
def whole_parameters(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    rank, n = dist.get_rank(), dist.get_world_size()
    adam = torch.optim.Adam(parameters[rank::n], **settings)

    def step():
        for p in parameters:
            p.grad = gradient_of(p)
            dist.all_reduce(p.grad)
            p.grad /= n
        adam.step()
        for i, p in enumerate(parameters):
            dist.broadcast(p.data, i % n)

    return step


@wrong("every rank steps with its own gradients")
def no_communication(parameters, settings):
    return torch.optim.Adam([p for p in parameters if p.requires_grad], **settings).step


@wrong("only its own share moves")
def never_gathers(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = torch.cat([p.detach().flatten() for p in parameters])
    flat = padded(flat, n)
    share = nn.Parameter(flat.chunk(n)[rank])
    adam = torch.optim.Adam([share], **settings)

    def step():
        gradient = padded(torch.cat([gradient_of(p).flatten() for p in parameters]), n)
        share.grad = mean_share(gradient, rank, n)
        adam.step()  # share is a view of flat
        write(parameters, flat)

    return step


@wrong("Adam with its default settings")
def keeps_only_the_rate(parameters, settings):
    return right_by_flat_vector(parameters, {"lr": settings["lr"]})


@wrong("numbers to collectives")
def gathers_state_too(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = padded(parameters_to_vector(parameters).detach(), n)
    share = nn.Parameter(flat.chunk(n)[rank].clone())
    adam = torch.optim.Adam([share], **settings)

    def step():
        gradient = padded(torch.cat([gradient_of(p).flatten() for p in parameters]), n)
        dist.all_reduce(gradient)
        share.grad = gradient.chunk(n)[rank] / n
        adam.step()
        for value in (share.detach(), *adam.state[share].values()):
            if value.dim():
                whole = gathered(value, rank, n)
                if value.data_ptr() == share.data_ptr():
                    write(parameters, whole)

    return step


@wrong("step(); this is of type Adam")
def returns_the_optimizer(parameters, settings):
    return torch.optim.Adam([p for p in parameters if p.requires_grad], **settings)


@wrong("it can be read once only")
def reads_twice(parameters, settings):
    numbers = sum(p.numel() for p in parameters)
    adam = torch.optim.Adam([p for p in parameters if p.requires_grad], **settings)
    return adam.step if numbers else None


@wrong("A gradient may be None")
def needs_every_gradient(parameters, settings):
    parameters = [p for p in parameters if p.requires_grad]
    rank, n = dist.get_rank(), dist.get_world_size()
    flat = padded(parameters_to_vector(parameters).detach(), n)
    share = nn.Parameter(flat.chunk(n)[rank].clone())
    adam = torch.optim.Adam([share], **settings)

    def step():
        gradient = padded(torch.cat([p.grad.flatten() for p in parameters]), n)
        share.grad = mean_share(gradient, rank, n)
        adam.step()
        write(parameters, gathered(share.detach(), rank, n))

    return step


right_by_flat_vector = zero1()
right_by_flat_vector.__name__ = "right_by_flat_vector"
right(right_by_flat_vector)


@right
def with_the_package(parameters, settings):
    from ddp_course.zero import ShardedAdam

    return ShardedAdam(parameters, **settings).step


@right
def slices_of_each_parameter(parameters, settings):
    """Each parameter is cut into slices of its own; weights are broadcast by their owners."""
    parameters = [p for p in parameters if p.requires_grad]
    rank, n = dist.get_rank(), dist.get_world_size()
    slices = [p.data.view(-1).tensor_split(n) for p in parameters]
    mine = [nn.Parameter(part[rank]) for part in slices]  # views of the parameters
    adam = torch.optim.Adam(mine, **settings)

    def step():
        for p, own_slice in zip(parameters, mine, strict=True):
            total = gradient_of(p).clone()
            dist.all_reduce(total, op=dist.ReduceOp.AVG)
            own_slice.grad = total.view(-1).tensor_split(n)[rank]
        adam.step()
        for parts in slices:
            for owner, part in enumerate(parts):
                dist.broadcast(part, owner)

    return step


@right
class AsAClass:
    """Weights come back by an all-reduce of vectors that are zero outside of the own share."""

    def __init__(self, parameters, settings):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.numbers = sum(p.numel() for p in self.parameters)
        size = -(-self.numbers // dist.get_world_size())
        self.start = min(dist.get_rank() * size, self.numbers)
        self.end = min(self.start + size, self.numbers)
        share = parameters_to_vector(self.parameters).detach()[self.start : self.end]
        self.share = nn.Parameter(share.clone())
        self.adam = torch.optim.Adam([{"params": [self.share]}], **settings)

    def __call__(self):
        gradient = torch.cat([gradient_of(p).flatten() for p in self.parameters])
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        self.share.grad = gradient[self.start : self.end].clone()
        self.adam.step()
        whole = torch.zeros_like(gradient)
        whole[self.start : self.end] = self.share.detach()
        dist.all_reduce(whole)
        vector_to_parameters(whole, self.parameters)
