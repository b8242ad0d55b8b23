"""What grading gives: checks with their points, one `Result` a student; as JSON and back."""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

LONGEST = 4000  # characters of a message: a submission can write much


@dataclass
class Check:
    """One named check; `message` is "" if it passed. `of` 0: it can cost points, but gives none."""

    exercise: str
    name: str
    points: int
    of: int
    message: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.message


@dataclass
class Result:
    """All checks of one student. `notes` are remarks about what was handed in."""

    student: str
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    key: str = ""  # of the submission and the exercises: the same key, the same result

    @property
    def broken(self) -> bool:
        """Whether the grader itself failed, not the submission."""
        return not self.key

    @property
    def points(self) -> int:
        return sum(check.points for check in self.checks)

    @property
    def of(self) -> int:
        return sum(check.of for check in self.checks)

    def exercise(self, name: str) -> list[Check]:
        """Return the checks of one exercise."""
        return [check for check in self.checks if check.exercise == name]

    @property
    def exercises(self) -> list[str]:
        """The names of all exercises, in order."""
        return list(dict.fromkeys(check.exercise for check in self.checks))


def clean(text: str) -> str:
    """Return text that any report can hold: valid, without control characters, not too long."""
    text = text.encode("utf-8", "backslashreplace").decode()
    text = "".join(c if c in "\n\t" or c.isprintable() else "�" for c in text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} […]"


def save(result: Result, file: Path) -> None:
    """Write the result so that the file is whole, or not there at all."""
    write(file, json.dumps(dataclasses.asdict(result), indent=1))


def load(file: Path) -> Result | None:
    """Return the result in a file; None if there is none, or it is no result."""
    try:
        told = json.loads(file.read_text())
        checks = [Check(**check) for check in told.pop("checks")]
        return Result(checks=checks, **told)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(file: Path, text: str) -> None:
    """Write a text file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, file)
