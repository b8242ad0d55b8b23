"""What is compared: numbers measured in turns, and the goals they are held against."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist

COURSE = "this course"


@dataclass(frozen=True)
class Goal:
    """With `other`: `ours` at least `bound` times as good. Without: `ours` at most `bound`."""

    bound: float
    other: str | None = None


@dataclass
class Case:
    """One comparison: for each contender one number a round, in `unit`.

    Contenders were measured in turns, so numbers of one round belong together. A contender that did
    not come to an end has None; `notes` say why a contender is missing. `ours` is the contender
    that the goals are about.
    """

    name: str
    unit: str
    samples: dict[str, list[float | None]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    more_is_better: bool = False
    notes: list[str] = field(default_factory=list)
    ours: str = COURSE

    def add(self, contender: str, value: float | None) -> None:
        self.samples.setdefault(contender, []).append(value)

    def done(self, contender: str) -> list[float]:
        """Return the numbers of a contender, without the rounds that did not come to an end."""
        return [value for value in self.samples.get(contender, ()) if value is not None]

    def median(self, contender: str) -> float | None:
        done = self.done(contender)
        return statistics.median(done) if done else None

    def times(self, other: str) -> float | None:
        """Return how many times as good `ours` is as `other`: the median of the rounds' ratios."""
        pairs = zip(self.samples.get(self.ours, ()), self.samples.get(other, ()), strict=False)
        pairs = [(a, b) for a, b in pairs if a and b]
        ratios = [a / b if self.more_is_better else b / a for a, b in pairs]
        return statistics.median(ratios) if ratios else None

    def verdicts(self) -> list[dict]:
        """Return for each goal {"goal", "measured", "met"}; met is None where nothing can be said.

        A contender that never came to an end is beaten.
        """
        return [self._verdict(goal) for goal in self.goals]

    def _verdict(self, goal: Goal) -> dict:
        if goal.other is None:
            measured = self.median(self.ours)
            met = None if measured is None else measured <= goal.bound
            return {"goal": f"at most {goal.bound:g} {self.unit}", "measured": measured, "met": met}
        measured, met = self.times(goal.other), None
        if measured is not None:
            met = measured >= goal.bound
        elif self.samples.get(goal.other) and not self.done(goal.other) and self.done(self.ours):
            met = True
        text = f"at least {goal.bound:.3g} times as good as {goal.other}"
        return {"goal": text, "measured": measured, "met": met}

    def as_dict(self) -> dict:
        """Return everything as plain numbers and text, for JSON."""
        medians = {contender: self.median(contender) for contender in self.samples}
        return asdict(self) | {"medians": medians, "verdicts": self.verdicts()}


def in_turns(case: Case, contenders: dict[str, Callable[[], float | None]], rounds: int) -> Case:
    """Measure all contenders once a round, for `rounds` rounds; return the case."""
    for _ in range(rounds):
        for name, measure in contenders.items():
            case.add(name, measure())
    return case


def seconds_on_ranks(
    contenders: dict[str, Callable[[], object]], rounds: int, turn: float = 0.05, turns: int = 10
) -> dict[str, list[float]]:
    """Return for each contender the seconds of one call, a number a round. Every rank must call it.

    In a round each has `turns` turns of about `turn` seconds, in the order of the contenders and
    back: short ones, so that a slow moment of the machine falls on all of them.
    """
    for call in contenders.values():
        _seconds(call, 2)
    slowest = torch.tensor(max(_seconds(call, 3) for call in contenders.values()))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    calls, seconds = max(1, int(turn / slowest)), {name: [] for name in contenders}
    for _ in range(rounds):
        taken = dict.fromkeys(contenders, 0.0)
        for number in range(turns):
            for name in list(contenders)[:: 1 if number % 2 == 0 else -1]:
                taken[name] += _seconds(contenders[name], calls) / turns
        for name, value in taken.items():
            seconds[name].append(value)
    return seconds


def _seconds(call, calls: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls
