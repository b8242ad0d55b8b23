"""A slow link between ranks, as a DDP communication hook: a network that a student can dial.

    link = SlowLink(gbit(1), latency=50e-6)
    model.register_comm_hook(None, link)                           # plain
    model.register_comm_hook(None, fp16_compress_wrapper(link))    # torch's wrapper, half the bytes
    model.register_comm_hook(None, bf16_compress_wrapper(link))    # ours: torch's refuses a CPU
    model.register_comm_hook(state, power_sgd(link))               # state: torch's PowerSGDState
    link.bandwidth = mbit(100)                                     # at any time

The gradients are really all-reduced; what is modelled is when they have arrived. Loopback is faster
than any network, so the wait is added: backward goes on meanwhile, as it would on a cluster.
"""

import math
import queue
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def gbit(per_second: float) -> float:
    """Return gigabits per second as bytes per second: 1 Gbit/s is 125 million bytes."""
    return per_second * 1e9 / 8


def mbit(per_second: float) -> float:
    """Return megabits per second as bytes per second."""
    return per_second * 1e6 / 8


class SlowLink:
    """A DDP communication hook whose all-reduces take as long as on a network of this speed.

    `bandwidth` in bytes/s and `latency` in seconds a message; both can be changed while it trains.
    A bucket begins when it is ready and the one before it has arrived: there is one link, and
    messages queue. Each rank times its own end of it. Make one on every rank. Raises ValueError for
    a bandwidth that is not above 0 or a latency below 0.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0):
        self.bandwidth, self.latency = bandwidth, latency
        self.__name__ = self.__qualname__ = "SlowLink"  # DDP asks its hooks for their names
        self._waiting = None

    @property
    def bandwidth(self) -> float:
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, value: float):
        if not _is_number(value) or not value > 0:
            raise ValueError(f"bandwidth is in bytes per second and above 0, not {value!r}.")
        self._bandwidth = value

    @property
    def latency(self) -> float:
        return self._latency

    @latency.setter
    def latency(self, value: float):
        if not _is_number(value) or not 0 <= value < math.inf:
            raise ValueError(f"latency is in seconds and at least 0, not {value!r}.")
        self._latency = value

    def seconds(self, nbytes: int, world_size: int | None = None) -> float:
        """Return how long a ring all-reduce of `nbytes` takes on this link.

        2 (N − 1) steps one after another, in each of which every rank sends nbytes / N:
        2 (N − 1) · latency + 2 (N − 1) / N · nbytes / bandwidth (Patarasuk and Yuan, 2009).
        `world_size` defaults to that of the process group.
        """
        ranks = dist.get_world_size() if world_size is None else world_size
        return 2 * (ranks - 1) * (self.latency + nbytes / ranks / self.bandwidth)

    def __call__(self, state, bucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the ranks: the future completes when its bytes have arrived."""
        buffer = bucket.buffer()
        return self.deliver(
            allreduce_hook(None, bucket), self.seconds(buffer.nbytes), buffer.device
        )

    def deliver(self, future, seconds: float, device=None) -> torch.futures.Future:
        """Return a future with the result of `future`, `seconds` after the link is free for it."""
        if self._waiting is None:  # not before a rank sends: a link can travel to it
            self._waiting = queue.SimpleQueue()
            threading.Thread(target=self._carry, daemon=True).start()
        on_gpu = device is not None and device.type == "cuda"
        arrived = torch.futures.Future(devices=[device] if on_gpu else None)
        event = torch.cuda.current_stream(device).record_event() if on_gpu else None
        self._waiting.put((time.perf_counter(), event, seconds, future, arrived))
        return arrived

    def _carry(self) -> None:
        """Deliver messages one after another, for as long as the process lives."""
        free = 0.0
        while True:
            ready, event, seconds, future, arrived = self._waiting.get()
            if event is not None:  # a GPU computes later than Python asks for it
                event.synchronize()
                ready = time.perf_counter()
            free = max(ready, free) + seconds
            try:
                value = future.wait()
                if event is not None:
                    torch.cuda.current_stream(value.device).synchronize()
                time.sleep(max(0.0, free - time.perf_counter()))
                arrived.set_result(value)
            except Exception as error:
                arrived.set_exception(error)
            free = max(free, time.perf_counter())  # the other ranks may have been late


def bf16_compress_wrapper(hook: Callable) -> Callable:
    """Return a hook that casts a bucket to bfloat16, half the bytes, and runs `hook` on that.

    The same as torch's wrapper of this name, which works with NCCL only.
    """

    def bf16_wrapper(state, bucket):
        original = bucket.buffer()
        bucket.set_buffer(original.to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: original.copy_(done.value()))

    return bf16_wrapper


def bf16_compress_hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as bfloat16 numbers; a DDP communication hook that works on gloo too."""
    return bf16_compress_wrapper(allreduce_hook)(None, bucket)


bf16_compress_hook.__name__ = "bf16_hook"  # by torch's name DDP would refuse it on a CPU


def power_sgd(link: SlowLink) -> Callable:
    """Return torch's PowerSGD hook with its messages on `link`; its state is a PowerSGDState.

    On gloo for one bucket (bucket_cap_mb large): of several it mixes up the messages.
    Raises TypeError, when first called, for another state.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

    def power_sgd_hook(state, bucket):
        if not isinstance(state, torchs.PowerSGDState):
            raise TypeError("register_comm_hook(PowerSGDState(None, …), power_sgd(link))")
        buffer, before = bucket.buffer(), state.total_numel_after_compression
        future = torchs.powerSGD_hook(state, bucket)
        sent = state.total_numel_after_compression - before  # 0 while it does not yet compress
        numbers, messages = (sent, 3) if sent else (buffer.numel(), 1)  # vectors, then P, then Q
        one = link.seconds(numbers * buffer.element_size() / messages)
        return link.deliver(future, messages * one, buffer.device)

    return power_sgd_hook


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
