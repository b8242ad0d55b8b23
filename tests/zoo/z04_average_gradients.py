"""Wrong and right answers to 04_average_gradients: what each is told."""

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def filled(model):
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p for p in model.parameters() if p.requires_grad]


@wrong("2× the mean: it was not divided by the world size")
def summed(model):
    for p in filled(model):
        dist.all_reduce(p.grad)


@wrong("this rank's own gradient still")
def reduces_a_copy(model):
    for p in filled(model):
        dist.all_reduce(p.grad.clone(), op=dist.ReduceOp.AVG)


@wrong("it was never added up over the ranks")
def divides_only(model):
    for p in filled(model):
        p.grad /= dist.get_world_size()
        dist.barrier()


@wrong("it was divided twice")
def divides_twice(model):
    for p in filled(model):
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        p.grad /= dist.get_world_size()


@wrong("It is rank 0's: a broadcast copies")
def broadcasts(model):
    for p in filled(model):
        dist.broadcast(p.grad, src=0)


@wrong("it changes the weights")
def averages_weights(model):
    for p in model.parameters():
        dist.all_reduce(p.data, op=dist.ReduceOp.SUM)
        p.data /= dist.get_world_size() + 1


@wrong("this rank skips an all_reduce that the others call")
def skips_none(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@wrong("frozen.weight is frozen, and now has a gradient. Its .grad must stay None")
def zeros_for_the_frozen(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@wrong("takes no part in the training, and now has a gradient")
def ones_for_the_unused(model):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@wrong("not by all 2: DDP's mean is over all ranks")
def divides_by_the_users(model):
    for p in filled(model):
        users = torch.tensor(float(p.grad.any()))
        dist.all_reduce(users)
        dist.all_reduce(p.grad)
        p.grad /= users.clamp(min=1)


@wrong("rank 1 never called it")
def only_rank_0(model):
    if dist.get_rank() == 0:
        for p in filled(model):
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@wrong("the maximum or the median")
def takes_the_maximum(model):
    for p in filled(model):
        dist.all_reduce(p.grad, op=dist.ReduceOp.MAX)


@right
def one_by_one(model):
    for p in filled(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@right
def all_at_once(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).clone()


@right
def by_every_name(model):
    """A tied weight has two names and is averaged twice: the mean of equal tensors is the same."""
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.requires_grad:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@right
def gathered_by_hand(model):
    for p in filled(model):
        everybody = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, p.grad)
        p.grad.copy_(torch.stack(everybody).mean(0))


@right
def reduced_and_sent_back(model):
    for p in filled(model):
        dist.reduce(p.grad, dst=0)
        p.grad.div_(dist.get_world_size())
        dist.broadcast(p.grad, src=0)
