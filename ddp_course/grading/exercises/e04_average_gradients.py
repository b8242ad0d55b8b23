"""04 · average_gradients(model): DDP's second half, by hand."""

import torch
from torch import nn

from ..compare import is_times, off, tell
from ..exercise import Case, Exercise, calls, generator, same_calls


class _Net(nn.Module):
    """A frozen layer, two layers with tied weights, a bias, and a branch that may go unused."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(4, 5).requires_grad_(False)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.branch = nn.Linear(5, 5)
        self.double()

    def forward(self, x, branch: bool):
        x = torch.tanh(self.second(torch.tanh(self.first(self.frozen(x)))))
        return self.branch(x) if branch else x


def _uses_branch(kind: str, rank: int, world_size: int) -> bool:
    return kind == "all" or (kind == "some" and rank == world_size - 1)


def _backward(kind: str, rank: int, world_size: int, seed: int) -> _Net:
    """Return the model with this rank's own gradients: the same weights, other data."""
    model = _Net(seed)
    x = torch.randn(3 + rank, 4, generator=generator(seed, rank), dtype=torch.float64)
    model(x, _uses_branch(kind, rank, world_size)).square().sum().backward()
    return model


def _gradients(model) -> dict:
    return {
        name: "none" if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        model = _backward(kind, rank, world_size, seed)
        before = [p.detach().clone() for p in model.parameters()]
        called = len(calls())
        fn(model)
        after = list(model.parameters())
        moved = any(not a.equal(b) for a, b in zip(after, before, strict=True))
        return {"gradients": _gradients(model), "moved": moved, "collectives": calls()[called:]}

    return run


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        models = [_backward(kind, rank, world_size, seed) for rank in range(world_size)]
        locals_ = [_gradients(model) for model in models]
        frozen = {n for n, p in models[0].named_parameters() if not p.requires_grad}
        for rank, output in reversed(list(enumerate(outputs))):  # on rank 0 its own is rank 0's
            if output["moved"]:
                return f"rank {rank}: it changes the weights. Average the gradients, in p.grad."
            for name, mine in output["gradients"].items():
                own = [grads[name] for grads in locals_]
                if name in frozen and not isinstance(mine, str):
                    return f"rank {rank}: {name} is frozen, and now has a gradient{_NOT_NONE}"
                if wrong := _wrong(name, rank, mine, own, world_size):
                    return wrong
        if world_size > 1 and not outputs[0]["collectives"]:
            return "no rank called a collective, and yet the gradients are right: by which way?"
        return same_calls(outputs)

    return judge


_NOT_NONE = (
    ". Its .grad must stay None, not become zeros: an optimizer steps what has a gradient, and its "
    "weight decay moves a weight also where the gradient is 0."
)


def _wrong(name, rank, mine, own, world_size) -> str | None:
    there = [gradient for gradient in own if isinstance(gradient, torch.Tensor)]
    if not there:  # used nowhere: None and zeros are both a mean of nothing
        if isinstance(mine, str) or not mine.any():
            return None
        return f"rank {rank}: {name} takes no part in the training, and now has a gradient."
    zeros = torch.zeros_like(there[0])
    local = [zeros if isinstance(gradient, str) else gradient for gradient in own]
    mean = sum(local) / world_size
    if isinstance(mine, str):
        return (
            f"rank {rank}: {name} has no gradient, but another rank has one: it counts as 0 here, "
            "and the mean belongs into every rank's p.grad."
        )
    if mine.shape == mean.shape and off(mine, mean) is None:
        return None
    what = f"the gradient of {name}"
    return f"{tell(what, rank, mine, mean)}\n{_misconception(mine, mean, local, rank)}".rstrip()


def _misconception(mine, mean, local, rank) -> str:
    world_size = len(local)
    used = sum(bool(gradient.any()) for gradient in local)
    if used < world_size and is_times(mine, mean, world_size / used):
        return (
            f"It was divided by {used}, the ranks that used this parameter, not by all "
            f"{world_size}: DDP's mean is over all ranks, so that the result is the mean over all "
            "the data."
        )
    if is_times(mine, mean, world_size):
        return f"It is the sum, {world_size}× the mean: it was not divided by the world size."
    if off(mine, local[rank]) is None:
        return (
            "It is this rank's own gradient still: was p.grad itself all-reduced, or a copy of it?"
        )
    if off(mine, local[rank] / world_size) is None:
        return "It is this rank's own gradient, divided: it was never added up over the ranks."
    if is_times(mine, mean, 1 / world_size):
        return "It is too small by the world size: it was divided twice."
    if off(mine, local[0]) is None:
        return "It is rank 0's: a broadcast copies one rank's gradient, it does not average."
    stacked = torch.stack(local)
    if off(mine, stacked.amax(0)) is None or off(mine, stacked.median(0).values) is None:
        return "It is the maximum or the median over the ranks: the mean is asked for."
    return ""


_UNUSED = (
    "Likely: a parameter that this rank did not use has p.grad None here, so this rank skips an "
    "all_reduce that the others call. All ranks must call the same ones: let None count as zeros."
)

EXERCISE = Exercise(
    "04_average_gradients",
    "average_gradients",
    ("model",),
    (
        Case("every rank uses every parameter", 3, _run("all"), _judge("all"), (2, 3)),
        Case("alone", 1, _run("all"), _judge("all"), (1,)),
        Case("a branch that nobody used", 2, _run("none"), _judge("none"), (2,)),
        Case("a branch that one rank used", 3, _run("some"), _judge("some"), (2, 3), _UNUSED),
    ),
)
