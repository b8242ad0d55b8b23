"""Gradient accumulation: windows of micro-batches, one gradient all-reduce and one step for each.

    for window in windows(loader, accumulation_steps):
        divisor = window.divisor()
        for x, y in accumulate(model, window):
            loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

steps with the gradient of the mean loss over the global window, on however many ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from .process_group import this_rank


def len_of_targets(y: torch.Tensor) -> int:
    """Return the number of targets: samples for labels [N], tokens for text [N, T]."""
    return y.numel()


class Window(list):
    """This rank's micro-batches (x, y) of one optimizer step; `samples` counts their targets."""

    def __init__(self, micro_batches: Iterable = (), count: Callable = len_of_targets):
        super().__init__(micro_batches)
        self.samples = sum(int(count(y)) for _, y in self)

    def divisor(self) -> float:
        """Return global count / world_size, to divide a summed loss by. Every rank must call it.

        DDP averages gradients over ranks, Σ_r g_r / world_size. With g_r the gradient of (rank r's
        summed loss) / divisor this is the gradient of (sum over all ranks) / (count over all
        ranks): the mean over the global window, also when ranks hold different counts. Without a
        process group: this window's own count. Raises ValueError, on every rank, if no rank has a
        target.
        """
        count = torch.tensor(self.samples, dtype=torch.int64, device=this_rank().device)
        world_size = 1
        if dist.is_initialized():
            dist.all_reduce(count)
            world_size = dist.get_world_size()
        if count == 0:
            raise ValueError("no rank has a target in this window: its mean loss does not exist.")
        return count.item() / world_size


def windows(
    loader: Iterable, accumulation_steps: int, count: Callable = len_of_targets
) -> Iterator[Window]:
    """Iterate over a loader's (x, y) in windows of `accumulation_steps` micro-batches, in order.

    The last window holds what is left, and its own count: nothing is dropped. `count(y)` says how
    many targets a micro-batch has; pass your own where some do not count, such as padding. All
    ranks must get equally many windows (`shard` sees to it). Raises ValueError at once for a bad
    number of steps.
    """
    steps = accumulation_steps
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"accumulation_steps must be a whole number of at least 1, not {steps!r}.")
    return _windows(loader, steps, count)


def _windows(loader, steps, count):
    batches = iter(loader)
    while window := Window(itertools.islice(batches, steps), count):
        yield window


def accumulate(model: nn.Module, window: list) -> Iterator:
    """Iterate over a window's micro-batches, all but the last inside `model.no_sync()`.

    Do forward and backward inside the loop: DDP decides in the forward whether the backward will
    all-reduce. Local gradients add up; the last backward all-reduces the sum, once per bucket. A
    model without `no_sync` is used as it is. When the loop breaks or raises, DDP synchronises again
    as it did before, provided that you wrote `for … in accumulate(…)` and kept no name for the
    iterator.
    """
    with getattr(model, "no_sync", nullcontext)():
        yield from window[:-1]
    yield from window[-1:]
