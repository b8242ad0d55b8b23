"""A collective built by hand from send and receive, and what a collective costs.

ring_steps, ring_all_reduce    the sum over all ranks, along a ring
seconds_of, fit                the time of a collective, and its model α + β·n
algorithm_bandwidth, bus_bandwidth
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .process_group import this_rank
from .scaling import wait_for_device


@dataclass(frozen=True)
class Step:
    """What one rank did in one step of the ring: `number` counts from 1, chunks from 0."""

    number: int
    phase: str  # "reduce-scatter" or "all-gather"
    sent: int  # the chunk that went to rank + 1
    received: int  # the chunk that came from rank − 1
    sent_bytes: int


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` by its sum over all ranks, bit for bit the same on each.

    Every rank must call it, with the same shape and type. A rank sends 2 (N − 1) / N times the
    tensor's bytes, the least that an all-reduce can do with (Patarasuk and Yuan, Bandwidth optimal
    all-reduce algorithms for clusters of workstations, 2009). Raises TypeError or ValueError for
    what is not a contiguous tensor of numbers.
    """
    for _ in ring_steps(tensor):
        pass


def ring_steps(tensor: torch.Tensor) -> Iterator[Step]:
    """Do the same one step at a time: yield a `Step` after each of the 2 (N − 1) steps.

    Every rank must take all of the steps: the sum is there after the last one.
    """
    _check(tensor)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.detach().view(-1).tensor_split(world_size)  # views: to change one is in place
    arrived = torch.empty_like(chunks[0])  # no chunk is longer than the first
    for number in range(1, 2 * world_size - 1):
        adding = number < world_size
        # A chunk goes round once to be added up, then once more as the finished sum.
        sent, received = (rank + 1 - number) % world_size, (rank - number) % world_size
        target = arrived[: len(chunks[received])] if adding else chunks[received]
        _exchange(chunks[sent], right, target, left)
        if adding:
            chunks[received].add_(target)
        phase = "reduce-scatter" if adding else "all-gather"
        yield Step(number, phase, sent, received, chunks[sent].nbytes)


def _exchange(outgoing, right: int, incoming, left: int) -> None:
    """Send and receive at once: if all ranks only sent first, all would wait for ever."""
    calls = []
    if outgoing.numel():
        calls.append(dist.P2POp(dist.isend, outgoing, right))
    if incoming.numel():
        calls.append(dist.P2POp(dist.irecv, incoming, left))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


def _check(tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a ring all-reduce adds up a tensor, not {type(tensor).__name__}.")
    if tensor.dtype == torch.bool:
        raise TypeError("a tensor of truth values has no sum: convert it first, x.int().")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: reduce a copy of it, x.contiguous().")


# ---- what a collective costs


def seconds_of(
    collective: Callable[[torch.Tensor], object], nbytes: int, repeats: int = 7, warmup: int = 2
) -> float:
    """Return the median time of `collective(x)` on a float32 tensor of `nbytes`, in seconds.

    A collective has ended when it has ended everywhere: each time is the maximum over ranks. Every
    rank must call this, and all return the same. Raises ValueError for sizes and counts too small.
    """
    if nbytes < 4 or repeats < 1 or warmup < 0:
        raise ValueError(
            f"nbytes={nbytes}, repeats={repeats}, warmup={warmup}: at least 4, 1 and 0 are needed."
        )
    device = this_rank().device if this_rank().backend == "nccl" else torch.device("cpu")
    tensor, times = torch.empty(nbytes // 4, device=device), []
    for _ in range(warmup + repeats):
        tensor.fill_(1)  # a sum of sums would overflow in time
        dist.barrier()
        wait_for_device()
        start = time.perf_counter()
        collective(tensor)
        wait_for_device()
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[warmup:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.median().item()


@dataclass(frozen=True)
class Cost:
    """seconds(n) = α + β·n: `alpha` in seconds, `beta` in seconds per byte."""

    alpha: float
    beta: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes

    @property
    def crossover(self) -> float:
        """The bytes at which latency and transfer take equally long, α / β."""
        return self.alpha / self.beta if self.beta else math.inf


def fit(points: list[tuple[float, float]]) -> Cost:
    """Return the `Cost` nearest to measured (bytes, seconds), by least squares.

    Errors are relative to each time, or the largest size alone would decide; neither α nor β gets
    negative. The model is Hockney's (Parallel Computing 20, 1994). Raises ValueError for fewer
    than two sizes, or times that are not above 0.
    """
    sizes, times = [size for size, _ in points], [seconds for _, seconds in points]
    if len(set(sizes)) < 2 or min(times) <= 0 or min(sizes) < 0:
        raise ValueError("a fit needs (bytes, seconds) for two sizes at least, seconds above 0.")
    # (α + β·n − t) / t: the columns 1/t and n/t should add up to 1
    ones, slopes = [1 / t for t in times], [n / t for n, t in points]
    aa, bb, ab = _dot(ones, ones), _dot(slopes, slopes), _dot(ones, slopes)
    a1, b1 = sum(ones), sum(slopes)
    determinant = aa * bb - ab * ab
    alpha, beta = (bb * a1 - ab * b1) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0:
        return Cost(0.0, b1 / bb)
    return Cost(a1 / aa, 0.0) if beta < 0 else Cost(alpha, beta)


def _dot(a, b) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def algorithm_bandwidth(nbytes: float, seconds: float) -> float:
    """Return the bytes that were reduced per second, as the caller sees it."""
    return nbytes / seconds


def bus_bandwidth(nbytes: float, seconds: float, world_size: int) -> float:
    """Return the bytes per second that each rank sent, if it sent no more than it must.

    2 (N − 1) / N times the algorithm bandwidth of an all-reduce: comparable with a link's speed for
    any number of ranks (PERFORMANCE.md of NVIDIA's nccl-tests).
    """
    return algorithm_bandwidth(nbytes, seconds) * 2 * (world_size - 1) / world_size
