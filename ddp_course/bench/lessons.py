"""Every lesson from top to bottom, strictly compared with what is stored in it."""

import importlib.util
import subprocess
import sys
import time

from .cases import COURSE, Case, Goal
from .grade import NOT_HERE, SOLUTIONS

NBVAL = ("-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=300")


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each lesson and one for all of them together, one round."""
    lessons = sorted(SOLUTIONS.parent.glob("notebooks/[0-9]*.ipynb"))
    whole = Case("the whole course", "s", goals=[Goal(600)])
    if not lessons or importlib.util.find_spec("nbval") is None:
        whole.notes.append(NOT_HERE if not lessons else 'left out: pip install -e ".[test]"')
        return [whole]
    cases = []
    for lesson in lessons:
        say(f"lesson {lesson.stem}")
        began = time.perf_counter()
        done = subprocess.run([sys.executable, *NBVAL, lesson], capture_output=True, text=True)
        case = Case(f"lesson {lesson.stem}", "s", goals=[Goal(45)])
        passed = done.returncode == 0
        case.add(COURSE, time.perf_counter() - began if passed else None)
        case.notes += [] if passed else ["it failed: " + done.stdout.strip().splitlines()[-1]]
        cases.append(case)
    taken = [case.median(COURSE) for case in cases]
    whole.add(COURSE, None if None in taken else sum(taken))
    return [*cases, whole]
