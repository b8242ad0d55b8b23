"""The examiner: a process of its own for each submission, which runs it on real ranks.

    grade ── nursery ── examiner, one a submission ── fork server ── guardian ── ranks

It gets its job, whole, before any line of the submission runs, and answers with frames
on a private descriptor: a line of JSON, then bytes for `data.decode`. Nothing it says is believed:
grade judges the values, and takes silence for failure. It knows no expected values, and the files
with the judges are closed to it.
"""

import json
import linecache
import os
import pickle
import sys
import traceback
import types

import torch.distributed as dist

from .. import HangError, RankError, launch, report, wire
from . import data, integrity, sandbox
from .check import check_signature
from .tree import left_behind

MOST_HANGS = 2  # of one exercise: then its other cases are not tried


def main(job: bytes, answers: int, held: bool) -> None:
    """Be the examiner, in a process of `nursery`; `held`: it is in the sandbox."""
    job = pickle.loads(job)

    def tell(kind, payloads=(), **content):
        sizes = [len(payload) for payload in payloads]
        head = json.dumps({"kind": kind, "sizes": sizes, **content}).encode()
        wire.write(answers, b"\n".join([head, b"".join(payloads)]))

    sandbox.limit(0, hard=False)
    tell("ready", sandbox=held)
    for exercise in job["exercises"]:
        _examine(exercise, job, tell)
    tell("end")


def _examine(exercise, job, tell):
    for place, text in exercise["texts"].items():  # errors show the student's lines
        linecache.cache[place] = (len(text), None, text.splitlines(True), place)
    hangs = 0
    for number, case in enumerate(exercise["cases"]):
        for world in case["worlds"]:
            if hangs >= MOST_HANGS:
                break
            about = {"exercise": exercise["name"], "case": number, "world": world}
            tell("start", **about)
            kind, content, payloads = _try(exercise, case, world, job, tell)
            tell(kind, payloads, **about, **content)
            hangs += kind == "hang"
            if kind != "values":
                break


def _try(exercise, case, world, job, tell):
    """Run one case; return what kind of message tells of it, its content, and its values."""
    pids, done, left = {}, set(), []

    def hear(record):
        if "up" in record:
            pids[record["rank"]] = record["up"]
            if len(pids) == world:
                tell("up")
        elif "done" in record:
            done.add(record["rank"])
            if len(done) == world:
                left.extend(left_behind(set(pids.values())))

    names = exercise["function"], exercise["parameters"], exercise["statements"]
    options = {"nproc": world, "timeout": job["body"], "on_record": hear}
    try:
        run = launch(examine, case["run"], *names, job["seed"], job["cpu"], **options)
    except HangError as error:
        return "hang", {"text": str(error)}, ()
    except RankError as error:
        return "error", {"text": str(error), "trace": error.traceback}, ()
    except Exception as error:  # what the ranks sent could not even be received
        return "error", {"text": f"{type(error).__name__}: {error}", "trace": ""}, ()
    return "values", {"left": left}, [v if type(v) is bytes else b"" for v in run.values]


def examine(run: bytes, function, parameters, statements, seed, cpu) -> bytes:
    """In a rank: build the student's function, run the case; return its values as plain data."""
    me, rank, world_size = os.getpid(), dist.get_rank(), dist.get_world_size()
    sandbox.limit(cpu)
    run = pickle.loads(run)
    changed, before = integrity.changed, integrity.snapshot(run)
    report(up=me)
    dist.barrier()  # nothing of the submission runs before all ranks are up
    fn, failed = build(function, statements)
    told = {"refused": _refused(fn, function, parameters, failed)}
    if told["refused"] is None:
        values = _call(run, failed, fn, rank, world_size, seed)
        if os.getpid() != me:  # a child that the submission forked
            os._exit(0)
        told["patched"] = changed(before, run)[:20]
        try:
            size = len(data.encode(values))
            told["values"] = values if size < data.MOST_BYTES // 2 else None
        except (TypeError, RecursionError) as error:
            told["refused"] = f"what comes of it cannot be compared: {error}."
    report(done=me)
    return data.encode(told)


def build(function: str, statements) -> tuple[object, str]:
    """Run a submission's statements; return its function, and what failed meanwhile.

    A statement that fails, such as an import of what is not installed, may not be needed.
    """
    scope, failed = {"__name__": "submission"}, ""
    sys.modules["submission"] = module = types.ModuleType("submission")
    module.__dict__.update(scope)
    for place, source in statements:
        try:
            exec(compile(source, place, "exec", dont_inherit=True), module.__dict__)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            line = f"{place}, line {where.lineno}" if where.filename == place else place
            failed += f"\nThis failed before: {line}: {type(error).__name__}: {error}"
    return module.__dict__.get(function), failed


def _refused(fn, function, parameters, failed) -> str | None:
    if fn is None:
        return f"the function {function} could not be made.{failed}"
    try:
        check_signature(types.SimpleNamespace(function=function, parameters=parameters), fn)
    except TypeError as error:
        return f"{error}{failed}"
    return None


def _call(run, failed, fn, *arguments):
    try:
        return run(fn, *arguments)
    except NameError as error:
        if failed:
            error.add_note(failed.strip())
        raise
