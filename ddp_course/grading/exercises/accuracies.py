"""Wrong ways to an accuracy over ranks, and the number that each gives."""

import math

import torch
from torch.utils.data import DistributedSampler


def wrong_ways(right, world_size, batch_size, evaluated):
    """Yield (what it looks like, the accuracies by rank that it gives), the likeliest first.

    `right`: of each sample whether its answer is; `evaluated`: so many all ranks have evaluated.
    """
    length, total = len(right), sum(right)
    if evaluated != length:
        for message, value in _padded_ways(right, world_size, batch_size, evaluated):
            yield message, [value] * world_size
    for deal in (_cards(right, world_size), _blocks(right, world_size)):
        yield "It is the accuracy of this rank's own samples.", [_mean(part) for part in deal]
        yield (
            "This rank's right answers were divided by the size of the whole set: they were never "
            "added up over the ranks.",
            [sum(part) / length for part in deal],
        )
    for message, value in _same_ways(right, world_size, batch_size):
        yield message, [value] * world_size
    if 0 < total < length:
        message = "Was a share put into a tensor of whole numbers, or divided with //?"
        yield message, [0.0] * world_size


def _same_ways(right, world_size, batch_size):
    length, total = len(right), sum(right)
    padded = math.ceil(length / world_size) * world_size
    yield (
        f"It was divided by {padded}, the padded size: divide by the samples that were counted.",
        total / padded,
    )
    for deal in (_cards(right, world_size), _blocks(right, world_size)):
        means = [_mean(part) for part in deal]
        yield "It is rank 0's part of the samples alone.", means[0]
        yield (
            "It is the mean of the ranks' accuracies, in which the samples of a rank with fewer "
            "count more: add up counts, and divide once.",
            sum(means) / world_size,
        )
        yield (
            "The ranks' accuracies were added up, not averaged; or the right answers of all were "
            "divided by the samples of one rank.",
            sum(means),
        )
        batches = [_cut(part, batch_size) for part in deal]
        yield (
            "It was divided by batches × batch_size: the last batch of a rank may be smaller.",
            total / (sum(map(len, batches)) * batch_size),
        )
        yield (
            "It is a mean of the batches' accuracies, in which the samples of a small last batch "
            "count more.",
            _mean([_mean([_mean(batch) for batch in part]) for part in batches]),
        )


def _padded_ways(right, world_size, batch_size, evaluated):
    length, ranks = len(right), range(world_size)
    deals = [_cards(right, world_size)]
    for shuffle, drop_last in ((False, False), (True, False), (False, True), (True, True)):
        how = {"shuffle": shuffle, "drop_last": drop_last}
        dealt = [DistributedSampler(right, world_size, rank, **how) for rank in ranks]
        deals.append([[right[index] for index in part] for part in dealt])
    for deal in deals:
        seen = [value for part in deal for value in part]
        if len(seen) == evaluated:
            yield (
                f"DistributedSampler padded {length} samples to {evaluated}, and those dealt twice "
                "count twice."
                if evaluated > length
                else f"Left out: {length - evaluated} of {length} samples. The sampler's drop_last "
                "drops what does not divide.",
                _mean(seen),
            )
    for deal in deals:
        seen = [v for part in deal for v in part[: len(part) // batch_size * batch_size]]
        if len(seen) == evaluated:
            yield (
                f"Left out: {length - evaluated} of {length} samples. The loader's drop_last drops "
                "a small last batch.",
                _mean(seen),
            )


def _cards(right, world_size) -> list:
    return [right[rank::world_size] for rank in range(world_size)]


def _blocks(right, world_size) -> list:
    return [part.tolist() for part in torch.tensor(right).tensor_split(world_size)]


def _mean(values) -> float:
    return sum(values) / len(values) if values else math.nan


def _cut(part, size) -> list:
    return [part[k : k + size] for k in range(0, len(part), size)]
