"""09 · checkpoints(folder, model, optimizer, schedule, scaler, progress): a pair (save, load)."""

import contextlib
import os
import shutil
import tempfile
import time

import torch.distributed as dist

from ..compare import off
from ..exercise import Case, Exercise
from .restored import NAMES, different, load_wrong
from .resuming import FIRST, LAST, SECOND, new_run, reference, snapshot, train

LATE = 0.3  # seconds that rank 0 comes late to a save, for those who do not wait for it
SMALL_DISK = 1000  # bytes that a file may have when the disk is full


def _run(kind: str):
    """`kind`: "plain"; "full", the second save finds a full disk; "bare", loaded without DDP."""

    def run(fn, rank, world_size, seed):
        me = rank, world_size
        with _shared_folders(rank) as (folder, moved):
            first = new_run(seed, rank)
            pair = fn(folder, *first.parts())
            if not _is_pair(pair):
                return {"pair": type(pair).__name__}
            told = _first_life(kind, pair[0], folder, first, me)
            if rank == 0:
                shutil.copytree(folder, moved)  # nothing but files gets into the second life
            dist.barrier()
            again = new_run(seed, rank, again=True, wrapped=kind != "bare")
            told["fresh"] = snapshot(again)
            load = fn(moved, *again.parts())[1]
            try:
                load()
            except Exception as error:
                if kind == "plain":
                    raise
                return told | {"load_error": f"{type(error).__name__}: {error}"[:1000]}
            told["loaded"] = snapshot(again)
            train(again, LAST - SECOND, *me)
            return told | {"resumed": snapshot(again)}

    return run


def _is_pair(pair) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and all(map(callable, pair))


@contextlib.contextmanager
def _shared_folders(rank):
    """Give all ranks the same two names, of an empty folder and of one to come."""
    box = [None]
    if rank == 0:  # a grader's folder for this submission, which was named after tempfile looked
        box = [tempfile.mkdtemp(prefix="checkpoints-", dir=os.environ.get("TMPDIR"))]
    dist.broadcast_object_list(box)
    folder = os.path.join(box[0], "here")
    if rank == 0:
        os.mkdir(folder)
    dist.barrier()
    try:
        yield folder, os.path.join(box[0], "elsewhere")
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(box[0], ignore_errors=True)


def _first_life(kind, save, folder, run, me) -> dict:
    """Train, save twice, go on to the end; return what was seen on the way."""
    rank, world_size = me
    train(run, FIRST, *me)
    told = {"older": snapshot(run)}
    if rank == 0 and world_size > 1:
        time.sleep(LATE)
    save()
    there = set(os.listdir(folder))  # now, on this rank
    dist.barrier()
    told["late"] = sorted(set(os.listdir(folder)) - there)
    told["files"] = sorted(os.listdir(folder))
    train(run, SECOND - FIRST, *me)
    told["saved"], told["failed"] = snapshot(run), False
    with _full_disk() if kind == "full" else contextlib.nullcontext():
        try:
            save()
        except Exception:
            if kind != "full":
                raise
            told["failed"] = True
    told["after_save"] = snapshot(run)
    dist.barrier()
    train(run, LAST - SECOND, *me)
    return told | {"straight": snapshot(run)}


@contextlib.contextmanager
def _full_disk():
    """Let no file grow beyond a few bytes, where the system can do that."""
    try:
        import resource
    except ImportError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            if wrong := _save_wrong(output):
                return f"rank {rank}: {wrong}"
            if "load_error" in output:
                return LOAD_ERRORS[kind].format(output["load_error"])
        if off(outputs[0]["straight"]["weights"], reference(seed, world_size), 0, 1e-3):
            return "the run that is saved, but never stopped, does not end where it should."
        for rank in reversed(range(world_size)):  # rank 0's own state is right on rank 0
            if wrong := load_wrong(outputs, rank):
                return f"rank {rank}: {wrong}"
        for rank, output in enumerate(outputs):
            names = different(output["resumed"], output["straight"])
            if names and not output["failed"]:  # after that it begins elsewhere
                return f"rank {rank}: all is restored, but its {NAMES[names[0]]} end otherwise."
        return None

    return judge


LOAD_ERRORS = {
    "full": "the disk was full in the middle of a save, and now the checkpoint before it cannot be "
    "loaded either ({}): write beside the old file, and replace it (os.replace) in the end.",
    "bare": "saved with DDP, it cannot be loaded into the model without DDP ({}): names in the "
    "wrapper's state_dict begin with module., so save and load that of the model inside.",
}


def _save_wrong(output) -> str | None:
    if "pair" in output:
        return f"it should return two functions, (save, load), not a {output['pair']}."
    if not output["files"]:
        return "after save() there is no file in the folder."
    if output["late"]:
        return (
            f"save() returns before {output['late'][0]} is there, which rank 0 or another rank is "
            "still to write: who stops now has no whole checkpoint. dist.barrier() in the end."
        )
    changed = different(output["after_save"], output["saved"])
    if changed:
        return f"save() changes the run that it saves: its {NAMES[changed[0]]}."
    return None


STUCK = (
    "Likely: a barrier or another collective inside `if rank == 0`, which the others never call."
)
FILES = (
    "Likely: a file that this rank looks for and none has written, or one that several ranks "
    "write, replace or read at the same time."
)
ERRORS = {"FileNotFound|FileExists|EOFError|PytorchStreamReader|Unpickling|[Zz]ip": FILES}


def _case(title: str, points: int, kind: str, worlds) -> Case:
    return Case(
        title, points, _run(kind), _judge(kind), worlds, STUCK, ERRORS if max(worlds) > 1 else {}
    )


EXERCISE = Exercise(
    "09_resume",
    "checkpoints",
    ("folder", "model", "optimizer", "schedule", "scaler", "progress"),
    (
        _case("one rank, stopped within an epoch", 4, "plain", (1,)),
        _case("each rank its own random numbers", 4, "plain", (2, 3)),
        _case("saved with DDP, loaded without", 2, "bare", (1,)),
        _case("a disk that is full in the middle of a save", 2, "full", (1,)),
    ),
)
