"""The shape of an exercise: what is run on the ranks, and what is made of what comes back.

`run` sees only the student's function; `judge` sees only plain data, in another process. So nothing
a submission does can reach the expected values, and `check` (in the notebook) and `grade` (over
many submissions) come to the same verdict.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

_GRADING, _TORCH = (f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))
_CALL = (  # bounded: the text may come from a submission
    r"[^\s][^\n]{0,500}?, line \d+, in [^\n]{0,500}\n(?:    [^\n]*\n)?"
    r"(?:  \[\d+ more times\]\n)?"
)
_STACK = re.compile(rf"^(?:{_CALL}|  \[…\]\n)+", re.MULTILINE)  # as errors.format_stack writes it
_OF_RANKS = re.compile(  # what a rank says that lost another, or was sent something else
    r"^(The process of rank \d+ died of SIGABRT|torch\.distributed\.\w+Error"
    r"|RuntimeError.*(gloo|NCCL|peer|[Cc]onnection|[Tt]imed out|prior iteration))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Case:
    """One check of an exercise, with its points.

    run(fn, rank, world_size, seed) -> {name: tensor, number, text, or list of these} on each rank,
    with the process group up. judge(outputs, world_size, seed) -> what is wrong, in the student's
    terms, or None; `outputs` holds what `run` returned, by rank. Both draw the same inputs from
    `seed`, with a generator of their own. `stuck` says what is likely when ranks wait for ever or
    lose one another; `errors` what is likely when a rank raises, {regular expression: words}.
    """

    name: str
    points: int
    run: Callable
    judge: Callable
    worlds: tuple[int, ...] = (1, 2, 3)
    stuck: str = ""
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exercise:
    """A function to write, by name, with the parameters that it is called with, and its cases."""

    name: str  # "07_accumulate_window": of the notebook, the solution and the zoo
    function: str
    parameters: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def points(self) -> int:
        return sum(case.points for case in self.cases)


def hung(case: Case, world_size: int, text: str) -> str:
    """Return what to say of a function that does not end; `text` tells where its ranks are."""
    return f"it never ends: {text}\n{case.stuck * (world_size > 1)}".rstrip()


def raised(case: Case, world_size: int, text: str, trace: str) -> str:
    """Return what to say of an error on a rank; the goal, if it is the stub, which states it.

    `text` is the error as `launch` tells it, `trace` what the rank that failed first has raised.
    """
    goals = [line for line in trace.splitlines() if line.startswith("NotImplementedError: ")]
    if goals:
        return f"not written yet. {goals[-1].partition(': ')[2]}"
    said = _STACK.sub("", trace)
    likely = [words for pattern, words in case.errors.items() if re.search(pattern, said)]
    if not likely and world_size > 1 and _OF_RANKS.search(said):
        likely = [case.stuck]
    return "\n".join(["it raises an error.", _STACK.sub(_theirs, text), *likely]).rstrip()


def _theirs(stack: re.Match) -> str:
    """Return a stack from the student's first line down, without calls of the grader's own."""
    calls = re.findall(rf"{_CALL}|  \[…\]\n", stack[0])
    calls = [call for call in calls if not call.startswith(_GRADING)]
    own = (number for number, call in enumerate(calls) if not call.startswith((_TORCH, " ")))
    return "".join(calls[next(own, 0) :])


def generator(seed: int, *of: int) -> torch.Generator:
    """Return a generator for this seed and, if ranks or windows differ, for `of` these numbers."""
    state = seed
    for number in of:
        state = (state * 1_000_003 + number + 1) % (2**63)
    return torch.Generator().manual_seed(state)


def same_calls(outputs: list[dict], name: str = "collectives") -> str | None:
    """Say where ranks called different collectives, from the lists that `calls` made, or None."""
    lists = [output[name] for output in outputs]
    for number, called in enumerate(zip(*lists, strict=False), 1):
        if len(set(called)) > 1:
            told = ", ".join(f"rank {rank} {call}" for rank, call in enumerate(called))
            return f"the ranks call different collectives: number {number} is {told}."
    counts = {len(calls) for calls in lists}
    if len(counts) > 1:
        told = ", ".join(f"rank {rank}: {len(calls)}" for rank, calls in enumerate(lists))
        return f"the ranks call different numbers of collectives ({told}): the others would wait."
    return None


def calls() -> list[str]:
    """Return the collectives that this rank has called so far, such as "all_reduce(float64[4])".

    From PyTorch's flight recorder: nothing is patched. Subtract those before the student's call.
    """
    from .. import flight

    return [str(collective) for collective in flight.log(None)]
