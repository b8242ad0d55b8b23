"""A DDP that notes how it is used, for functions that turn a window into a gradient."""

import math
import re
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from ..compare import factor, is_times, off, tell
from ..exercise import calls, same_calls

CLOSE = (1e-6, 1e-7)  # of gradients: a count may be divided in float32

_FLOATS = re.compile(r"float\w*\[([\d, ]*)\]")


CLIPPED = (
    "it is parallel to the right one, but shorter, as if clipped: clipping is the caller's, once, "
    "after the window."
)
CLEARED = (
    "a second window does not add to the gradients of the first: leave zero_grad to the caller, "
    "who clips and steps before it clears."
)
SHORT = (
    "the gradient is right, but after a second window it is shorter than the sum of both, as if "
    "all of .grad had been clipped, or divided. Clipping is the caller's, once, after the window."
)
CHANGED = (
    "a second window does not add to the gradients of the first: what was in .grad has to stay, "
    "neither cleared nor clipped nor divided."
)


class Forwards:
    """Notes of a model's forwards: the samples of each, and the graphs that wait for backward."""

    def __init__(self):
        self.sizes, self.open, self.most_open = [], 0, 0

    def note(self, x, output) -> None:
        self.sizes.append(len(x))
        if output.requires_grad:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            output.register_hook(self._freed)

    def _freed(self, gradient):
        self.open -= 1

    def notes(self) -> dict:
        return {"sizes": list(self.sizes), "most_open": self.most_open}


class NotedDDP(DistributedDataParallel):
    """DDP in small buckets that have settled, with notes on forwards, `no_sync` and open graphs.

    Its first two backwards are run here, on `inputs`: DDP orders its buckets after the first.
    """

    def __init__(self, module, *inputs):
        super().__init__(module, bucket_cap_mb=0.0002)  # 209 bytes: several buckets
        self.forget()
        for _ in range(2):
            self(*inputs).sum().backward()
        self.zero_grad()
        self.forget()

    def forget(self):
        self.forwards, self.entered = Forwards(), 0
        self.syncing = []  # of each forward: would its backward all-reduce?

    @contextmanager
    def no_sync(self):
        self.entered += 1
        with super().no_sync():
            yield

    def forward(self, *inputs):
        self.syncing.append(self.require_backward_grad_sync)
        output = super().forward(*inputs)
        self.forwards.note(inputs[0], output)
        return output

    def notes(self) -> dict:
        """Return what was noted, as plain data."""
        return {
            "syncing": list(self.syncing),
            "entered": self.entered,
            **self.forwards.notes(),
            "left_on": self.require_backward_grad_sync,
        }


def gradients(model) -> dict[str, torch.Tensor]:
    """Return the gradients of what is not frozen, by name; zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def flat(named: dict) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in named.values()])


def watch(fn, bare, window) -> dict:
    """Call a student's function with `bare` in DDP and a window, twice; return what came of it.

    The second window comes without zero_grad, so that its gradient should add to the first's.
    """
    model = NotedDDP(bare, window[0][0])
    before, called = [p.detach().clone() for p in bare.parameters()], len(calls())
    loss = fn(model, window)
    number = isinstance(loss, int | float | torch.Tensor)
    told = {
        "collectives": calls()[called:],
        "notes": model.notes(),
        "window": [len(x) for x, _ in window],
        "gradients": gradients(bare),
        "moved": any(not p.equal(old) for p, old in zip(bare.parameters(), before, strict=True)),
        "loss": float(getattr(loss, "detach", lambda: loss)()) if number else None,
        "graph": bool(getattr(loss, "requires_grad", False)),
    }
    fn(model, window)
    return told | {"twice": gradients(bare)}


# ---- in the parent


def judge(outputs, wanted: torch.Tensor, misconception) -> str | None:
    """Say what is wrong with the gradients, or on the way to them, from what `watch` told.

    `wanted`: the gradient, flat. `misconception(output, rank)` says what a wrong one looks like.
    """
    for rank, output in reversed(list(enumerate(outputs))):
        if output["moved"]:
            return f"rank {rank}: it changes the weights: stepping is the optimizer's job."
        mine = output["gradients"]
        parts = wanted.split([gradient.numel() for gradient in mine.values()])
        for (name, gradient), part in zip(mine.items(), parts, strict=True):
            right = part.view_as(gradient)
            if off(gradient, right, *CLOSE) is not None:
                told = tell(f"the gradient of {name}", rank, gradient, right, CLOSE[1])
                return f"{told}\n{misconception(output, rank)}"
    for rank, output in enumerate(outputs):
        if wrong := _wrong_use(output, wanted.numel()):
            return f"rank {rank}: {wrong}"
        if wrong := not_added(flat(output["twice"]), wanted):
            return f"rank {rank}: {wrong}"
    return same_calls(outputs)


def clipped(first: torch.Tensor, twice: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Say whether a gradient is too short, and after a second window less than twice as long."""
    times, growth = factor(first, wanted), factor(twice, first)
    return None not in (times, growth) and 0 < times < 1 and growth < 2 - 1e-5


def not_added(twice: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Say why the gradient after two equal windows is not two times `wanted`, or None."""
    if off(twice, 2 * wanted, *CLOSE) is None:
        return None
    if is_times(twice, wanted, 1):
        return CLEARED
    times = factor(twice, wanted)
    if times is not None and 1 < times < 2:
        return SHORT
    return CHANGED


def too_much_memory(notes: dict, window: list[int]) -> str | None:
    """Say that more than a micro-batch was held at once; `window`: the micro-batches' sizes."""
    if max(notes["sizes"], default=0) > max(window):
        return "one forward took several micro-batches at once: that is the batch that did not fit."
    if notes["most_open"] > 1:
        return (
            f"{notes['most_open']} micro-batches waited for their backward at the same time, which "
            "keeps the activations of all of them: call backward() for each before the next."
        )
    return None


def _rounds(collectives: list[str], parameters: int) -> int:
    """Return how often all gradients crossed, from the floats in what `calls` tells.

    A few numbers more, such as a count or a loss, make no round.
    """
    sizes = [size for call in collectives for size in _FLOATS.findall(call)]
    floats = sum(math.prod(int(n) for n in size.split(",") if n.strip()) for size in sizes)
    return round(floats / parameters)


def not_reduced(notes: dict) -> str:
    """Say why a rank was left with its own gradient."""
    syncing = notes["syncing"]
    if not syncing:
        return "the forward went round DDP. Call ddp_model(x), not ddp_model.module(x)."
    if not any(syncing):
        return (
            f"all {len(syncing)} micro-batches, the last one too, ran inside no_sync, so nothing "
            "was all-reduced."
        )
    return "nothing was all-reduced."


def _wrong_use(output: dict, parameters: int) -> str | None:
    notes, times = output["notes"], _rounds(output["collectives"], parameters)
    if times > 1:
        return (
            f"the gradient is right, but all gradients crossed {times} times, where once is "
            f"enough. {_why_so_often(notes)}"
        )
    if wrong := too_much_memory(notes, output["window"]):
        return wrong
    if not notes["left_on"]:
        return "it leaves synchronisation off: the caller's next backward would not all-reduce."
    return None


def _why_so_often(notes) -> str:
    if notes["syncing"] and not any(notes["syncing"][:-1]):
        return "An all-reduce by hand comes on top of DDP's own: leave it out."
    if notes["entered"]:
        return (
            "no_sync was used, but the forwards ran outside it: DDP decides in the forward whether "
            "the backward will all-reduce."
        )
    return "Every micro-batch all-reduced: all but the last belong into ddp_model.no_sync()."
