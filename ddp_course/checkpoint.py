"""Save and load everything a resume needs, in one file that is always whole.

A run that is stopped after `save` and started again with `load` goes on bit for bit (on CPU) as if
it had never stopped. With more than two ranks that takes one forward and backward, as in training,
before `load`: DDP lays out its buckets anew after the first, and the order in which the ranks'
numbers are summed, hence the last bit, depends on a number's place in its bucket.

A model sharded by `fsdp` is saved whole: its file also fits DDP or one process, and theirs fit it.
To use only the weights: `torch.load(path, weights_only=True)["model"]`.
"""

import os
import random
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import fsdp
from .process_group import this_rank

FORMAT = "ddp_course checkpoint 1"


def save(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp=None,
    scheduler=None,
    epoch: int = 0,
    step: int = 0,
    batches_done: int = 0,
    extra=None,
) -> None:
    """Write one checkpoint file for all ranks. Every rank must call it, between two windows.

    `batches_done` is how many batches of this epoch each rank has used: where the sampler goes on.
    `extra` (rank 0's) may hold numbers, strings, tensors, lists and dicts. Each rank adds the state
    of its random generators; rank 0 writes, to a temporary file beside `path` that then replaces
    it, so that a crash leaves the old file or the new one, never half of one. Returns when the file
    is there; raises RuntimeError with the reason on every rank if it could not be written.
    """
    generators = _gather(_generators())
    state = _states(_unwrap(model), optimizer, amp, scheduler)  # on every rank: it may be sharded
    error = None
    if generators is not None:  # on rank 0
        try:
            state |= {"format": FORMAT, "epoch": epoch, "step": step, "batches_done": batches_done}
            _write(Path(path), state | {"extra": extra, "generators": generators})
        except Exception as caught:
            error = caught
    # No rank may run ahead of a write that failed; waiting for rank 0's word is the barrier.
    reason = _from_rank_0(error and f"{type(error).__name__}: {error}".splitlines()[0])
    if reason:
        raise RuntimeError(f"checkpoint {path} was not written: {reason}") from error


def load(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    amp=None,
    scheduler=None,
    any_world_size: bool = False,
) -> dict:
    """Restore everything that `save` wrote, and return {"epoch", "step", "batches_done", "extra"}.

    Every rank must call it, with the same kinds of objects as were saved, after building them and
    before drawing random numbers; every rank reads the file. Raises OSError, RuntimeError for a
    file that is no whole checkpoint, ValueError for one that does not fit this run: another world
    size (random generators and sampler position belong to the ranks that saved them), another
    model, another precision, a scaler or scheduler on one side only. With `any_world_size` another
    number of ranks may go on at the start of an epoch; ranks that are new keep their generators.
    """
    state = read(Path(path))
    if not any_world_size or state["batches_done"]:
        _check_world_size(path, len(state["generators"]))
    _check_parts(path, state, amp, scheduler)
    try:
        _load(_unwrap(model), optimizer, state)
    except RuntimeError as error:
        lines = " ".join(str(error).split())
        raise ValueError(f"{path} is a checkpoint of another model: {lines[:300]}") from None
    for name, part in (("amp", amp), ("scheduler", scheduler)):
        if part is not None:
            part.load_state_dict(state[name])
    if this_rank().rank < len(state["generators"]):
        _set_generators(state["generators"][this_rank().rank])
    return {name: state[name] for name in ("epoch", "step", "batches_done", "extra")}


def _unwrap(model):
    # Saved names must not begin with "module.": the file then fits the model with and without DDP.
    return model.module if isinstance(model, DistributedDataParallel) else model


def _states(model, optimizer, amp, scheduler) -> dict:
    parts = {"model": model, "optimizer": optimizer, "amp": amp, "scheduler": scheduler}
    return {
        name: None if part is None else fsdp.whole(part.state_dict())
        for name, part in parts.items()
    }


def _load(model, optimizer, state):
    if fsdp.is_sharded(model):
        fsdp.load(model, optimizer, state["model"], state["optimizer"])
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def _check_world_size(path, saved):
    world_size = this_rank().world_size
    if saved != world_size:
        raise ValueError(
            f"{path} was saved by {saved} rank(s), this run has {world_size}: a resume needs the "
            f"same number (nproc={saved}). For the weights alone, take torch.load(path)['model']."
        )


def _check_parts(path, state, amp, scheduler):
    for name, part in (("amp", amp), ("scheduler", scheduler)):
        if (part is None) != (state[name] is None):
            has = "no" if state[name] is None else "a"
            raise ValueError(f"{path} has {has} state for `{name}`: load with the parts you saved.")


def _write(path: Path, state: dict) -> None:
    """Replace `path` in one step by a file with this state, once it is on disk and readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        read(temporary)  # a file that no resume can read is better found now
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path) -> dict:
    """Return what `save` wrote; raise OSError or RuntimeError, in one clear line, if it cannot."""
    with open(path, "rb") as file:  # not there, no permission: the OSError says so
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:
            raise RuntimeError(
                f"{path} is damaged, or holds more than numbers, strings, tensors, lists and dicts"
            ) from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise RuntimeError(f"{path} was not written by ddp_course.checkpoint.save")
    return state


def _generators() -> dict:
    name, keys, *rest = numpy.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if (device := this_rank().device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_generators(state: dict) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and (device := this_rank().device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _gather(value) -> list | None:
    """Return every rank's value by rank on rank 0, None elsewhere."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def _from_rank_0(value):
    """Return rank 0's value on every rank."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return box[0]
