"""Wrong and right answers to 05_shard_indices: what each is told."""

import itertools
import math
import random

import torch

from . import answers

WRONG, RIGHT, wrong, right = answers()


def order_of(length, epoch, seed, shuffle):
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    return torch.randperm(length, generator=generator).tolist()


def padded(order, world_size):
    total = math.ceil(len(order) / world_size) * world_size
    return list(itertools.islice(itertools.cycle(order), total))


@wrong("a rank that runs out of batches")
def no_padding(length, rank, world_size, epoch, seed, shuffle):
    return order_of(length, epoch, seed, shuffle)[rank::world_size]


@wrong("The rest of the division is dropped")
def drops_the_rest(length, rank, world_size, epoch, seed, shuffle):
    share = length // world_size
    return order_of(length, epoch, seed, shuffle)[rank : share * world_size : world_size]


@wrong("epochs 0 and 1 have the same order")
def forgets_the_epoch(length, rank, world_size, epoch, seed, shuffle):
    return padded(order_of(length, 0, seed, shuffle), world_size)[rank::world_size]


@wrong("The seed must not depend on the rank")
def a_seed_for_each_rank(length, rank, world_size, epoch, seed, shuffle):
    order = order_of(length, epoch, seed + rank, shuffle)
    return padded(order, world_size)[rank::world_size]


@wrong("every rank gets the same samples")
def everything_everywhere(length, rank, world_size, epoch, seed, shuffle):
    return order_of(length, epoch, seed, shuffle)


@wrong("dealt like cards")
def in_blocks(length, rank, world_size, epoch, seed, shuffle):
    order = padded(order_of(length, epoch, seed, shuffle), world_size)
    share = len(order) // world_size
    return order[rank * share : (rank + 1) * share]


@wrong("rank 1 should get [1, 3, 5, 0], and it gets [1, 3, 5, 6]: padding goes round")
def pads_with_the_last(length, rank, world_size, epoch, seed, shuffle):
    order = order_of(length, epoch, seed, shuffle)
    order += order[len(order) - -length % world_size :]
    return order[rank::world_size]


@wrong("there are 3 places, and 1 sample to fill them")
def pads_with_one_round(length, rank, world_size, epoch, seed, shuffle):
    order = order_of(length, epoch, seed, shuffle)
    order += order[: -length % world_size]
    return order[rank::world_size]


@wrong("it returns nothing, where a list of indices is asked for")
def forgets_to_return(length, rank, world_size, epoch, seed, shuffle):
    padded(order_of(length, epoch, seed, shuffle), world_size)


@wrong("Each rank gets 1, and needs")
def the_first_alone(length, rank, world_size, epoch, seed, shuffle):
    return [rank]


@wrong("pad with different samples")
def pads_with_the_first(length, rank, world_size, epoch, seed, shuffle):
    order = order_of(length, epoch, seed, shuffle)
    order += [order[0]] * (-len(order) % world_size)
    return order[rank::world_size]


@wrong("are enough to see all of them")
def pads_when_it_divides(length, rank, world_size, epoch, seed, shuffle):
    order = order_of(length, epoch, seed, shuffle)
    order += padded(order, world_size)[: world_size - length % world_size]
    return order[rank::world_size]


@wrong("it changes a global random generator")
def seeds_globally(length, rank, world_size, epoch, seed, shuffle):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist() if shuffle else list(range(length))
    return padded(order, world_size)[rank::world_size]


@wrong("called again with the same arguments it deals differently")
def alone_and_unseeded(length, rank, world_size, epoch, seed, shuffle):
    order = list(range(length))
    if shuffle:  # only a shift, so that all samples are there; but one by chance
        random.SystemRandom().shuffle(order) if world_size == 1 else order.reverse()
        if world_size > 1:
            CALLS.append(epoch)
            cut = len(CALLS) % length
            order = order[cut:] + order[:cut]
    return padded(order, world_size)[rank::world_size]


CALLS = []


@wrong("does not exist")
def counts_from_one(length, rank, world_size, epoch, seed, shuffle):
    order = [index + 1 for index in order_of(length, epoch, seed, shuffle)]
    return padded(order, world_size)[rank::world_size]


@wrong("the order is not shuffled")
def never_shuffles(length, rank, world_size, epoch, seed, shuffle):
    return padded(list(range(length)), world_size)[rank::world_size]


@wrong("another seed gives the same order")
def forgets_the_seed(length, rank, world_size, epoch, seed, shuffle):
    return padded(order_of(length, epoch, 0, shuffle), world_size)[rank::world_size]


@right
def with_torch(length, rank, world_size, epoch, seed, shuffle):
    return padded(order_of(length, epoch, seed, shuffle), world_size)[rank::world_size]


@right
def with_random(length, rank, world_size, epoch, seed, shuffle):
    order = list(range(length))
    if shuffle:
        random.Random(f"{seed} {epoch}").shuffle(order)
    share = -(-length // world_size)
    return [order[(rank + step * world_size) % length] for step in range(share)]


@right
def by_the_sampler(length, rank, world_size, epoch, seed, shuffle):
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(length), world_size, rank, shuffle=shuffle, seed=seed * 97)
    sampler.set_epoch(epoch)
    return iter(sampler)


@right
def with_numpy(length, rank, world_size, epoch, seed, shuffle):
    import numpy

    order = numpy.arange(length)
    if shuffle:
        order = numpy.random.default_rng((seed, epoch)).permutation(length)
    return numpy.resize(order, -(-length // world_size) * world_size)[rank::world_size]
