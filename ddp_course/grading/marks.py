"""From what was heard of an exercise to its checks, with their points."""

from dataclasses import dataclass, field

from .exercise import Exercise
from .result import Check, clean


@dataclass
class Told:
    """What is known of one exercise: what is wrong with each case, by number; None is right."""

    wrong: dict[int, str | None] = field(default_factory=dict)
    worlds: dict[int, set[int]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    patched: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)


def checks(exercise: Exercise, told: Told, end: str) -> list[Check]:
    """Return the checks of an exercise: points for a case that was right at all its world sizes.

    `end` says why the examination ended early, if it did.
    """
    found = []
    for number, case in enumerate(exercise.cases):
        wrong = told.wrong.get(number)
        if wrong is None and told.worlds.get(number, set()) != set(case.worlds):
            wrong = f"not tried: {end or 'it hung before'}"
        points = 0 if wrong else case.points
        seconds = round(told.seconds.get(number, 0.0), 2)
        text = clean(wrong or "")
        found.append(Check(exercise.name, case.name, points, case.points, text, seconds))
    for title, names, what in (
        ("leaves torch, Python and the checks as they are", told.patched, "it replaces"),
        ("leaves no process behind", told.left, "it leaves behind"),
    ):
        if names:
            text = f"{what} {', '.join(sorted(names)[:10])}: no points for this exercise."
            found = [_void(check, title) for check in found]
            found.append(Check(exercise.name, title, 0, 0, text))
    return found


def _void(check: Check, title: str) -> Check:
    if check.points:
        check.points, check.message = 0, f"no points: see “{title}”."
    return check


def missing(exercise: Exercise, why: str = "") -> list[Check]:
    """Return the failed checks of an exercise that was not handed in."""
    wanted = f"{exercise.function}({', '.join(exercise.parameters)})"
    text = why or f"there is no function {wanted} in what was handed in"
    return [Check(exercise.name, case.name, 0, case.points, text) for case in exercise.cases]
