"""The steps of a case in fp16: as they are right, and with one named mistake."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..exercise import generator
from .fp16 import Scaler, classifier, weights

RATE, MOMENTUM, SAMPLES = 1.0, 0.9, 8


@dataclass(frozen=True)
class Plan:
    """The steps of a case: "" is a good batch, "inf" one with an inf in its data."""

    steps: tuple[str, ...]
    power: int  # the loss scale begins at 2 to this power, and seed % 4 more
    max_norm: float
    growth_interval: int = 1000
    frozen: bool = False


PLANS = {
    "plain": Plan(("", ""), 9, 1e6),
    "clip": Plan(("", "", ""), 8, 0.05),
    "overflow": Plan(("", "", "", "", "", "", "inf", ""), 19, 0.5),
    "grows": Plan(("", "inf", "", ""), 8, 0.05, growth_interval=1, frozen=True),
}


def setup(plan: Plan, seed: int):
    model = classifier(seed, plan.frozen)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    return model, optimizer, Scaler(2.0 ** (plan.power + seed % 4), plan.growth_interval)


def batch(seed: int, step: int, wrong: str):
    draw = generator(seed, step)
    x = torch.randn(SAMPLES, 6, generator=draw)
    if wrong:
        x[0] = float(wrong)
    return x, torch.randint(3, (SAMPLES,), generator=draw)


def reference(name: str, seed: int, mistake: str = "") -> list[dict]:
    """Return the history of the right steps, or of steps with one named mistake."""
    plan, history = PLANS[name], []
    model, optimizer, scaler = setup(plan, seed)
    for step, wrong in enumerate(plan.steps):
        loss = _backward(model, scaler, *batch(seed, step, wrong), mistake)
        scale, parameters = scaler.get_scale(), [p for p in model.parameters() if p.requires_grad]
        if mistake != "clip_first":
            scaler.unscale_(optimizer)
        norm = _clip(parameters, plan.max_norm, mistake)
        if mistake == "cleared":
            optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        if mistake != "not_cleared":
            optimizer.zero_grad()
        stepped = scaler.get_scale() >= scale
        history.append({"loss": loss, "norm": norm, "stepped": stepped, "used": scale}
                       | {"weights": weights(model), "scale": scaler.get_scale()})  # fmt: skip
    return history


def _backward(model, scaler, x, y, mistake) -> float:
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y, reduction="sum" if mistake == "summed" else "mean")
    scaler.scale(loss).backward()
    return loss.item()


def _clip(parameters, max_norm, mistake) -> float:
    norm = nn.utils.get_total_norm([p.grad for p in parameters]).item()
    if mistake == "one_by_one":
        for parameter in parameters:
            nn.utils.clip_grad_norm_([parameter], max_norm)
    elif mistake == "by_value":
        nn.utils.clip_grad_value_(parameters, max_norm)
    elif mistake != "not_clipped":
        nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm


MISTAKES = {
    "summed": f"the loss is the sum over the {SAMPLES} samples, not their mean.",
    "cleared": "the weights never move: the gradients are cleared before the step.",
    "not_cleared": "each step's gradients are added to those of the step before: zero_grad is "
    "missing.",
    "clip_first": "clipping sees gradients that still carry the loss scale, cuts them to max_norm, "
    "and unscaling makes next to nothing of them: first unscale_, then clip.",
    "one_by_one": "each parameter is clipped by its own norm: max_norm is for all gradients "
    "together, whose direction must stay.",
    "by_value": "each number is cut to max_norm: the norm of all gradients together is meant.",
    "not_clipped": "the gradients are not clipped to max_norm: not at all, or to another norm.",
}
