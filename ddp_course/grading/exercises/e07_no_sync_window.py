"""07 · no_sync_window(ddp_model, window): many micro-batches, one round of all-reduces."""

import torch
import torch.nn.functional as F
from torch import nn

from ..compare import factor, is_times
from ..exercise import Case, Exercise, generator
from .noted import CLIPPED, clipped, flat, gradients, judge, not_reduced, watch

SIZES = {  # of the micro-batches, by rank; the ranks' windows hold equally many samples
    "equal": [(4, 4, 4, 4)] * 3,
    "ragged": [(8, 8, 5)] * 3,
    "single": [(6,)] * 3,
    "unlike": [(4, 4, 4), (6, 6), (1, 9, 1, 1)],
}


def _model(seed: int, rank: int) -> nn.Module:
    torch.manual_seed(seed + rank)  # DDP gives every rank the weights of rank 0
    layers = [nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def _window(seed: int, kind: str, rank: int) -> list:
    draw = generator(seed, len(kind), rank)
    return [
        (
            torch.randn(size, 6, generator=draw, dtype=torch.float64),
            torch.randint(3, (size,), generator=draw),
        )
        for size in SIZES[kind][rank]
    ]


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        return watch(fn, _model(seed, rank), _window(seed, kind, rank))

    return run


class _Expected:
    """Each micro-batch's gradient, summed over its samples, and the large batch's mean."""

    def __init__(self, seed, kind, world_size):
        self.model, self.world_size = _model(seed, 0), world_size
        self.parts = [
            [(self._summed(x, y), len(y)) for x, y in _window(seed, kind, rank)]
            for rank in range(world_size)
        ]
        self.samples = sum(count for _, count in self.parts[0])  # of a rank
        self.own = [sum(g for g, _ in parts) / self.samples for parts in self.parts]
        self.mean = sum(self.own) / world_size

    def _summed(self, x, y) -> torch.Tensor:
        self.model.zero_grad()
        F.cross_entropy(self.model(x), y, reduction="sum").backward()
        return flat(gradients(self.model))

    def synced_at(self, rank, number) -> torch.Tensor:
        """What `rank` holds if only micro-batch `number` is all-reduced, up to a factor."""
        until = [sum(g for g, _ in parts[: number + 1]) for parts in self.parts]
        after = sum(g for g, _ in self.parts[rank][number + 1 :])
        return sum(until) / self.world_size + after

    def only(self, number) -> torch.Tensor:
        return sum(parts[number][0] for parts in self.parts)

    def of_means(self) -> torch.Tensor:
        means = [sum(g / n for g, n in parts) / len(parts) for parts in self.parts]
        return sum(means) / self.world_size


def _judge(kind: str):
    def judge_window(outputs, world_size, seed):
        expected = _Expected(seed, kind, world_size)

        def misconception(output, rank):
            return _misconception(output, rank, expected)

        return judge(outputs, expected.mean, misconception)

    return judge_window


def _misconception(output, rank, expected) -> str:
    mine, right, world = flat(output["gradients"]), expected.mean, expected.world_size
    count, samples = len(expected.parts[rank]), expected.samples
    if not mine.any():
        return "It is zero: was backward() called, and nothing cleared after it?"
    if world > 1 and factor(mine, right) is None:
        return _not_averaged(mine, rank, expected, output["notes"])
    if world > 1 and is_times(mine, right, 1 / world):
        return (
            "It was divided by world_size once more: DDP's all-reduce has taken the mean over the "
            "ranks already."
        )
    if world > 1 and is_times(mine, right, world):
        return f"It is {world}× the mean over the ranks: after DDP's mean something was summed."
    if is_times(mine, right, count):
        return (
            f"It is {count}× the large batch's: the loss was not divided by the number of "
            "micro-batches."
        )
    if is_times(mine, right, samples):
        return f"It is {samples}× the large batch's: the sum was not divided by the samples."
    if clipped(mine, flat(output["twice"]), right):
        return f"It is {factor(mine, right):.4g}× the large batch's: {CLIPPED}"
    return _other_mean(mine, expected)


def _not_averaged(mine, rank, expected, notes) -> str:
    if _own(mine, rank, expected):
        return f"It is this rank's own gradient: {not_reduced(notes)}"
    for number in range(len(expected.parts[rank]) - 1):
        if factor(mine, expected.synced_at(rank, number)) is not None:
            where = "the first" if number == 0 else f"number {number + 1}"
            late = "" if notes["entered"] else " And the forward reads the flag: set it before."
            return (
                f"Of the micro-batches only {where} was all-reduced; what came after it stays this "
                f"rank's own. It is the last one that has to be outside no_sync.{late}"
            )
    return _other_mean(mine, expected)


def _own(mine, rank, expected) -> bool:
    means = sum(g / n for g, n in expected.parts[rank])
    return any(factor(mine, own) is not None for own in (expected.own[rank], means))


def _other_mean(mine, expected) -> str:
    if factor(mine, expected.of_means()) is not None:
        return (
            "It is the mean of the micro-batches' means, in which the samples of a small "
            "micro-batch count too much: divide summed losses by the window's samples."
        )
    if factor(mine, expected.only(-1)) is not None:
        return "Only the last micro-batch is in it: are gradients cleared in between?"
    if (times := factor(mine, expected.mean)) is not None:
        return f"It is {times:.4g}× the large batch's."
    return "It is that of no mean over these samples."


_STUCK = (
    "Likely: here the ranks have unequal numbers of micro-batches. Who calls a collective for each "
    "of them calls more than the others do: one round at the end of the window is allowed."
)


def _case(name, points, kind, worlds) -> Case:
    return Case(name, points, _run(kind), _judge(kind), worlds, _STUCK * (kind == "unlike"))


EXERCISE = Exercise(
    "07_no_sync_window",
    "no_sync_window",
    ("ddp_model", "window"),
    (
        _case("four equal micro-batches", 3, "equal", (2, 3)),
        _case("a ragged last micro-batch", 2, "ragged", (2,)),
        _case("one micro-batch alone", 1, "single", (1, 2)),
        _case("ranks that cut their windows differently", 2, "unlike", (2, 3)),
    ),
)
