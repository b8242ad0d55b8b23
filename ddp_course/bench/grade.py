"""Grading one right submission, of all exercises, and one that hangs."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .cases import COURSE, Case, Goal

SOLUTIONS = Path(__file__).parents[2] / "solutions"
NOT_HERE = "left out: this needs the whole project, with its notebooks"
HANGS = """
def shard_indices(length, rank, world_size, epoch, seed):
    while True:
        pass
"""


def measure(rounds: int, say) -> list[Case]:
    """Return two cases, in seconds from the command to its end."""
    right = Case("grading a right submission of all exercises", "s", goals=[Goal(60)])
    hangs = Case("grading a submission that hangs", "s", goals=[Goal(15)])
    if not SOLUTIONS.exists():
        right.notes.append(NOT_HERE)
        return [right]
    with tempfile.TemporaryDirectory() as folder:
        student = Path(folder, "right", "student")
        shutil.copytree(SOLUTIONS, student, ignore=shutil.ignore_patterns("[!0-9]*"))
        Path(folder, "hangs.py").write_text(HANGS)
        for turn in range(rounds):
            say(f"grading: round {turn + 1}")
            right.add(COURSE, seconds_to_grade(student.parent))
            hangs.add(COURSE, seconds_to_grade(f"{folder}/hangs.py", "05_shard_indices"))
    return [right, hangs]


def seconds_to_grade(path, exercise: str | None = None) -> float:
    """Return how long `ddp-course grade` takes for what is there."""
    chosen = ["--exercise", exercise] if exercise else []
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "ddp_course", "grade", str(path), "--out", f"{out}/graded"]
        began = time.perf_counter()
        subprocess.run(command + chosen, check=True, capture_output=True)
        return time.perf_counter() - began
