"""Grade many submissions: each in processes of its own, results kept as they come.

A run that was killed goes on where it was: `OUT/results/STUDENT.json` holds what is done.
"""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from . import result, sandbox, submission
from .driver import Driver
from .exercise import Exercise
from .marks import missing
from .nursery import Nursery
from .result import Result, clean

BODY = 10  # seconds for one case at one world size, once its ranks are up


@dataclass(frozen=True)
class Plan:
    """What all submissions have in common."""

    exercises: list[Exercise]
    seed: int
    body: float
    out: Path

    @property
    def key(self) -> str:
        """Tells plans apart that could come to different results."""
        told = hashlib.sha256(f"{self.seed} {self.body}".encode())
        for exercise in self.exercises:
            module = sys.modules[exercise.cases[0].judge.__module__]
            told.update(exercise.name.encode() + Path(module.__file__).read_bytes())
        return told.hexdigest()


def seed_of(out: Path, wanted: int | None) -> int:
    """Return the seed of this run: the wanted one, that of the run it continues, or a new one."""
    file = out / "run.json"
    if wanted is None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(file.read_text())["seed"])
        wanted = random.SystemRandom().randrange(10**6)
    result.write(file, json.dumps({"seed": wanted}))
    return wanted


def grade(
    submissions: list[submission.Submission],
    plan: Plan,
    jobs: int = 1,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Grade all submissions, `jobs` at a time; return their results in the same order.

    Each result is written below `plan.out` at once and passed to `on_result`, in this thread. One
    that is there already, for the same files and plan, is taken over. An interrupt ends all
    processes before it is raised.
    """
    warnings.simplefilter("ignore", SyntaxWarning)  # of a submission's code
    sandbox.adopt_orphans()
    stop, users = threading.Event(), _Users(jobs)
    results: dict[str, Result] = {}
    with Nursery() as nursery, ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(_one, one, plan, nursery, users, stop): one for one in submissions}
        try:
            for future in as_completed(waiting):
                done = future.result()
                results[done.student] = done
                on_result(done)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [results[one.student] for one in submissions]


def _one(one, plan, nursery, users, stop) -> Result:
    """Grade one submission; whatever goes wrong is its result."""
    file = plan.out / "results" / f"{one.student}.json"
    try:
        work = submission.read(one)
        key = hashlib.sha256(f"{plan.key} {work.digest}".encode()).hexdigest()
        before = result.load(file)
        if before is not None and before.key == key and before.student == one.student:
            return before
        with users.one() as user:
            driver = Driver(plan.exercises, plan.seed, plan.body, nursery, user)
            checks = driver.examine(work, stop)
        notes = [*work.notes, *_other_course(work, plan)]
        if driver.sandbox is False:
            notes.append("this system has no Landlock: the submission could read and write files")
        done = Result(one.student, checks, [clean(note) for note in notes], plan.seed, key)
    except Exception as error:
        why = f"grading broke: {type(error).__name__}: {error}; tell whoever maintains it"
        checks = [check for exercise in plan.exercises for check in missing(exercise, clean(why))]
        return Result(one.student, checks, [clean(why)], plan.seed)
    if not stop.is_set():
        result.save(done, file)
    return done


def _other_course(work, plan) -> list[str]:
    """Say so if none of the functions is there, and what is instead."""
    from .source import definitions, functions

    files, wanted = work.cells.values(), {exercise.function for exercise in plan.exercises}
    if not files or any(definitions(cells, name) for cells in files for name in wanted):
        return []
    there = [name for cells in files for name in functions(cells)]
    told = "no function that was asked for is in it"
    return [f"{told}; it has {', '.join(there[:10])}" if there else f"{told}, and no other either"]


class _Users:
    """User numbers for submissions, if we are root: their processes cannot touch ours."""

    def __init__(self, count: int):
        base = 200_000 + os.getpid() % 100_000 * 16
        self._lock = threading.Lock()
        self._free = list(range(base, base + count)) if self._work(base) else []

    @staticmethod
    def _work(user: int) -> bool:
        """Return whether there can be such users."""
        if os.getuid() != 0:
            return False
        if sandbox.landlock_version():
            return True
        command = "import importlib.util as u, ddp_course.grading.tree; assert u.find_spec('torch')"
        other = {"user": user, "group": user, "extra_groups": [], "cwd": "/"}
        try:
            return not subprocess.call(
                [sys.executable, "-I", "-c", command], stderr=subprocess.DEVNULL, **other
            )
        except OSError:
            return False

    @contextlib.contextmanager
    def one(self):
        """Lend a user number, or None."""
        with self._lock:
            user = self._free.pop() if self._free else None
        try:
            yield user
        finally:
            if user is not None:
                with self._lock:
                    self._free.append(user)
