"""The five broken programs of 11_find_the_hang: what each gets, and what it should come to."""

import torch
from torch import nn

from ..exercise import generator

NAMES = ("accuracy", "loss", "tokens")
STEPS, STOP = 6, 3  # in train_until the first rank stops at step 3, or so
LIMIT = 2.0


def _draw(count: int, generator) -> torch.Tensor:
    return torch.rand(count, generator=generator, dtype=torch.float64)


def _epoch_loss(draw, rank, world_size):
    return (list(_draw(1 + (2 * rank + 2) % 5, draw) + rank),)  # 3, 5, 2, 4 batches


def _accuracy(draw, rank, world_size):
    total = 10 + 7 * rank
    return int(torch.randint(1, total, (), generator=draw)), total


def _average_gradients(draw, rank, world_size):
    parameters = [nn.Parameter(_draw(size, draw)) for size in (2, 3, 4)]
    for number, parameter in enumerate(parameters):
        parameter.grad = _draw(len(parameter), draw) + 1
        if world_size > 1 and number == 1 + rank:  # rank 0 has no second, rank 1 no third
            parameter.grad = None
    return (parameters,)


def _train_until(draw, rank, world_size):
    losses = _draw(STEPS, draw)
    if rank == world_size - 1:
        losses[STOP] = LIMIT + 0.01
    return list(losses), LIMIT


def _sum_metrics(draw, rank, world_size):
    values = dict(zip(NAMES, 10 * _draw(3, draw), strict=True))
    order = NAMES[rank % 3 :] + NAMES[: rank % 3]  # each rank's own
    return ({name: values[name].clone() for name in order},)


def inputs(program: str, seed: int, rank: int, world_size: int) -> tuple:
    """Return the arguments that a rank gives to a program."""
    return _INPUTS[program](generator(seed, rank), rank, world_size)


_INPUTS = {  # by name: what is sent to a grader's rank takes along only what it names
    "epoch_loss": _epoch_loss,
    "accuracy": _accuracy,
    "average_gradients": _average_gradients,
    "train_until": _train_until,
    "sum_metrics": _sum_metrics,
}
PROGRAMS = tuple(_INPUTS)


def expected(program: str, seed: int, world_size: int) -> tuple:
    """Return (the right value, {what a wrong one looks like: that value, or a list by rank})."""
    ranks = [inputs(program, seed, rank, world_size) for rank in range(world_size)]
    return _RIGHT[program](ranks)


def _right_epoch_loss(ranks):
    losses = [one for (one,) in ranks]
    every = [loss for one in losses for loss in one]
    means = [float(sum(one) / len(one)) for one in losses]
    shortest = min(map(len, losses))
    cut = float(sum(loss for one in losses for loss in one[:shortest]) / shortest / len(losses))
    return float(sum(every) / len(every)), {
        "Each rank returns the mean of its own batches: nothing was all-reduced.": means,
        "It is the mean of the ranks' means: a rank with few batches then counts as much as one "
        "with many. All-reduce the sum and the number.": sum(means) / len(means),
        "It stops with the rank that has the fewest batches: the others' last ones are lost.": cut,
        "The losses of all ranks are divided by the number of one rank's batches.": [
            float(sum(every) / len(one)) for one in losses
        ],
        "It is the sum of all losses: divide by the number of all batches.": float(sum(every)),
    }


def _right_accuracy(ranks):
    shares = [correct / total for correct, total in ranks]
    sums = [sum(numbers) for numbers in zip(*ranks, strict=True)]
    return sums[0] / sums[1], {
        "Each rank returns the share of its own answers: nothing was all-reduced.": shares,
        "It is the mean of the ranks' shares, and they have different numbers of answers: "
        "all-reduce both counts.": sum(shares) / len(shares),
        "Only rank 0 returns the share of all: the others have to return it, too.": [
            sums[0] / sums[1],
            *shares[1:],
        ],
    }


def _right_average_gradients(ranks):
    columns = list(zip(*(parameters for (parameters,) in ranks), strict=True))
    there = [[p.grad for p in column if p.grad is not None] for column in columns]
    sums = [sum(gradients) for gradients in there]
    own = [[torch.zeros_like(p) if p.grad is None else p.grad for p in ps] for (ps,) in ranks]
    return [total / len(ranks) for total in sums], {
        "The gradients are summed, not averaged.": sums,
        "It divides by the number of ranks that have a gradient: a missing one counts as zeros, "
        "so divide by the world size, as DDP does.": [
            total / len(gradients) for total, gradients in zip(sums, there, strict=True)
        ],
        "Each rank keeps its own gradients: nothing was all-reduced.": own,
    }


def _right_train_until(ranks):
    steps = list(zip(*(losses for losses, _ in ranks), strict=True))
    means = [float(sum(step) / len(step)) for step in steps]
    stop = next(n for n, step in enumerate(steps) if max(step) > LIMIT)
    return means[:stop], {
        "The step in which a rank is above the limit is still in it: ask all ranks first, then "
        "decide, then all-reduce.": means[: stop + 1],
        "It never stops: one rank above the limit is enough, whoever it is.": means,
        "Each rank returns its own losses.": [
            [float(loss) for loss in losses[:stop]] for losses, _ in ranks
        ],
        "The losses are summed, not averaged.": [len(ranks) * mean for mean in means[:stop]],
    }


def _right_sum_metrics(ranks):
    metrics = [one for (one,) in ranks]
    right = {name: float(sum(one[name] for one in metrics)) for name in NAMES}
    columns = [[float(one[name]) for name in one] for one in metrics]
    mixed = [sum(numbers) for numbers in zip(*columns, strict=True)]
    own = [{name: float(one[name]) for name in NAMES} for one in metrics]
    return right, {
        "Each rank goes through the names in an order of its own, so one metric is added to "
        "another. It needs an order that all share.": [
            dict(zip(one, mixed, strict=True)) for one in metrics
        ],
        "Each rank returns its own numbers: nothing was all-reduced.": own,
        "The metrics are averaged, not summed.": {n: v / len(ranks) for n, v in right.items()},
    }


_RIGHT = {
    "epoch_loss": _right_epoch_loss,
    "accuracy": _right_accuracy,
    "average_gradients": _right_average_gradients,
    "train_until": _right_train_until,
    "sum_metrics": _right_sum_metrics,
}
