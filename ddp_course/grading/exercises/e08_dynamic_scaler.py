"""08 · scaler_step(optimizer, state): unscale, step or skip on all ranks, adapt the scale."""

import math

import torch

from ..compare import off
from ..exercise import Case, Exercise, generator

SHAPES = ((3, 2), (2,))
INTERVAL = 3  # good steps until the scale doubles
RATE, MOMENTUM = 0.1, 0.9

# For each step of a case: what goes wrong on which rank (-1: the last), if anything.
PLANS = {
    "good": [None, None],
    "overflow": [None, ("inf", 0), None, ("nan", 0), None],
    "grows": [None] * 8,
    "counts": [None, None, ("inf", 0), None, None, None, None, ("-inf", 0), None, None],
    "ranks": [None, ("inf", -1), None, ("nan", 0), None, None, None],
}


def _first_scale(seed: int) -> float:
    return 2.0 ** (6 + seed % 5)


def _parameters(seed: int) -> list[torch.Tensor]:
    draw = generator(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]


def _gradients(seed: int, step: int, wrong, rank: int, world_size: int) -> list[torch.Tensor]:
    """Return a rank's true gradients of a step: no all-reduce has made them alike."""
    draw = generator(seed, step, 7 + rank)
    gradients = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    if wrong is not None and wrong[1] % world_size == rank:
        gradients[step % 2].view(-1)[-1] = float(wrong[0])
    return gradients


def _run(plan: str):
    def run(fn, rank, world_size, seed):
        parameters = [torch.nn.Parameter(p) for p in _parameters(seed)]
        unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))  # never has a gradient
        groups = [{"params": [parameters[0], unused]}, {"params": parameters[1:]}]
        optimizer = torch.optim.SGD(groups, RATE, momentum=MOMENTUM)
        state = {"scale": _first_scale(seed), "good_steps": 0, "growth_interval": INTERVAL}
        history = []
        for step, wrong in enumerate(PLANS[plan]):
            for p, g in zip(
                parameters, _gradients(seed, step, wrong, rank, world_size), strict=True
            ):
                p.grad = g * state["scale"]
            stepped = fn(optimizer, state)
            history.append(
                {
                    "stepped": bool(stepped) if stepped is not None else "nothing",
                    "scale": float(state["scale"]),
                    "good_steps": int(state["good_steps"]),
                    "weights": torch.cat([p.detach().flatten() for p in parameters]),
                }
            )
            optimizer.zero_grad()
        return {"history": history}

    return run


def _simulate(plan: str, world_size: int, seed: int, rank: int, **mistake) -> list[dict]:
    """Return the history of the right scaler, or of one with a named mistake."""
    weights = torch.cat([p.flatten() for p in _parameters(seed)])
    momentum, scale, good, history = None, _first_scale(seed), 0, []
    for step, wrong in enumerate(PLANS[plan]):
        seen = range(world_size) if "own_rank_only" not in mistake else [rank]
        bad = wrong is not None and any(wrong[1] % world_size == r for r in seen)
        if "nan_only" in mistake:
            bad = bad and wrong[0] == "nan"
        if "inf_only" in mistake:
            bad = bad and "inf" in wrong[0]
        if "first_group" in mistake:
            bad = bad and step % 2 == 0  # see _gradients
        if "steps_anyway" not in mistake and bad:
            if "keeps_scale" not in mistake:
                scale /= 2
            if "keeps_count" not in mistake:
                good = 0
            stepped = False
        else:
            gradient = _gradient(seed, step, wrong, rank, world_size, scale, mistake)
            momentum = gradient if momentum is None else MOMENTUM * momentum + gradient
            weights = weights - RATE * momentum
            stepped, good = True, good + 1
            if good >= INTERVAL + ("late" in mistake):
                scale, good = scale * 2, good if "grows_on" in mistake else 0
        history.append({"stepped": stepped, "scale": scale, "good_steps": good, "weights": weights})
    return history


def _gradient(seed, step, wrong, rank, world_size, scale, mistake) -> torch.Tensor:
    """Return what a rank steps with, as a vector."""
    ranks = range(world_size) if "averaged" in mistake else [rank]
    every = [_gradients(seed, step, wrong, r, world_size) for r in ranks]
    parts = [sum(part) / len(ranks) for part in zip(*every, strict=True)]
    for group, part in enumerate(parts):
        if "not_unscaled" in mistake or ("first_group" in mistake and group > 0):
            part *= scale
    return torch.cat([part.flatten() for part in parts])


MISTAKES = {
    "averaged": "the gradients were averaged over the ranks: that belongs to backward. Here only "
    "the decision crosses, and each rank steps with the gradients it has.",
    "first_group": "only optimizer.param_groups[0] was handled: an optimizer may have more groups, "
    "and the gradients of all are scaled.",
    "own_rank_only": "each rank decides for itself: where only one rank overflows, the others take "
    "the step, and from then on there are two models. All ranks must decide alike.",
    "not_unscaled": "the gradients were not divided by the scale before the step.",
    "steps_anyway": "it takes the step although a gradient is inf or nan, which spoils the weights "
    "for ever: skip it.",
    "nan_only": "it looks for nan only: an overflow is inf first. torch.isfinite finds both.",
    "inf_only": "it looks for inf only: inf − inf and inf · 0 are nan. torch.isfinite finds both.",
    "keeps_scale": "it skips the step but does not halve the scale: the next one overflows again.",
    "keeps_count": "the count of good steps goes on after an overflow: growth_interval steps must "
    "be good in a row.",
    "grows_on": "after it has grown, the count does not begin at 0: it grows after every step.",
    "late": "it grows one step too late: after growth_interval good steps, not one more.",
}


def _judge(plan: str):
    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            right = _simulate(plan, world_size, seed, rank)
            if _first_difference(output["history"], right) is None:
                continue
            for name, message in MISTAKES.items():
                wrong = _simulate(plan, world_size, seed, rank, **{name: True})
                if _first_difference(output["history"], wrong) is None:
                    return f"rank {rank}: {message}"
            return f"rank {rank}: {_first_difference(output['history'], right)}"
        return None

    return judge


def _first_difference(history, wanted) -> str | None:
    for step, (mine, right) in enumerate(zip(history, wanted, strict=True)):
        at = f"after step {step} of this case"
        if mine["stepped"] == "nothing":
            return "it returns nothing: True when it stepped, False when it skipped."
        if _differ(mine["scale"], right["scale"]):
            return f"{at} the scale is {mine['scale']:g} instead of {right['scale']:g}."
        if off(mine["weights"].nan_to_num(nan=1e300), right["weights"].nan_to_num(nan=1e300)):
            return (
                f"{at} the weights are wrong, "
                f"by up to {(mine['weights'] - right['weights']).abs().max():.3g}."
            )
        if mine["stepped"] != right["stepped"]:
            return f"{at} it returns {mine['stepped']} instead of {right['stepped']}."
        if mine["good_steps"] != right["good_steps"]:
            return (
                f"{at} state['good_steps'] is {mine['good_steps']} instead of "
                f"{right['good_steps']}."
            )
    return None


def _differ(a: float, b: float) -> bool:
    return not math.isclose(a, b, rel_tol=1e-12)


def _case(name: str, points: int, plan: str, worlds=(1,), stuck="") -> Case:
    return Case(name, points, _run(plan), _judge(plan), worlds, stuck)


EXERCISE = Exercise(
    "08_dynamic_scaler",
    "scaler_step",
    ("optimizer", "state"),
    (
        _case("good steps", 2, "good"),
        _case("an inf, a nan", 3, "overflow"),
        _case("it grows", 2, "grows"),
        _case("good steps in a row", 2, "counts"),
        _case(
            "an overflow on one rank only",
            3,
            "ranks",
            (2, 3),
            "Likely: a collective is called on the ranks with an overflow only. All must call it.",
        ),
    ),
)
