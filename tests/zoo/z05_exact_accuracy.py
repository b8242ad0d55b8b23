"""Wrong and right answers to 05_exact_accuracy: what each is told."""

import contextlib

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import data

from . import answers

WRONG, RIGHT, wrong, right = answers()


def strided(dataset):
    return range(dist.get_rank(), len(dataset), dist.get_world_size())


def counted(model, dataset, batch_size, mine, each_batch=lambda sums: None, **loader):
    """The number of right answers and of samples among `mine`, as a tensor."""
    sums, training = torch.zeros(2, dtype=torch.float64), model.training
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size, sampler=mine, **loader):
            found = torch.tensor([(model(x).argmax(1) == y).sum(), len(y)], dtype=torch.float64)
            each_batch(found)
            sums += found
    model.train(training)
    return sums


def quotient(sums):
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


@wrong("those dealt twice count twice")
def padded(model, dataset, batch_size):
    mine = DistributedSampler(dataset, shuffle=False)
    return quotient(counted(model, dataset, batch_size, mine))


@wrong("The sampler's drop_last drops what does not divide")
def dropped(model, dataset, batch_size):
    mine = DistributedSampler(dataset, shuffle=False, drop_last=True)
    return quotient(counted(model, dataset, batch_size, mine))


@wrong("The loader's drop_last drops a small last batch")
def small_batches_dropped(model, dataset, batch_size):
    return quotient(counted(model, dataset, batch_size, strided(dataset), drop_last=True))


@wrong("the mean of the ranks' accuracies")
def mean_of_means(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    share = correct / count
    dist.all_reduce(share, op=dist.ReduceOp.AVG)
    return share.item()


@wrong("A rank without a sample has no accuracy")
def equal_shares_only(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    again = (correct / count * count).round()
    dist.all_reduce(again)
    return again.item() / len(dataset)


@wrong("added up, not averaged")
def sum_of_means(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    share = correct / count
    dist.all_reduce(share)
    return share.item()


@wrong("It is the accuracy of this rank's own samples")
def own_samples(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    return (correct / count).item()


@wrong("It is rank 0's part of the samples alone")
def rank_0_tells(model, dataset, batch_size):
    sums = counted(model, dataset, batch_size, strided(dataset))
    dist.broadcast(sums, src=0)
    return (sums[0] / sums[1]).item()


@wrong("or the right answers of all were divided by the samples of one rank")
def divides_by_its_own(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    dist.all_reduce(correct)
    return (correct / count).item()


@wrong("never added up over the ranks")
def divides_by_all(model, dataset, batch_size):
    correct, _ = counted(model, dataset, batch_size, strided(dataset))
    return correct.item() / len(dataset)


@wrong("divided by batches × batch_size")
def full_batches(model, dataset, batch_size):
    batches = []
    sums = counted(model, dataset, batch_size, strided(dataset), batches.append)
    sums[1] = len(batches) * batch_size
    return quotient(sums)


@wrong("a mean of the batches' accuracies")
def mean_over_batches(model, dataset, batch_size):
    batches = []
    counted(model, dataset, batch_size, strided(dataset), batches.append)
    mean = torch.stack([correct / count for correct, count in batches]).mean()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.item()


@wrong("put into a tensor of whole numbers")
def whole_numbers(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset))
    share = torch.tensor(int(correct / count))
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


@wrong("Likely: a collective inside the loop")
def all_reduces_each_batch(model, dataset, batch_size):
    sums = torch.zeros(2, dtype=torch.float64)

    def add(found):
        dist.all_reduce(found)
        sums.add_(found)

    counted(model, dataset, batch_size, strided(dataset), add)
    return (sums[0] / sums[1]).item()


@wrong("It has nothing to stack or to divide")
def stacks_batches(model, dataset, batch_size):
    batches = []
    counted(model, dataset, batch_size, strided(dataset), batches.append)
    return quotient(torch.stack(batches).sum(0))


@wrong("in training mode, where dropout drops")
def never_eval(model, dataset, batch_size):
    correct = torch.zeros(())
    with torch.no_grad():
        for x, y in data.exact_shard(dataset, batch_size):
            correct += (model(x).argmax(1) == y).sum()
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


@wrong("is left in evaluation mode")
def leaves_eval(model, dataset, batch_size):
    value = by_counts(model, dataset, batch_size)
    model.eval()
    return value


@wrong("is left in training mode")
def always_trains(model, dataset, batch_size):
    value = by_counts(model, dataset, batch_size)
    model.train()
    return value


@wrong("under torch.no_grad()")
def keeps_graphs(model, dataset, batch_size):
    correct, training = torch.zeros(()), model.training
    model.eval()
    for x, y in data.exact_shard(dataset, batch_size):
        correct += (model(x).argmax(1) == y).sum()
    model.train(training)
    dist.all_reduce(correct)
    return correct.item() / len(dataset)


@wrong("the ranks do the same work several times over")
def everything_everywhere(model, dataset, batch_size):
    return quotient(counted(model, dataset, batch_size, range(len(dataset))))


@wrong("rank 1 never called it")
def rank_0_only(model, dataset, batch_size):
    if dist.get_rank() == 0:
        return quotient(counted(model, dataset, batch_size, range(len(dataset))))
    return None


@wrong("rank 1 returns nothing")
def told_on_rank_0(model, dataset, batch_size):
    sums = counted(model, dataset, batch_size, strided(dataset))
    dist.reduce(sums, dst=0)
    return (sums[0] / sums[1]).item() if dist.get_rank() == 0 else None


@wrong("samples in one forward, and batch_size is")
def all_at_once(model, dataset, batch_size):
    return quotient(counted(model, dataset, len(dataset), strided(dataset)))


@wrong("the padded size")
def padded_divisor(model, dataset, batch_size):
    correct, _ = counted(model, dataset, batch_size, strided(dataset))
    dist.all_reduce(correct)
    share = -(-len(dataset) // dist.get_world_size())
    return correct.item() / (share * dist.get_world_size())


@wrong("It is a number in float32, which has 7 digits")
def divides_in_float32(model, dataset, batch_size):
    correct, count = counted(model, dataset, batch_size, strided(dataset)).long()
    dist.all_reduce(correct)
    dist.all_reduce(count)
    return (correct / count).item()


@wrong("Shares that are added up are rounded each")
def adds_up_shares(model, dataset, batch_size):
    correct, _ = counted(model, dataset, batch_size, strided(dataset))
    share = torch.tensor(sum([1 / len(dataset)] * int(correct)), dtype=torch.float64)
    dist.all_reduce(share)
    return share.item()


@right
def by_counts(model, dataset, batch_size):
    return quotient(counted(model, dataset, batch_size, strided(dataset)))


@right
def in_blocks(model, dataset, batch_size):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, last = (len(dataset) * r // world_size for r in (rank, rank + 1))
    training, hits = model.training, 0
    model.train(False)
    for start in range(first, last, batch_size):
        batch = [dataset[i] for i in range(start, min(start + batch_size, last))]
        x, y = (torch.stack(parts) for parts in zip(*batch, strict=True))
        with torch.inference_mode():
            hits += int((model(x).argmax(-1) == y).sum())
    model.train(training)
    everybody = [None] * world_size
    dist.all_gather_object(everybody, hits)
    return sum(everybody) / len(dataset)


@right
def padded_and_cut(model, dataset, batch_size):
    """Padding is harmless if what was dealt twice is cut off before it is counted."""
    world_size = dist.get_world_size()
    sampler = DistributedSampler(dataset, shuffle=False)
    with evaluating(model):
        batches = DataLoader(dataset, batch_size, sampler=sampler)
        hits = torch.cat([(model(x).argmax(1) == y).double() for x, y in batches])
    everybody = [torch.empty_like(hits) for _ in range(world_size)]
    dist.all_gather(everybody, hits)
    in_order = torch.stack(everybody, dim=1).flatten()[: len(dataset)]
    return in_order.mean()


@contextlib.contextmanager
def evaluating(model):
    training = model.training
    try:
        with torch.no_grad():
            yield model.eval()
    finally:
        model.train(training)


@right
def told_by_rank_0(model, dataset, batch_size):
    correct, count = torch.zeros(2, 1, dtype=torch.float64)
    part = Subset(dataset, list(strided(dataset)))
    with evaluating(model):
        for x, y in DataLoader(part, batch_size) if len(part) else ():
            correct += (model(x).argmax(1) == y).sum()
            count += len(y)
    for number in (correct, count):
        dist.reduce(number, dst=0)
    answer = correct / count
    dist.broadcast(answer, src=0)
    return answer
