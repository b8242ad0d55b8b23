"""What has been solved, kept in one file a person: `ddp-course progress` shows it."""

import contextlib
import json
import os
import time
from pathlib import Path

from .table import EXERCISES


def file() -> Path:
    """Return the file: DDP_COURSE_HOME/progress.json, by default below ~/.ddp-course."""
    home = os.environ.get("DDP_COURSE_HOME") or Path.home() / ".ddp-course"
    return Path(home) / "progress.json"


def read() -> dict:
    """Return {exercise: {"passed", "of", "solved"}}; {} if there is none or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(file().read_text())
        if isinstance(told, dict):
            return told
    return {}


def remember(report) -> None:
    """Note the best result of an exercise so far; a disk that cannot be written to is no error."""
    told, name = read(), report.exercise.name
    passed = sum(verdict.wrong is None for verdict in report.verdicts)
    before = told.get(name, {})
    solved = before.get("solved") or (time.strftime("%Y-%m-%d") if report else None)
    best = max(passed, before.get("passed", 0))
    told[name] = {"passed": best, "of": len(report.verdicts), "solved": solved}
    with contextlib.suppress(OSError):
        file().parent.mkdir(parents=True, exist_ok=True)
        scratch = file().with_name(f".progress.{os.getpid()}")
        scratch.write_text(json.dumps(told, indent=1))
        os.replace(scratch, file())


def table() -> str:
    """Return one line for each exercise, and how many are solved."""
    told, lines = read(), []
    for name, exercise in EXERCISES.items():
        mine = told.get(name)
        if mine is None:
            state = "· not tried"
        elif mine["solved"]:
            state = f"✓ solved {mine['solved']}"
        else:
            state = f"◐ {mine['passed']} of {len(exercise.cases)} checks"
        lines.append(f"{name:28} {state}")
    solved = sum(bool(told.get(name, {}).get("solved")) for name in EXERCISES)
    return "\n".join([*lines, f"{solved} of {len(EXERCISES)} exercises solved"])
