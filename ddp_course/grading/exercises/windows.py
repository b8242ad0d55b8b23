"""Windows of fp16 micro-batches on several ranks, and what they come to, done in one process."""

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..exercise import generator
from .fp16 import Scaler, classifier, weights

RATE, MOMENTUM = 0.5, 0.9


@dataclass(frozen=True)
class Plan:
    """The windows of a case: "" is a good one, "inf" one with an inf on the last rank."""

    windows: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]  # of the micro-batches, by rank; they move on by window
    max_norm: float = 1e6
    growth_interval: int = 1000
    frozen: bool = False
    power: int = 7  # the loss scale begins at 2 to this power, and up to 2 more


def setup(plan: Plan, seed: int, rank: int):
    """Return model, optimizer, scaler and schedule. DDP gives all ranks the weights of rank 0."""
    model = classifier(seed + rank, plan.frozen)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    return model, optimizer, Scaler(2.0 ** (plan.power + seed % 3), plan.growth_interval), schedule


def window_of(plan: Plan, seed: int, number: int, rank: int, world_size: int) -> list:
    """Return a rank's micro-batches (x, y) of a window."""
    draw = generator(seed, number, rank)
    window = []
    for size in plan.sizes[(rank + number) % world_size]:
        x = torch.randn(size, 6, generator=draw)
        window.append((x, torch.randint(3, (size,), generator=draw)))
    if plan.windows[number] and rank == world_size - 1:
        window[0][0][0] = float(plan.windows[number])
    return window


def reference(plan: Plan, world_size: int, seed: int, mistake: str = "") -> list[dict]:
    """Return what the windows come to, or what they do with one of MISTAKES.

    One process does the arithmetic of all ranks: no DDP, no collectives.
    """
    model, optimizer, scaler, schedule = setup(plan, seed, 0)
    parameters, history = [p for p in model.parameters() if p.requires_grad], []
    for number in range(len(plan.windows)):
        windows = [window_of(plan, seed, number, r, world_size) for r in range(world_size)]
        means = _mean_gradient(model, parameters, scaler, windows, plan.max_norm, mistake)
        for parameter, mean in zip(parameters, means, strict=True):
            old = parameter.grad if _left(mistake, history) else None
            parameter.grad = mean if old is None else mean + old
        if mistake == "schedule_first":
            with warnings.catch_warnings(action="ignore"):  # PyTorch notices, too
                schedule.step()
        scale = scaler.get_scale()
        if mistake not in ("clip_first", "clip_inside"):
            scaler.unscale_(optimizer)
        if mistake != "not_clipped":
            nn.utils.clip_grad_norm_(parameters, plan.max_norm)
        scaler.step(optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        if stepped and mistake != "schedule_first":
            schedule.step()
        result = {"weights": weights(model), "scale": scaler.get_scale()}
        history.append(result | {"schedule": schedule.last_epoch, "stepped": stepped})
    return history


def _left(mistake: str, history: list[dict]) -> bool:
    """Say whether the last window's gradients are still there."""
    skipped = bool(history) and not history[-1]["stepped"]
    return mistake == "not_cleared" or (mistake == "not_cleared_if_skipped" and skipped)


def _mean_gradient(model, parameters, scaler, windows, max_norm, mistake) -> list[torch.Tensor]:
    total = [torch.zeros_like(p) for p in parameters]
    for window in windows:
        local = [torch.zeros_like(p) for p in parameters]
        parts = {"only_last": window[-1:], "drops_last": window[:-1]}.get(mistake, window)
        for number, (x, y) in enumerate(parts):
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum")
            if mistake == "leaves_out_bad" and not loss.isfinite():
                continue
            loss = loss / _divisor(windows, window, y, mistake)
            scaled = loss if mistake == "not_scaled" else scaler.scale(loss)
            local = _sum(local, torch.autograd.grad(scaled, parameters))
            if mistake == "clip_inside" and number < len(parts) - 1:
                share = min(1.0, max_norm / nn.utils.get_total_norm(local).item())
                local = [gradient * share for gradient in local]
        total = _sum(total, local)
    return [gradient / len(windows) for gradient in total]


def _sum(some, others) -> list[torch.Tensor]:
    return [a + b for a, b in zip(some, others, strict=True)]


def _divisor(windows, window, y, mistake) -> float:
    """Return what a micro-batch's summed loss is divided by."""
    total = sum(len(y) for each in windows for _, y in each)
    return {
        "summed": 1,
        "all_ranks": total,
        "own": sum(len(y) for _, y in window),
        "means": len(y) * len(window),
        "not_divided": len(y),
    }.get(mistake, total / len(windows))


MISTAKES = {
    "not_divided": "the gradients of the micro-batches are added, not averaged: nothing divides "
    "by their number.",
    "summed": "the gradient is that of the summed loss: it is not divided by the samples of the "
    "window.",
    "all_ranks": "the gradient is too small by the world size: DDP averages over ranks already, so "
    "the divisor is the samples of all ranks / world_size.",
    "own": "each rank divides by its own number of samples, so that those of a rank with few count "
    "too much: all-reduce the count.",
    "means": "it is the mean of the micro-batches' means, in which the samples of a small "
    "micro-batch count too much: divide summed losses by one number for the whole window.",
    "only_last": "only the last micro-batch is in the step: are gradients cleared inside the "
    "window?",
    "drops_last": "the last micro-batch of each window is left out.",
    "not_cleared_if_skipped": "zero_grad is missing after a *skipped* window: its inf stays in "
    ".grad, and every window after it is skipped, too.",
    "not_cleared": "each window's gradients are added to those of the window before: zero_grad is "
    "missing.",
    "clip_first": "clipping sees gradients that still carry the loss scale, cuts them to max_norm, "
    "and unscaling makes next to nothing of them: first unscale_, then clip.",
    "clip_inside": "it clips after each micro-batch, scaled and local gradients: clip the window's "
    "sum, once, after unscale_.",
    "not_clipped": "the gradients are not clipped to max_norm: not at all, or to another norm.",
    "not_scaled": "the loss is not scaled before backward, but the gradients are unscaled: the "
    "steps are too short by the loss scale.",
    "schedule_first": "the schedule moves before the step, which is then taken with the learning "
    "rate of the next one.",
    "leaves_out_bad": "it leaves out the micro-batch that is not finite and steps with the rest, "
    "which is no mean over the window: the whole step is to be skipped.",
}
