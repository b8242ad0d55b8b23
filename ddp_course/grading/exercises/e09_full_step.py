"""09 · full_step(model, optimizer, scaler, schedule, window, max_norm): one whole window."""

import math
import re

import torch
from torch.nn.parallel import DistributedDataParallel

from ..exercise import Case, Exercise, calls, same_calls
from .fp16 import ALLOWED, add_hint, close, plain, types_wrong, weights
from .windows import MISTAKES, Plan, reference, setup, window_of

_ALL_REDUCED = re.compile(r"all_?reduce\w*\(float\w*\[([\d, ]*)\]")

EQUAL = ((4, 4, 4),) * 3
PLANS = {
    # A low scale: what was not cleared is unscaled twice, and would hardly show with a high one.
    "equal": Plan(("", ""), EQUAL, power=2),
    "clip": Plan(("", "", ""), EQUAL, max_norm=0.02),
    "ragged": Plan(("", "", ""), ((1, 9, 2), (6, 3), (2, 1, 1, 7)), frozen=True),
    "inf": Plan(("", "inf", "", "inf", "", "", ""), ((3, 3),) * 3, 0.3, growth_interval=2),
}


def _run(name: str):
    plan = PLANS[name]

    def run(fn, rank, world_size, seed):
        bare, optimizer, scaler, schedule = setup(plan, seed, rank)
        model = DistributedDataParallel(bare)
        steps, history = [], []
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))
        for number in range(len(plan.windows)):
            window, called = window_of(plan, seed, number, rank, world_size), len(calls())
            steps.clear()
            try:
                returned = fn(model, optimizer, scaler, schedule, window, plan.max_norm)
            except Exception as error:
                add_hint(error, scaler.log)
                raise
            history.append(
                {
                    "returned": plain(returned),
                    "weights": weights(bare),
                    "scale": float(scaler.get_scale()),
                    "schedule": int(schedule.last_epoch),
                    "collectives": calls()[called:],
                    "steps": len(steps),
                }
            )
        return {"history": history, **bare[-1].notes()}

    return run


def _judge(name: str):
    plan = PLANS[name]

    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            if wrong := types_wrong(output):
                return f"rank {rank}: {wrong}"
        right, model = reference(plan, world_size, seed), setup(plan, seed, 0)[0]
        histories = [output["history"] for output in outputs]
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for number, rows in enumerate(zip(*histories, strict=True)):
            if wrong := _together_wrong(rows, parameters):
                return f"in window {number}: {wrong}"
        start, wrong = weights(model), None
        if not _same(histories[0], right, start):
            for mistake, message in MISTAKES.items():
                if _same(histories[0], reference(plan, world_size, seed, mistake), start):
                    return message
            wrong = _off(histories[0], right, start)
        # The schedule moves the learning rate, and so the weights.
        return (
            _schedule_wrong(histories[0], right, plan)
            or wrong
            or _returned_wrong(histories, right)
            or same_calls([{"collectives": _all_calls(history)} for history in histories])
        )

    return judge


def _all_calls(history) -> list[str]:
    return [call for row in history for call in row["collectives"]]


def _together_wrong(rows, parameters) -> str | None:
    """Say what is wrong with how ranks worked together in a window: `rows` is theirs, by rank."""
    for rank, row in enumerate(rows):
        if row["steps"] > 1:
            return (
                f"rank {rank} takes {row['steps']} steps: one a window, after its last micro-batch."
            )
        if row["weights"].isnan().any():
            return (
                f"rank {rank} steps although a gradient is inf or nan, which spoils the weights "
                "for ever: scaler.step(optimizer) looks first, optimizer.step() does not."
            )
        if (count := _rounds(row["collectives"], parameters)) > 1:
            return (
                f"rank {rank} all-reduces the gradients {count} times: all micro-batches but the "
                "last belong inside model.no_sync(), with their *forward*, in which DDP decides."
            )
    if not all(torch.equal(row["weights"], rows[0]["weights"]) for row in rows):
        if not any(_rounds(row["collectives"], parameters) for row in rows):
            return (
                "the ranks' weights differ, since no gradient was all-reduced: was the forward "
                "through model.module, or the last micro-batch inside no_sync, too?"
            )
        return (
            "the ranks' weights differ, though gradients were all-reduced once: with the last "
            "micro-batch, so that the sum of all is in it?"
        )
    return _decisions_differ(rows)


def _rounds(collectives: list[str], parameters: int) -> int:
    """Return how often all gradients crossed; a few numbers more, such as a count, do not count."""
    shapes = [shape for call in collectives for shape in _ALL_REDUCED.findall(call)]
    numbers = sum(math.prod(map(int, filter(None, shape.split(", ")))) for shape in shapes)
    return round(numbers / parameters)


def _decisions_differ(rows) -> str | None:
    if len({row["scale"] for row in rows}) > 1:
        told = ", ".join(f"rank {rank}: {row['scale']:g}" for rank, row in enumerate(rows))
        return f"the ranks' loss scales differ ({told}): all must decide by the averaged gradients."
    if len({row["schedule"] for row in rows}) > 1:
        told = ", ".join(f"rank {rank}: {row['schedule']}" for rank, row in enumerate(rows))
        return (
            f"the ranks' schedules differ ({told}): a rank must not judge by its own loss whether "
            "a step was taken; the scale, alike on all, tells."
        )
    return None


def _same(history, wanted, start) -> bool:
    pairs = zip(history, wanted, strict=True)
    return all(
        a["scale"] == b["scale"] and close(a["weights"], b["weights"], start) for a, b in pairs
    )


def _off(history, right, start) -> str:
    for number, (mine, wanted) in enumerate(zip(history, right, strict=True)):
        if mine["scale"] != wanted["scale"]:
            return (
                f"after window {number} the loss scale is {mine['scale']:g} instead of "
                f"{wanted['scale']:g}: scaler.step and scaler.update, once a window, adapt it."
            )
        if not close(mine["weights"], wanted["weights"], start):
            most = (mine["weights"] - wanted["weights"]).abs().max()
            return (
                f"after window {number} the weights are off by up to {most:.3g}; "
                f"{ALLOWED:.0%} of their movement is allowed."
            )
    return "the weights are not those of the right windows."


def _schedule_wrong(history, right, plan) -> str | None:
    mine, wanted = ([row["schedule"] for row in rows] for rows in (history, right))
    if mine == wanted:
        return None
    if not any(mine):
        return "the schedule never moves: schedule.step() after a step that was taken."
    if mine[0] == len(plan.sizes[0]) > 1:
        return "the schedule counts micro-batches: once a window, after the step."
    if mine == list(range(1, len(mine) + 1)):
        return (
            "the schedule moves in every window, also when the step is skipped: it counts steps "
            "that were taken."
        )
    first = next(n for n, (a, b) in enumerate(zip(mine, wanted, strict=True)) if a != b)
    if first and right[first]["scale"] > right[first - 1]["scale"]:
        return f"the schedule misses the step of window {first}, after which the scale *grew*."
    return f"after window {first} the schedule has counted {mine[first]}, not {wanted[first]}."


def _returned_wrong(histories, right) -> str | None:
    for rank, history in enumerate(histories):
        for number, (mine, wanted) in enumerate(zip(history, right, strict=True)):
            if not isinstance(mine["returned"], bool | int | float):
                return f"it should return True or False, not {mine['returned']!r}."
            if bool(mine["returned"]) != wanted["stepped"]:
                what = "taken" if wanted["stepped"] else "skipped"
                told = f"rank {rank} returns {bool(mine['returned'])} for window {number}"
                return f"{told}, in which the step was {what}."
    return None


STUCK = (
    "Likely: a rank left out a collective that the others call, such as the count of samples, or "
    "the backward that all-reduces (an early return, or a decision by its own loss)."
)


def _case(title: str, points: int, name: str, worlds) -> Case:
    return Case(title, points, _run(name), _judge(name), worlds, STUCK)


EXERCISE = Exercise(
    "09_full_step",
    "full_step",
    ("model", "optimizer", "scaler", "schedule", "window", "max_norm"),
    (
        _case("equal micro-batches", 3, "equal", (1, 2)),
        _case("clipping", 2, "clip", (2,)),
        _case("ragged windows, other on each rank", 3, "ragged", (2, 3)),
        _case("an inf on one rank", 4, "inf", (2, 3)),
    ),
)
