"""DistributedDataParallel by hand: the same idea in steps, each short enough to read.

1. `broadcast_model`: every rank begins with rank 0's weights.
2. `average_gradients`: after backward, one all-reduce for each parameter.
3. `average_gradients_flat`: the same in one message.
4. `BucketedDDP`: in buckets, while backward is still running.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

MB = 1024 * 1024


def broadcast_model(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers. Every rank must call it."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks. Every rank must call it, after backward.

    A parameter without a gradient on this rank counts as 0, since the other ranks may have one, and
    all ranks must call the same collectives. Frozen parameters take no part.
    """
    for parameter in trainable(model):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_gradients_flat(model: nn.Module) -> None:
    """Do what `average_gradients` does in one message: latency is paid once, nothing overlaps.

    Every rank must call it, after backward.
    """
    parameters = trainable(model)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    means = flat.split([parameter.numel() for parameter in parameters])
    for parameter, gradient, mean in zip(parameters, gradients, means, strict=True):
        parameter.grad = gradient.copy_(mean.view_as(gradient))


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients; a tied one comes once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class BucketedDDP(nn.Module):
    """A model whose gradients are averaged over the ranks in buckets, during backward.

    Every rank makes it, runs `model(x)`, `loss.backward()`, then `model.finish()`. Buckets hold up
    to `bucket_cap_mb` MiB, filled in the reverse order of registration, as backward goes. `hook`
    and `state` are a DDP communication hook and its state: `hook(state, bucket)` returns a future.

    What is frozen is decided here. A parameter that took no part in a rank's backward counts as 0
    there, and gets the mean (torch's DDP asks for find_unused_parameters=True). Buffers are copied
    from rank 0 once, here (torch's DDP does so before every forward). Raises RuntimeError if all
    parameters are frozen, ValueError for a cap that is not above 0.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25, hook=None, state=None):
        super().__init__()
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be above 0, not {bucket_cap_mb!r}.")
        self.module, self.hook, self.state = module, hook or all_reduce_mean, state
        broadcast_model(module)
        self.buckets = make_buckets(trainable(module)[::-1], bucket_cap_mb * MB)
        if not self.buckets:
            raise RuntimeError("no parameter requires a gradient: there is nothing to average.")
        for bucket in self.buckets:
            for parameter in bucket.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, bucket=bucket: self._collect(parameter, bucket)
                )
        self._sync = self._collecting = True
        self._futures = []

    def forward(self, *args, **kwargs):
        if self._futures or any(bucket.ready for bucket in self.buckets):
            raise RuntimeError("call finish() after backward: the gradients are not averaged yet.")
        self._collecting = self._sync  # decided in the forward, as in torch's DDP
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        """Inside, forward and backward only add to this rank's own gradients."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _collect(self, parameter, bucket) -> None:
        """Called by autograd as soon as a gradient is complete."""
        if not self._collecting:
            return
        if parameter in bucket.ready:
            raise RuntimeError("two backwards in a row: call finish() between them, or no_sync().")
        bucket.add(parameter)
        while (bucket := self._next()) and bucket.full():  # in one order on all ranks
            self._futures.append(self.hook(self.state, bucket))

    def _next(self):
        sent = len(self._futures)
        return self.buckets[sent] if sent < len(self.buckets) else None

    def finish(self) -> None:
        """Wait for the averages and put them into `.grad`. Every rank must call it, after backward.

        Inside `no_sync` it does nothing.
        """
        if not self._collecting:
            return
        while bucket := self._next():  # has parameters that this backward did not use
            bucket.fill_up()
            self._futures.append(self.hook(self.state, bucket))
        for bucket, future in zip(self.buckets, self._futures, strict=True):
            bucket.give_back(future.wait())
        self._futures = []


class Bucket:
    """Gradients of some parameters, one after another in a flat tensor; what hooks are given."""

    def __init__(self, number: int, parameters: list[nn.Parameter], last: bool = False):
        self._number, self._parameters, self._last = number, parameters, last
        total = sum(parameter.numel() for parameter in parameters)
        self._flat = self._sent = parameters[0].new_zeros(total)
        parts = self._flat.split([parameter.numel() for parameter in parameters])
        self._part = {p: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        self.ready = set()

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return list(self._part.values())

    def buffer(self) -> torch.Tensor:
        return self._sent

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._sent = tensor  # compressed, perhaps

    def add(self, parameter) -> None:
        self._part[parameter].copy_(parameter.grad)
        self.ready.add(parameter)

    def full(self) -> bool:
        return len(self.ready) == len(self._parameters)

    def fill_up(self) -> None:
        """Let parameters without a new gradient count with what they have: nothing, or the sum."""
        for parameter in set(self._parameters) - self.ready:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.add(parameter)

    def give_back(self, mean: torch.Tensor) -> None:
        """Put the averages into the parameters' gradients, and begin anew."""
        self._flat.copy_(mean)
        for parameter, part in self._part.items():
            parameter.grad.copy_(part)
        self._sent = self._flat
        self.ready.clear()


def make_buckets(parameters: list[nn.Parameter], cap: float) -> list[Bucket]:
    """Return buckets of at most `cap` bytes, in order; a bigger parameter has one of its own."""
    groups, room = [], 0
    for parameter in parameters:
        size, dtype = parameter.numel() * parameter.element_size(), parameter.dtype
        if size > room or groups[-1][0].dtype != dtype:  # a message is of one type
            groups.append([])
            room = cap
        groups[-1].append(parameter)
        room -= size
    last = len(groups) - 1
    return [Bucket(number, group, number == last) for number, group in enumerate(groups)]


def all_reduce_mean(state, bucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks without waiting: the simplest communication hook."""
    share = bucket.buffer().div_(dist.get_world_size())  # first, so that no sum overflows
    return dist.all_reduce(share, async_op=True).get_future().then(lambda done: done.value()[0])
