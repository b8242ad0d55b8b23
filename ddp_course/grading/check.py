"""`check` in a notebook: run an exercise's cases on real ranks, and say what is wrong and why."""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import HangError, RankError
from ..launch import launch
from . import progress
from .exercise import Case, Exercise, hung, raised
from .table import find

SECONDS = 20  # for a case, once its ranks are up


@dataclass(frozen=True)
class Verdict:
    """What came of one case: `wrong` is None when it passed."""

    case: Case
    wrong: str | None

    def __str__(self):
        mark = "✓" if self.wrong is None else "✗"
        text = "" if self.wrong is None else "\n    " + self.wrong.replace("\n", "\n    ")
        return f"{mark} {self.case.name}{text}"


@dataclass(frozen=True)
class Report:
    """The verdicts on one function; true if all cases passed."""

    exercise: Exercise
    verdicts: list[Verdict]
    seed: int

    def __bool__(self):
        return all(verdict.wrong is None for verdict in self.verdicts)

    def __repr__(self):
        passed = sum(verdict.wrong is None for verdict in self.verdicts)
        end = "Solved." if self else f"(again with the same numbers: seed={self.seed})"
        return f"{self.exercise.name}: {passed} of {len(self.verdicts)} checks passed. {end}"


def check(name: str, fn: Callable, seed: int | None = None) -> Report:
    """Run the checks of exercise `name` on `fn`; print each, stop at the first that fails.

    Numbers are drawn anew each time, from `seed` if it is given. Raises ValueError for an unknown
    exercise and TypeError for something that is no function with the parameters it needs.
    """
    exercise = find(name)
    check_signature(exercise, fn)
    seed = random.randrange(10**6) if seed is None else seed
    verdicts = []
    for case in exercise.cases:
        verdict = Verdict(case, try_case(case, fn, seed))
        verdicts.append(verdict)
        print(verdict, flush=True)
        if verdict.wrong is not None:
            break
    report = Report(exercise, verdicts + _not_tried(exercise, len(verdicts)), seed)
    print(report)
    progress.remember(report)
    return report


def _not_tried(exercise: Exercise, done: int) -> list[Verdict]:
    return [Verdict(case, "not tried yet: mend the one before") for case in exercise.cases[done:]]


def check_signature(exercise: Exercise, fn) -> None:
    """Raise TypeError unless `fn` can be called with the exercise's parameters."""
    wanted = f"{exercise.function}({', '.join(exercise.parameters)})"
    if not callable(fn):
        raise TypeError(f"check needs your function {wanted}, not {fn!r}.")
    try:
        inspect.signature(fn).bind(*exercise.parameters)
    except (TypeError, ValueError) as error:  # ValueError: a builtin that tells no signature
        raise TypeError(f"it will be called as {wanted}: {error}.") from None


def try_case(case: Case, fn: Callable, seed: int) -> str | None:
    """Return what is wrong with `fn` in this case, at all its world sizes; None if nothing is."""
    for world_size in case.worlds:
        try:
            run = launch(_on_rank, case.run, fn, seed, nproc=world_size, timeout=SECONDS)
            wrong = case.judge(run.values, world_size, seed)
        except HangError as error:
            wrong = hung(case, world_size, str(error))
        except RankError as error:
            wrong = raised(case, world_size, str(error), error.traceback)
        if wrong:
            return f"with {world_size} rank{'s' * (world_size > 1)}: {wrong}"
    return None


def _on_rank(run, fn, seed):
    import torch.distributed as dist

    return run(fn, dist.get_rank(), dist.get_world_size(), seed)
