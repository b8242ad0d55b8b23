"""How well training scales: honest times, efficiency, and a step's time predicted beforehand.

step_times                        what each step took, for the slowest rank
samples_per_second, efficiency    what a report needs
amdahl, serial_share              what cannot be shared out, and how much of it there is
predict                           a DDP step from its compute, its buckets and the network
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .process_group import this_rank


def step_times(step: Callable[[], object], steps: int = 10, warmup: int = 3) -> list[float]:
    """Return the seconds of each of `steps` calls of `step()`, on the rank that took longest.

    The first `warmup` calls do not count. Ranks begin each step together, and the device has
    finished whenever the clock is read. Every rank must call this, and all return the same. Raises
    ValueError for counts too small.
    """
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps={steps}, warmup={warmup}: at least 1 and 0 are needed.")
    times = []
    for _ in range(warmup + steps):
        if dist.is_initialized():
            dist.barrier()
        wait_for_device()
        start = time.perf_counter()
        step()
        wait_for_device()
        times.append(time.perf_counter() - start)
    device = this_rank().device if this_rank().backend == "nccl" else "cpu"
    slowest = torch.tensor(times[warmup:], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def wait_for_device() -> None:
    """Return when this rank's GPU, if there is one, has done all that it was asked to do."""
    if this_rank().device.type == "cuda":
        torch.cuda.synchronize()


def samples_per_second(micro_batches: list[int], seconds: float) -> float:
    """Return the samples of all ranks in a step, each counted once, per second."""
    return sum(micro_batches) / seconds


def efficiency(alone: float, together: float, ranks: int, kind: str) -> float:
    """Return which share of `ranks` times one rank's work gets done: 1 is perfect.

    `alone`, `together`: seconds of a step of one rank and of `ranks`. "strong": all share one
    batch, which one rank had to itself, alone / (ranks · together). "weak": each has a batch as
    large as that of the one, alone / together. Raises ValueError for another kind.
    """
    if kind not in ("strong", "weak"):
        raise ValueError(f'kind is "strong" (one batch shared) or "weak" (one each), not {kind!r}.')
    return alone / together / (ranks if kind == "strong" else 1)


def amdahl(serial: float, ranks: int) -> float:
    """Return the speed-up of `ranks` if a share `serial` of the work cannot be shared out.

    1 / (serial + (1 − serial) / ranks), less than 1 / serial for any number (Amdahl, 1967).
    """
    return 1 / (serial + (1 - serial) / ranks)


def serial_share(speedup: float, ranks: int) -> float:
    """Return the share of the work that was not shared out, from a measured speed-up.

    (1 / speedup − 1 / ranks) / (1 − 1 / ranks): Amdahl's law the other way round (Karp and Flatt,
    1990). If it grows with the ranks, it is communication and not serial work. Raises ValueError
    for fewer than two ranks.
    """
    if ranks < 2:
        raise ValueError("with one rank nothing is shared out: measure two or more.")
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


@dataclass(frozen=True)
class Step:
    """A DDP step in seconds: `compute`, `wire` (all-reduces), `waiting` (those not hidden)."""

    compute: float
    wire: float
    waiting: float

    @property
    def seconds(self) -> float:
        return self.compute + self.waiting

    @property
    def share(self) -> float:
        """The share of the step in which it only waits for communication."""
        return self.waiting / self.seconds


def predict(
    forward: float, backward: float, buckets: list[int], seconds: Callable, rest: float = 0.0
) -> Step:
    """Return what a step should take: `forward`, `backward`, `rest` (the optimizer) in seconds.

    `buckets`: bytes of each, in the order in which backward fills them; `seconds(nbytes)` of an
    all-reduce: `cost.seconds` of `collectives.fit`, or `link.seconds`. A bucket is ready when its
    share of backward is done, as if every byte took equally long, and goes when the one before has
    arrived. For networks that leave the processor alone: where the ranks' cores do the sending,
    nothing is hidden, so give all bytes as one bucket.
    """
    total, done, free = sum(buckets), 0, 0.0
    for nbytes in buckets:
        done += nbytes
        free = max(forward + backward * done / total, free) + seconds(nbytes)
    wire, computed = sum(seconds(nbytes) for nbytes in buckets), forward + backward
    return Step(computed + rest, wire, max(0.0, free - computed))
