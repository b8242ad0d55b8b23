"""Drive one examiner from the outside: start it, listen, judge, and see to it that all of it ends.

Nothing that comes from it is run or unpickled here.
"""

import contextlib
import os
import pickle
import shutil
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle

from .. import wire
from . import data, exercises, marks, source
from .exercise import Exercise, hung, raised
from .result import Check, clean
from .stream import Stopped, Stream, open_pipe
from .submission import Work
from .tree import Tree

START_UP = 180  # seconds for an examiner, and for the ranks of a case: not the submission's time
ASKING = 4  # seconds after the body's, in which a hang is told with its stacks
MOST_DISK = 512 << 20  # bytes that a submission may write in its folder
GRACE = 5  # seconds that processes may take to end with their examiner, on a busy machine
LOOK = 0.25  # seconds between two looks at processes, memory and disk

# One at a time: judges seed torch's global generator, and --jobs has several threads.
_judging = threading.Lock()
cloudpickle.register_pickle_by_value(exercises)  # `run` travels alone, its judge stays here


class Driver:
    """One examination. `user` is a user of its own for the processes, if there can be one."""

    def __init__(self, chosen: list[Exercise], seed: int, body: float, nursery, user):
        self.exercises = {exercise.name: exercise for exercise in chosen}
        self.seed, self.body, self.nursery, self.user = seed, body, nursery, user
        self.told = {name: marks.Told() for name in self.exercises}
        self.end, self.sandbox = "", None
        self._at, self._since, self._limit = None, 0.0, 0.0

    def examine(self, work: Work, stop) -> list[Check]:
        """Return the checks of a submission; `stop` is an Event that ends it early."""
        job, checks = self._job(work)
        if job["exercises"]:
            folder = Path(tempfile.mkdtemp(prefix="ddp-course-"))
            try:
                self._run(job, folder, stop)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        for name, exercise in self.exercises.items():
            if name not in checks:
                checks[name] = marks.checks(exercise, self.told[name], self.end)
        return [check for name in self.exercises for check in checks[name]]

    def _job(self, work: Work):
        """Return what the examiner is to do, and the checks of what it cannot do."""
        todo, checks = [], {}
        for exercise in self.exercises.values():
            cells = choose(work, exercise)
            if cells is None:
                checks[exercise.name] = marks.missing(exercise)
                continue
            cases = [
                {"run": wire.dumps(case.run), "worlds": case.worlds} for case in exercise.cases
            ]
            names = {
                "name": exercise.name,
                "function": exercise.function,
                "parameters": exercise.parameters,
            }
            statements = source.needed(cells, exercise.function)
            todo.append({**names, "cases": cases, "texts": dict(cells), "statements": statements})
        cpu = int(self.body * (os.cpu_count() or 1)) + 30
        return {"exercises": todo, "seed": self.seed, "body": self.body, "cpu": cpu}, checks

    def _run(self, job, folder, stop):
        with open_pipe() as (orders, ours), open_pipe() as (answers, theirs):
            if self.user:
                os.chown(folder, self.user, self.user)
            pid = self.nursery.examiner(orders.fileno(), theirs.fileno(), str(folder), self.user)
            theirs.close()
            orders.close()
            tree = Tree(pid, self.user, self.nursery.pid)
            try:
                with contextlib.suppress(BrokenPipeError), ours:
                    ours.write(pickle.dumps(job))
                self._listen(answers, tree, folder, stop)
            except Stopped as error:
                self.end = str(error)
            except BaseException:
                self.end = "grading broke"
                raise
            finally:
                strays = tree.kill(grace=0 if self.end else GRACE)
        if not self.end:
            for told in self.told.values():
                told.left |= {clean(name) for name in strays}
        self._close_case(self.end)

    def _listen(self, answers, tree, folder, stop):
        frames, ended = Stream(answers), False
        self._await(START_UP)
        look = 0.0
        while not ended:
            for head, payloads in frames.read(LOOK):
                ended = head["kind"] == "end"
                self._hear(head, payloads)
            if frames.over and not ended:
                raise Stopped("its processes ended before there was a result")
            now = time.monotonic()
            if stop.is_set():
                raise Stopped("grading was interrupted")
            if now - self._since > self._limit:
                raise Stopped(f"it never ends: no sign of life for {self._limit:g} s")
            if now - look > LOOK:
                look = now
                if reason := tree.too_much() or _too_much_disk(folder):
                    raise Stopped(reason)

    def _await(self, seconds):
        self._since, self._limit = time.monotonic(), seconds

    def _hear(self, head, payloads):
        kind = head["kind"]
        if kind == "ready":
            self.sandbox = bool(head.get("sandbox"))
        if kind in ("ready", "start"):
            self._await(START_UP)
        if kind == "up":
            self._await(self.body + ASKING)
        if kind == "start":
            self._at = self._place(head)
            self._started = time.monotonic()
        if kind in ("values", "hang", "error") and self._at is not None:
            if self._at != self._place(head):
                raise Stopped("what came back belongs to another check")
            wrong = self._verdict(kind, head, payloads)
            self._close_case(wrong)

    def _place(self, head):
        place = head.get("exercise"), head.get("case"), head.get("world")
        exercise = self.exercises.get(place[0])
        if exercise is None or place[1] not in range(len(exercise.cases)):
            raise Stopped("what came back belongs to no check")
        if place[2] not in exercise.cases[place[1]].worlds:
            raise Stopped("what came back belongs to no check")
        return place

    def _close_case(self, wrong: str | None):
        """Note the verdict on the case that is being run, at its world size."""
        if self._at is None:
            return
        (name, number, world), self._at = self._at, None
        told = self.told[name]
        told.worlds.setdefault(number, set()).add(world)
        spent = time.monotonic() - self._started
        told.seconds[number] = told.seconds.get(number, 0.0) + spent
        if told.wrong.get(number) is None:
            who = f"with {world} rank{'s' * (world > 1)}: "
            told.wrong[number] = None if wrong is None else who + wrong

    def _verdict(self, kind, head, payloads) -> str | None:
        name, number, world = self._at
        told, case = self.told[name], self.exercises[name].cases[number]
        if kind == "hang":
            return hung(case, world, str(head.get("text")))
        if kind == "error":
            return raised(case, world, str(head.get("text")), str(head.get("trace")))
        told.left |= {clean(str(left)) for left in head.get("left", ())}
        try:
            answers = [data.decode(payload) for payload in payloads]
            if len(answers) != world or not all(isinstance(a, dict) for a in answers):
                return "no values came back from some rank."
            for rank, answer in enumerate(answers):
                told.patched |= {clean(str(name)) for name in answer.get("patched", ())}
                if answer.get("refused") is not None:
                    return f"rank {rank}: {answer['refused']}"
            with _judging:
                return case.judge([answer["values"] for answer in answers], world, self.seed)
        except Exception as error:  # data of any kind may come back
            return f"what comes back cannot be judged: {type(error).__name__}: {error}"


def choose(work: Work, exercise: Exercise) -> list[source.Cell] | None:
    """Return the cells of the file that the function is taken from, or None; notes what was so.

    Of several files the one named like the exercise, else the last.
    """
    name = exercise.function
    having = {file: cells for file, cells in work.cells.items() if source.definitions(cells, name)}
    if not having:
        return None
    named = [file for file in having if exercise.name in file]
    file = (named or list(having))[-1]
    places = source.definitions(having[file], name)
    if len(having) > 1:
        work.notes.append(f"{name} is in {len(having)} files: the one in {file} is graded")
    if len(places) > 1:
        work.notes.append(
            f"{file}: {name} is defined {len(places)} times; the last one ({places[-1]}) is graded"
        )
    return having[file]


def _too_much_disk(folder: Path) -> str | None:
    total = files = 0
    for place, _, names in os.walk(folder):
        for name in names:
            files += 1
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
        if total > MOST_DISK or files > 20_000:
            return f"it wrote more than {MOST_DISK >> 20} MB, or too many files"
    return None
