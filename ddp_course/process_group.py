"""Who am I: rank, local rank, world size, device, backend. Set up from the environment, tear down.

The environment variables are torchrun's, and `launch` sets the very same ones, so that a training
script does not know (and need not care) which of the two started it.
"""

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import errors as elastic

from . import errors, machine

ALREADY_UP = (
    "the process group is already up: `launch` (or an earlier call) has set it up in this process. "
    "Use it as it is (this_rank(), dist.get_rank()); do not set up a second one."
)


@dataclass(frozen=True)
class Rank:
    """A rank's place: `rank` of `world_size`, `local_rank` of `local_world_size` on its node."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str


def gpus() -> int:
    """Return how many CUDA devices this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cores() -> int:
    """Return the number of whole CPU cores this process may use (affinity, container)."""
    return max(1, int(machine.cores()[1]))


def threads_per_rank(local_ranks: int) -> int:
    """Return the threads for a rank, so that ranks share the cores; OMP_NUM_THREADS decides."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, cores() // local_ranks)


def choose_backend(local_ranks: int, backend: str | None = None) -> tuple[str, str]:
    """Return (backend, note) for this many ranks on this machine; `note` is "" or one line to
    print.

    nccl needs a GPU for each rank. With fewer GPUs than ranks, gloo lets ranks share them; with
    none it runs on the CPU. Raises ValueError for a backend that is unknown or cannot work here.
    """
    count = gpus()
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(
            f"unknown backend {backend!r}: choose 'gloo' (CPU, or GPUs shared by ranks), 'nccl' "
            "(a GPU for each rank), or leave it out to let the machine decide."
        )
    if backend == "nccl" and count < local_ranks:
        have = {0: "no GPU", 1: "1 GPU"}.get(count, f"{count} GPUs")
        raise ValueError(
            f"backend 'nccl' needs one GPU for each rank: {local_ranks} ranks were asked for and "
            f"this machine has {have}. Leave `backend` out, or use 'gloo'."
        )
    if backend is None and count >= local_ranks and dist.is_nccl_available():
        return "nccl", ""
    if backend is None and 0 < count < local_ranks:
        return "gloo", f"{local_ranks} ranks share {count} GPU(s): backend gloo instead of nccl."
    return backend or "gloo", ""


def this_rank(backend: str | None = None) -> Rank:
    """Return this process's `Rank`: from the process group, torchrun's variables, or 0 of 1.

    Works before, inside and after the process group. A device is a GPU where there is one, else the
    CPU; ranks beyond the number of GPUs share them in turn.
    """
    environment = os.environ if _started_as_a_rank() else {}
    local_rank = int(environment.get("LOCAL_RANK", 0))
    local_ranks = int(environment.get("LOCAL_WORLD_SIZE", 1))
    if dist.is_initialized():
        chosen = "nccl" if "nccl" in dist.get_backend() else dist.get_backend()
    else:
        chosen, _ = choose_backend(local_ranks, backend or os.environ.get("DDP_COURSE_BACKEND"))
    rank, world_size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    if dist.is_initialized():  # perhaps by hand, without torchrun's variables
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank, local_ranks = (local_rank, local_ranks) if environment else (rank, world_size)
    count = gpus()
    device = torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    return Rank(rank, local_rank, world_size, local_ranks, device, chosen)


def _started_as_a_rank() -> bool:
    # A kernel can have a stray RANK or WORLD_SIZE of its own: only the whole set counts.
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names)


@contextmanager
def process_group(backend: str | None = None, timeout: float | None = None):
    """Set up the default process group for the body of a `with`, yield this process's `Rank`.

    Every rank must enter it. Under torchrun (and inside `launch`) it joins the other ranks; in a
    plain `python script.py` it makes a group of one. Selects the GPU, if any, and tears the group
    down on every path out. An error in the body is told to torchrun, whose report then shows the
    traceback of the rank that failed first. `timeout` (seconds) is how long a collective may wait.
    Raises RuntimeError if a process group is already up.
    """
    if dist.is_initialized():
        raise RuntimeError(ALREADY_UP)
    me = this_rank(backend)
    if me.device.type == "cuda":
        torch.cuda.set_device(me.device)
    options = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    if not _started_as_a_rank():
        options["store"] = dist.HashStore()
    if me.backend == "nccl":
        options["device_id"] = me.device
    # nccl moves GPU tensors only: CPU tensors then go by gloo.
    backends = "cpu:gloo,cuda:nccl" if me.backend == "nccl" else me.backend
    dist.init_process_group(backends, rank=me.rank, world_size=me.world_size, **options)
    try:
        yield me
        if dist.is_initialized() and me.world_size > 1:
            dist.barrier()  # a rank that leaves early can make gloo abort the others
    except Exception as error:
        _tell_torchrun(error)
        raise
    finally:
        if dist.is_initialized():  # the body may have torn it down itself
            dist.destroy_process_group()


def _tell_torchrun(error: Exception) -> None:
    """Leave the error where torchrun looks for it, unless it only says that a peer has gone.

    torchrun blames the earliest by whole seconds, and of several the lowest rank, which may only
    have lost its peer: so a cause is dated a second back.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or errors.is_consequence([{"text": str(error)}]):
        return
    elastic.get_error_handler().record_exception(error)
    told = json.loads(Path(file).read_text())
    about = told["message"]["extraInfo"]
    about["timestamp"] = str(int(about["timestamp"]) - 1)
    Path(file).write_text(json.dumps(told))
