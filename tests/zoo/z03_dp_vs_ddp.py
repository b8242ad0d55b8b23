"""Wrong and right answers to 03_dp_vs_ddp: what each is told."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import answers

WRONG, RIGHT, wrong, right = answers()


def mine(*tensors):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [tensor.tensor_split(world_size)[rank] for tensor in tensors]


def total(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss


def summed_loss(parallel, x, y):
    own_x, own_y = mine(x, y)
    return F.cross_entropy(parallel(own_x), own_y, reduction="sum")


@wrong("Nobody scatters for DDP")
def the_whole_batch(parallel, x, y):
    loss = F.cross_entropy(parallel(x), y)
    loss.backward()
    return loss.item()


@wrong("It is the mean of the ranks' means, in which a sample")
def mean_of_means(parallel, x, y):
    own_x, own_y = mine(x, y)
    loss = F.cross_entropy(parallel(own_x), own_y)
    loss.backward()
    return total(loss) / dist.get_world_size()


@wrong("these are to be added up, not averaged")
def averages_the_parts(parallel, x, y):
    loss = summed_loss(parallel, x, y) / len(y)
    loss.backward()
    return total(loss)


@wrong("the loss is the sum over the samples")
def sums(parallel, x, y):
    loss = summed_loss(parallel, x, y)
    (loss * dist.get_world_size()).backward()
    return total(loss) / len(y)


@wrong("DDP has averaged already")
def sums_once_more(parallel, x, y):
    loss = summed_loss(parallel, x, y) / len(y)
    (loss * dist.get_world_size()).backward()
    for p in parallel.parameters():
        dist.all_reduce(p.grad)
    return total(loss)


@wrong("or around it, through .module?")
def around_the_wrapper(parallel, x, y):
    loss = summed_loss(parallel.module, x, y) / len(y)
    (loss * dist.get_world_size()).backward()
    return total(loss)


@wrong("It is zero: was backward() called")
def no_backward(parallel, x, y):
    return total(summed_loss(parallel, x, y) / len(y))


@wrong("the model's counter says 0 forwards")
def in_a_replica(parallel, x, y):
    own_x, own_y = mine(x, y)
    replica = copy.deepcopy(parallel.module)
    loss = F.cross_entropy(replica(own_x), own_y, reduction="sum") / len(y)
    loss.backward()
    for p, q in zip(parallel.parameters(), replica.parameters(), strict=True):
        dist.all_reduce(q.grad)
        p.grad = q.grad
    return total(loss)


@wrong("the model ran 2 times")
def once_more_for_the_log(parallel, x, y):
    (summed_loss(parallel, x, y) * dist.get_world_size() / len(y)).backward()
    with torch.no_grad():
        return F.cross_entropy(parallel.module(x), y)


@wrong("were seen by no rank: they were dropped")
def whole_parts_only(parallel, x, y):
    part = len(y) // dist.get_world_size()
    here = slice(dist.get_rank() * part, (dist.get_rank() + 1) * part)
    loss = F.cross_entropy(parallel(x[here]), y[here])
    loss.backward()
    return total(loss) / dist.get_world_size()


@wrong("were seen by more than one rank")
def padded(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = -(-len(y) // world_size)
    here = [number % len(y) for number in range(rank * part, (rank + 1) * part)]
    loss = F.cross_entropy(parallel(x[here]), y[here])
    loss.backward()
    return total(loss) / world_size


@wrong("x.chunk(3) of 4 samples gives 2 parts")
def in_chunks(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own_x, own_y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    loss = F.cross_entropy(parallel(own_x), own_y, reduction="sum") / len(y)
    (loss * world_size).backward()
    return total(loss)


@wrong("Do samples and labels of a rank belong together?")
def other_labels(parallel, x, y):
    own_x = x[dist.get_rank() :: dist.get_world_size()]
    own_y = mine(y)[0][: len(own_x)]
    loss = F.cross_entropy(parallel(own_x), own_y, reduction="sum") / len(y)
    (loss * dist.get_world_size()).backward()
    return total(loss)


@wrong("It is that of this rank's part")
def returns_its_own_loss(parallel, x, y):
    loss = summed_loss(parallel, x, y)
    (loss * dist.get_world_size() / len(y)).backward()
    return loss.item() / len(mine(y)[0])


@wrong("It is the mean of the ranks' means: parts of any size count alike")
def logs_a_mean_of_means(parallel, x, y):
    loss = summed_loss(parallel, x, y)
    (loss * dist.get_world_size() / len(y)).backward()
    return total(loss / len(mine(y)[0])) / dist.get_world_size()


@wrong("what does all_reduce do to it?")
def logs_the_sum(parallel, x, y):
    loss = summed_loss(parallel, x, y) * dist.get_world_size() / len(y)
    loss.backward()
    return total(loss)


@wrong("still carries its graph")
def keeps_the_graph(parallel, x, y):
    loss = summed_loss(parallel, x, y) * dist.get_world_size() / len(y)
    loss.backward()
    return loss


@wrong("it should return the batch's mean loss")
def returns_nothing(parallel, x, y):
    (summed_loss(parallel, x, y) * dist.get_world_size() / len(y)).backward()


@wrong("it changes the weights")
def steps_too(parallel, x, y):
    loss = mean_of_means(parallel, x, y)
    with torch.no_grad():
        for p in parallel.parameters():
            p -= 0.1 * p.grad
    return loss


@wrong("Likely: not every rank runs forward and backward")
def only_rank_0(parallel, x, y):
    if dist.get_rank() == 0:
        return averages_the_parts(parallel, x, y)
    return 0.0


@right
def summed_and_scaled(parallel, x, y):
    loss = summed_loss(parallel, x, y) / len(y)
    (loss * dist.get_world_size()).backward()
    return total(loss)


@right
def dealt_like_cards(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own_x, own_y = x[rank::world_size], y[rank::world_size]
    share = len(own_y) / len(y)
    loss = share * F.cross_entropy(parallel(own_x), own_y)
    loss.mul(world_size).backward()
    everybody = [None] * world_size
    dist.all_gather_object(everybody, loss.item())
    return sum(everybody)


@right
def gradients_scaled_afterwards(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = -(-len(y) // world_size)
    starts = [min(r * share, len(y) - world_size + r) for r in range(world_size)] + [len(y)]
    here = slice(starts[rank], starts[rank + 1])
    losses = F.cross_entropy(parallel(x[here]), y[here], reduction="none")
    (losses.sum() / len(y)).backward()
    for p in parallel.module.parameters():
        p.grad *= world_size
    return total(losses.sum()).item() / len(y)


@right
def with_a_sampler(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here = torch.arange(len(y)).tensor_split(world_size)[rank]
    logits = parallel(x[here]).log_softmax(1)
    loss = -logits[torch.arange(len(here)), y[here]].sum()
    (loss * (world_size / len(y))).backward()
    dist.all_reduce(loss := loss.detach())
    return loss / len(y)
