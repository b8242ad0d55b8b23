"""13 · zero1_optimizer(parameters, settings): Adam with its state shared out over the ranks."""

import math
import re
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..compare import many, off, tell
from ..exercise import Case, Exercise, calls, generator, same_calls

# A large eps, so that the scale of a gradient counts: with a small one Adam all but ignores it.
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 0.3, "weight_decay": 0.2}
STEPS = 4
CLOSE = (1e-8, 1e-9)
_FLOATS = re.compile(r"float\w*\[([\d, ]*)\]")


@dataclass(frozen=True)
class Plan:
    """Shapes of the parameters; `frozen` says which one is not trained, `unused` leaves gaps."""

    shapes: tuple = ((4, 3), (6,), (3, 4), (2,))  # 32 numbers
    frozen: int = -1
    unused: bool = False


UNEVEN = ((9, 5), (7,), (3,), (2, 2))  # 52 numbers without the frozen one, of which one has 45
PLANS = {
    "even": Plan(),
    "uneven": Plan(UNEVEN, frozen=1),
    "unused": Plan(UNEVEN, frozen=1, unused=True),
}


def _parameters(plan: Plan, seed: int) -> list[torch.nn.Parameter]:
    draw = generator(seed)
    drawn = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in plan.shapes)
    return [torch.nn.Parameter(p, requires_grad=i != plan.frozen) for i, p in enumerate(drawn)]


def _gradients(plan: Plan, seed: int, step: int, rank: int, world_size: int) -> list:
    """Return a rank's gradients of a step, None for the frozen one and what this rank left out."""
    draw = generator(seed, step, rank)
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in plan.shapes]
    gone = {0: 2, world_size - 1: 3} if plan.unused else {}  # of a rank: which parameter
    left_out = (plan.frozen, gone.get(rank, -1))
    return [None if i in left_out else gradient for i, gradient in enumerate(drawn)]


def _flat(parameters) -> torch.Tensor:
    return torch.cat([p.detach().clone().flatten() for p in parameters if p.requires_grad])


def _numbers_kept(optimizers) -> int:
    """Return how many numbers the states of these optimizers hold, step counters left out."""
    states = [state for one in set(optimizers) for state in one.state.values()]
    values = [value for state in states for value in state.values()]
    return sum(v.numel() for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)


def _run(name: str):
    plan = PLANS[name]

    def run(fn, rank, world_size, seed):
        parameters = _parameters(plan, seed)
        step = fn(iter(parameters), dict(SETTINGS))
        if not callable(step):
            return {"returned": type(step).__name__}
        stepped, history = [], []
        handle = register_optimizer_step_post_hook(lambda one, *_: stepped.append(one))
        for number in range(STEPS):
            gradients = _gradients(plan, seed, number, rank, world_size)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            stepped.clear()
            called = len(calls())
            step()
            history.append(_flat(parameters))
        handle.remove()
        frozen = [p for p in parameters if not p.requires_grad]
        start = [p for p in _parameters(plan, seed) if not p.requires_grad]
        return {
            "history": history,
            "kept": _numbers_kept(stepped),
            "stepped": len(stepped),
            "frozen_moved": any(not a.equal(b) for a, b in zip(frozen, start, strict=True)),
            "collectives": calls()[called:],
        }

    return run


# ---- in the parent


def reference(plan: Plan, world_size: int, seed: int, mistake: str = "", rank: int = 0) -> list:
    """Return the weights after each step, or those that a rank gets with one of MISTAKES."""
    parameters = _parameters(plan, seed)
    trained = [p for p in parameters if p.requires_grad]
    settings = {"lr": SETTINGS["lr"]} if mistake == "settings" else SETTINGS
    optimizer, history = torch.optim.Adam(trained, **settings), []
    for number in range(STEPS):
        if mistake == "fresh":
            optimizer = torch.optim.Adam(trained, **settings)
        rows = torch.stack(
            [
                torch.cat(
                    [
                        torch.zeros(p.numel(), dtype=p.dtype) if g is None else g.flatten()
                        for p, g in zip(parameters, gradients, strict=True)
                        if p.requires_grad
                    ]
                )
                for gradients in (
                    _gradients(plan, seed, number, r, world_size) for r in range(world_size)
                )
            ]
        )
        mean = _combined(rows, mistake, rank).split([p.numel() for p in trained])
        for parameter, gradient in zip(trained, mean, strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        history.append(_flat(parameters))
    return history


def _combined(rows: torch.Tensor, mistake: str, rank: int) -> torch.Tensor:
    """Return one gradient [n] from those of all ranks [world_size, n]."""
    world_size, mean = len(rows), rows.mean(0)
    if mistake == "own_share":
        parts = [_shares(row, world_size)[r] for r, row in enumerate(rows)]
        return torch.cat(parts)[: rows.shape[1]]
    return {
        "summed": mean * world_size,
        "twice": mean / world_size,
        "own": rows[rank],
        "first": rows[0],
    }.get(mistake, mean)


def _shares(flat: torch.Tensor, world_size: int) -> tuple:
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % world_size))
    return padded.chunk(world_size)


MISTAKES = {
    "settings": "the steps are those of Adam with its default settings: pass betas, eps and "
    "weight_decay on, too.",
    "fresh": "each step is like a first one: Adam's moments are lost in between. Make the "
    "optimizer once, outside of step.",
    "own": "every rank steps with its own gradients: they have to be averaged over the ranks.",
    "own_share": "each rank steps its share with its *own* gradient of it: the mean over all ranks "
    "is needed, by reduce_scatter, or all_reduce.",
    "first": "only rank 0's gradients are used: those of the other ranks are lost.",
    "summed": "the gradients are summed, not averaged: reduce_scatter adds up, divide by the "
    "world size. (With a small eps Adam would hide it.)",
    "twice": "the gradients are divided by the world size twice.",
}


def _judge(name: str):
    plan = PLANS[name]

    def judge(outputs, world_size, seed):
        if "returned" in outputs[0]:
            return f"it should return a function, step(); this is of type {outputs[0]['returned']}."
        start, right = _flat(_parameters(plan, seed)), reference(plan, world_size, seed)
        for rank, output in enumerate(outputs):
            if output["frozen_moved"]:
                return (
                    f"rank {rank}: a frozen parameter moves. Leave out those with requires_grad "
                    "False: weight decay moves a weight also where the gradient is 0."
                )
        for rank, output in reversed(list(enumerate(outputs))):
            history = output["history"]
            if not _same(history, right):
                return _why(plan, outputs, rank, right, start, seed)
        return (
            _state_wrong(outputs, len(start), len(plan.shapes))
            or _wire_wrong(outputs, len(start), world_size)
            or same_calls(outputs)
        )

    return judge


def _same(history, wanted) -> bool:
    return all(off(a, b, *CLOSE) is None for a, b in zip(history, wanted, strict=True))


def _why(plan, outputs, rank, right, start, seed) -> str:
    """Say what the weights of this rank look like."""
    world_size, history = len(outputs), outputs[rank]["history"]
    if wrong := _unmoved(history[-1] != start, rank, world_size):
        return wrong
    for mistake, message in MISTAKES.items():
        if _same(history, reference(plan, world_size, seed, mistake, rank)):
            return f"rank {rank}: {message}"
    if wrong := _misplaced(history[0], right[0], world_size):
        return f"rank {rank}: {wrong}"
    first = next(n for n, (a, b) in enumerate(zip(history, right, strict=True))
                 if off(a, b, *CLOSE) is not None)  # fmt: skip
    told = tell(f"after step {first + 1}, the weight vector", rank, history[first], right[first])
    if any(off(a["history"][first], history[first], *CLOSE) is not None for a in outputs):
        told += "\nThe ranks' weights differ, too: do all get the same new weights?"
    return told


def _unmoved(moved: torch.Tensor, rank: int, world_size: int) -> str | None:
    if not moved.any():
        return (
            f"rank {rank}: no weight moves. Write the new numbers into the parameters: a flat "
            "vector made by torch.cat is a copy."
        )
    mine = _shares(torch.arange(len(moved)), world_size)[rank]
    mine = [int(i) for i in mine if i or not rank]
    if world_size > 1 and moved.nonzero().flatten().tolist() == mine:
        return (
            f"rank {rank}: only its own share moves. The other ranks have the new weights of "
            "theirs: all_gather them."
        )
    if not moved[-1]:
        still = len(moved) - int(moved.nonzero().max()) - 1
        return (
            f"rank {rank}: the last {many(still, 'number')} of {len(moved)} never move. "
            f"{len(moved)} is no multiple of {world_size}: pad the vector, so that the shares hold "
            "all of it."
        )
    return None


def _misplaced(mine, right, world_size) -> str | None:
    """Say that shares are at the places of others."""
    mine, right = _shares(mine, world_size), _shares(right, world_size)
    found = [
        next((k for k, b in enumerate(right) if off(a, b, *CLOSE) is None), None) for a in mine
    ]
    for place, share in enumerate(found):
        if share not in (None, place):
            return (
                f"the new weights of share {share} stand at the place of share {place}: share k "
                "of the flat vector is rank k's."
            )
    return None


def _state_wrong(outputs, numbers, parameters) -> str | None:
    world_size, all_of_it = len(outputs), 2 * numbers
    share = 2 * math.ceil(numbers / world_size)
    for rank, output in enumerate(outputs):
        if not output["stepped"]:
            return f"rank {rank}: no optimizer of torch stepped: use torch.optim.Adam for a share."
        if world_size > 1 and output["kept"] >= all_of_it:
            return (
                f"the weights are right, but rank {rank} keeps Adam's state for all {numbers} "
                f"parameters: {output['kept']} numbers. Its share is {share}."
            )
        if output["kept"] > share + 2 * parameters:  # slices of each parameter are padded each
            return (
                f"the weights are right, but rank {rank} keeps {output['kept']} numbers of Adam's "
                f"state, of {all_of_it} in all; an equal share is {share}. Whole parameters make "
                "no equal shares: flatten them into one vector."
            )
    return None


def _wire_wrong(outputs, numbers, world_size) -> str | None:
    """Say that more than gradients once and weights once crossed in the last step."""
    if world_size == 1:
        return None
    for rank, output in enumerate(outputs):
        crossed = sum(
            math.prod(int(n) for n in size.split(",") if n.strip())
            for call in output["collectives"]
            for size in _FLOATS.findall(call)
        )
        if crossed > 2.4 * numbers:
            return (
                f"the weights are right, but rank {rank} hands {crossed} numbers to collectives in "
                f"a step, {crossed / numbers:.1f} times the model: gradients once and weights once "
                "are enough. State stays where it is."
            )
    return None


STUCK = (
    "Likely: the ranks call different collectives, or with other sizes: one that skips a "
    "parameter without a gradient, or shares that are not equally long (pad the vector)."
)
ONCE = {
    "expected a non-empty list|empty parameter list": "`parameters` may be a generator, as "
    "model.parameters() is: it can be read once only. Make a list of it first.",
    "NoneType": "A gradient may be None: on this rank the parameter was not used. Let it count as "
    "zeros.",
}


def _case(title: str, points: int, name: str, worlds) -> Case:
    return Case(title, points, _run(name), _judge(name), worlds, STUCK, ONCE)


EXERCISE = Exercise(
    "13_zero1_optimizer",
    "zero1_optimizer",
    ("parameters", "settings"),
    (
        _case("one process", 1, "even", (1,)),
        _case("equal shares", 3, "even", (2,)),
        _case("a length that the ranks do not divide, and a frozen parameter", 3, "uneven", (2, 3)),
        _case("parameters that not every rank used", 3, "unused", (2, 3)),
    ),
)
