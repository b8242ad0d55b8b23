"""09 · checkpoints(folder, model, optimizer, schedule, scaler, progress): a pair (save, load)."""

import contextlib
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist

from ..compare import off
from ..exercise import Case, Exercise
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
            if wrong := _load_wrong(outputs, rank):
                return f"rank {rank}: {wrong}"
        for rank, output in enumerate(outputs):
            different = _different(output["resumed"], output["straight"])
            if different and not output["failed"]:  # after that it begins elsewhere
                return (
                    f"rank {rank}: all is restored, but its {_NAMES[different[0]]} end otherwise."
                )
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
    changed = _different(output["after_save"], output["saved"])
    if changed:
        return f"save() changes the run that it saves: its {_NAMES[changed[0]]}."
    return None


_NAMES = {
    "weights": "weights",
    "momentum": "optimizer's momentum",
    "learning_rate": "learning rate",
    "schedule": "schedule",
    "scale": "loss scale",
    "good_steps": "scaler's count of good steps",
    "epoch": "epoch",
    "batches_done": "place in the epoch",
    "random": "random numbers",
}


def _different(one: dict, other: dict) -> list[str]:
    return [name for name in _NAMES if not _equal(one[name], other[name])]


def _equal(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _load_wrong(outputs, rank) -> str | None:
    output = outputs[rank]
    saved = output["older" if output["failed"] else "saved"]
    loaded, fresh = output["loaded"], output["fresh"]
    if wrong := _different(loaded, saved):
        if not _different(loaded, fresh):
            if rank and _different(outputs[0]["loaded"], outputs[0]["fresh"]):
                return "load() restores nothing here, but does on rank 0: every rank has to load."
            return "load() changes nothing: the run begins anew."
        if saved is output["saved"] and _equal(loaded["weights"], output["older"]["weights"]):
            return (
                "load() restores an older checkpoint, not the one that was saved last (or does "
                "save() fail without a word?)."
            )
        if not {"momentum", "schedule", "scale", "random"} - set(wrong) and wrong[0] != "weights":
            return (
                "only the weights are restored: optimizer, schedule, scaler, progress and random "
                "numbers begin anew."
            )
        return _left_out(wrong, loaded, saved, outputs, rank)
    return None


def _left_out(wrong, loaded, saved, outputs, rank) -> str:
    part = wrong[0]
    if part in ("epoch", "batches_done"):
        return _progress_wrong(wrong, loaded, saved)
    if part == "random":
        for other, output in enumerate(outputs):
            if other != rank and _equal(loaded["random"], output["saved"]["random"]):
                return _OF_RANK_0 if other == 0 else _OF_ANOTHER.format(other)
        return _LEFT_OUT[part]
    if part == "learning_rate":
        return f"the learning rate is {loaded[part]:g} instead of {saved[part]:g}."
    if part in ("weights", "momentum"):
        return _LEFT_OUT[part]
    return _LEFT_OUT[part].format(loaded[part], saved[part])


_LEFT_OUT = {
    "weights": "the weights are not those that were saved.",
    "momentum": "the optimizer begins without its momentum, or with another: its state_dict() "
    "belongs in the checkpoint.",
    "schedule": "the schedule has counted {} steps instead of {}: its state_dict() belongs in the "
    "checkpoint.",
    "scale": "the loss scale is {:,.0f} instead of {:,.0f}: without the scaler's state it "
    "searches its scale anew, and skips steps.",
    "good_steps": "the scaler has counted {} good steps instead of {}: its scale alone is not its "
    "state, so save its state_dict().",
    "random": "dropout draws other numbers than in the run that was never stopped: the state of "
    "torch's generator belongs in the checkpoint.",
}
_OF_RANK_0 = (
    "it goes on with rank 0's random numbers: dropout then drops the same units on all ranks. Save "
    "each rank's own state (all in one file, or a file for each), and give it back to that rank."
)
_OF_ANOTHER = (
    "it goes on with rank {}'s random numbers: do all ranks write the same file, so that the last "
    "one's stays? One file a rank, or one that holds the states of all."
)


def _progress_wrong(wrong, loaded, saved) -> str:
    if loaded["epoch"] == loaded["batches_done"] == 0:
        return (
            "progress is still at epoch 0, batch 0: it was left out, or the name got a new dict. "
            "The caller's must change: progress.update(...)."
        )
    if wrong[0] == "batches_done":
        return (
            f"progress says {loaded['batches_done']} batches instead of {saved['batches_done']}: "
            "the epoch begins anew, and its first samples are used twice."
        )
    return (
        f"progress says epoch {loaded['epoch']} instead of {saved['epoch']}: the sampler deals "
        "that epoch's order again."
    )


STUCK = (
    "Likely: a barrier or another collective inside `if rank == 0`, which the others never call; "
    "or ranks that write, replace or read the same file at the same time."
)


def _case(title: str, points: int, kind: str, worlds) -> Case:
    return Case(title, points, _run(kind), _judge(kind), worlds, STUCK)


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
