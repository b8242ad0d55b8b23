"""What each rank did when: spans of compute, communication and waiting, for time lines.

    model.register_comm_hook(None, trace.recorded())    # or trace.recorded(SlowLink(…))
    with trace.span("forward"):
        loss = F.cross_entropy(model(x), y)
    with trace.span("backward"):
        loss.backward()
    with trace.span("optimizer step"):
        optimizer.step()
    return trace.spans()                                # to the notebook, for plots.timeline

A span is a dict: rank, name, start, end (seconds on rank 0's clock); for an all-reduce also bucket
and bytes.
"""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from .process_group import this_rank

COMPUTE = ("forward", "backward", "optimizer step")
COMMUNICATION, WAITING = "all-reduce", "waiting"
ROUNDS = 20  # of a clock comparison: the quickest is the most exact

_recorded: list[dict] = []  # this process's; a rank is a process
_lock = threading.Lock()  # an all-reduce ends on another thread
_handed_over = 0.0  # when the last bucket of the latest backward was ready


@contextmanager
def span(name: str):
    """Record the body of a `with` under a name: "forward", "backward", "optimizer step", "data"…

    A "backward" ends with the last gradient; what follows, until its all-reduces have arrived, is
    recorded as "waiting". Waits for the GPU at both ends, if there is one.
    """
    start = _now()
    try:
        yield
    finally:
        end = _now()
        if name == "backward" and start < _handed_over < end:
            _add(name, start, _handed_over)
            _add(WAITING, _handed_over, end)
        else:
            _add(name, start, end)


def recorded(hook: Callable = allreduce_hook) -> Callable:
    """Return a DDP communication hook that does what `hook` does and records each bucket.

    All-reduces go one after another: a bucket's span begins when it is ready and the one before has
    arrived. It ends when its future completes; with NCCL that is when the GPU has been told to, so
    there look at `profile` (over a `SlowLink` it is when the bytes are there).
    """
    ended = [0.0]

    def recorded_hook(state, bucket):
        global _handed_over
        ready, number, nbytes = time.perf_counter(), bucket.index(), bucket.buffer().nbytes
        if bucket.is_last():
            _handed_over = ready

        def arrived(done):
            end = time.perf_counter()
            _add(COMMUNICATION, max(ready, ended[0]), end, bucket=number, bytes=nbytes)
            ended[0] = end
            return done.value()

        return hook(state, bucket).then(arrived)

    return recorded_hook


def clear() -> None:
    """Forget what this rank has recorded: call it after the warm-up steps."""
    with _lock:
        _recorded.clear()


def spans() -> list[dict]:
    """Return this rank's spans on rank 0's clock, by start. Every rank must call it."""
    rank, (shift, uncertainty) = this_rank().rank, clock_offset()
    if abs(shift) <= uncertainty:
        shift = 0.0  # as far as this can tell it is one clock: a shift would only add noise
    with _lock:
        found = sorted(_recorded, key=lambda span: span["start"])
    return [
        {"rank": rank} | span | {"start": span["start"] + shift, "end": span["end"] + shift}
        for span in found
    ]


def clock_offset() -> tuple[float, float]:
    """Return (seconds to add to this rank's clock for rank 0's, how far off that may be).

    Every rank must call it. As in NTP (Mills, 1991): a message to rank 0 and back, sent at a,
    answered at b by rank 0's clock, back at c, gives b − (a + c) / 2, wrong by at most (c − a) / 2.
    The quickest of some rounds counts. On one machine all processes share a clock.
    """
    if not dist.is_initialized():
        return 0.0, 0.0
    found = (0.0, 0.0)
    for rank in range(1, dist.get_world_size()):  # one after another: rank 0 answers at once
        if dist.get_rank() == 0:
            _answer(rank)
        elif dist.get_rank() == rank:
            found = min((_ask() for _ in range(ROUNDS)), key=lambda measured: measured[1])
    return found


def _ask() -> tuple[float, float]:
    clock = _message()
    sent = time.perf_counter()
    dist.send(clock, 0)
    dist.recv(clock, 0)
    answered, back = clock.item(), time.perf_counter()
    return answered - (sent + back) / 2, (back - sent) / 2


def _answer(rank: int) -> None:
    clock = _message()
    for _ in range(ROUNDS):
        dist.recv(clock, rank)
        clock.fill_(time.perf_counter())
        dist.send(clock, rank)


def _message() -> torch.Tensor:
    device = "cpu" if dist.get_backend() == "gloo" else this_rank().device
    return torch.zeros(1, dtype=torch.float64, device=device)


def seconds(spans: list[dict], *names: str) -> float:
    """Return how long one rank's spans of these names last together, doubly covered time once."""
    return sum(end - start for start, end in _union(spans, names))


def overlap(spans: list[dict]) -> float:
    """Return the share of the communication time of all ranks that runs while the rank computes.

    Seconds of all-reduce under forward, backward or optimizer step / all seconds of all-reduce:
    from 0 to 1. Raises ValueError if no all-reduce was recorded.
    """
    together = total = 0.0
    for rank in sorted({span["rank"] for span in spans}):
        own = [span for span in spans if span["rank"] == rank]
        hidden = hidden_parts(own)
        together += sum(end - start for start, end in hidden)
        total += seconds(own, COMMUNICATION)
    if not total:
        raise ValueError("no all-reduce was recorded: register_comm_hook(None, trace.recorded()).")
    return together / total


def hidden_parts(spans: list[dict]) -> list[tuple[float, float]]:
    """Return where one rank communicates and computes at once, as (start, end), in order."""
    sends, works = _union(spans, (COMMUNICATION,)), _union(spans, COMPUTE)
    pairs = ((max(a, c), min(b, d)) for (a, b), (c, d) in itertools.product(sends, works))
    return [(start, end) for start, end in pairs if start < end]


def _union(spans, names) -> list[tuple[float, float]]:
    """The time that spans of these names cover, as intervals in order that do not touch."""
    merged = []
    for start, end in sorted((s["start"], s["end"]) for s in spans if s["name"] in names):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


@contextmanager
def profile(folder: str | Path):
    """Save what torch's profiler sees in the body as `folder`/rank0.json, rank1.json, …

    Yields the profiler. Rank 0 prints where the files are and how to open them.
    """
    me, folder = this_rank(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if me.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield profiler
    profiler.export_chrome_trace(str(folder / f"rank{me.rank}.json"))
    if me.rank == 0:
        print(f"Open https://ui.perfetto.dev and drop {folder}/rank0.json on it (or all of them).")


def _now() -> float:
    if this_rank().device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _add(name: str, start: float, end: float, **more) -> None:
    with _lock:
        _recorded.append({"name": name, "start": start, "end": end} | more)
