"""What 14_capstone makes of what came back, in the student's terms."""

import dataclasses
import re

import torch

from ... import data
from ..compare import off, tell, wrong_kind
from ..exercise import same_calls
from .capstone import TEST, TEXT_CONTEXT, TRAIN, Sequences, Simulated, plan_of


def judged_by(*looks, **other):
    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            if "wrong" in output:
                return f"rank {rank}: {output['wrong']}"
        expected = Simulated(seed, world_size, plan_of(seed, **other))
        for look in looks:
            if wrong := look(outputs, expected, seed):
                return wrong
        return None

    return judge


def wrong_weights(outputs, expected, seed) -> str | None:
    wanted = expected.weights()
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["weights"]
        if wrong := wrong_names(mine, wanted):
            return f"rank {rank}: {wrong}"
        for name, weight in wanted.items():
            if off(mine[name], weight, 1e-6, 1e-6) is not None:
                what = f"{name} after {len(expected.losses)} steps"
                told = tell(what, rank, mine[name], weight, 1e-6)
                return f"{told}\n{_misconception(outputs, rank, expected, seed)}".rstrip()
    return None


def wrong_names(mine: dict, wanted: dict) -> str | None:
    """Say that a state_dict is not that of the model."""
    if set(mine) != set(wanted):
        wrapped = any(name.startswith("module.") for name in mine)
        return f"the weights have the names {sorted(mine)[:2]} …" + (
            " They are the wrapper's: return those of the model inside."
            if wrapped
            else f" instead of {sorted(wanted)[:2]} …"
        )
    kinds = {name: wrong_kind(mine[name], weight) for name, weight in wanted.items()}
    return next((f"{name} is {kind}." for name, kind in kinds.items() if kind), None)


def _misconception(outputs, rank, expected, seed) -> str:
    mine, world_size, plan = outputs[rank]["weights"], expected.world_size, expected.plan
    windows = -(-TRAIN // (plan.micro_batch * plan.accumulation_steps))
    if world_size > 1 and len(outputs[rank]["losses"]) >= plan.epochs * windows:
        return "Every rank took all sequences: each takes its share."
    for message, change in _wrong_ways(world_size):
        other = Simulated(seed, world_size, expected.plan, **change)
        if any(_same(mine, other.weights(r)) for r in range(world_size)):
            return message
    if any(not _same(mine, output["weights"]) for output in outputs):
        return "The ranks end with different weights: are all gradients averaged in every step?"
    return "All ranks agree, on other weights than one process that takes the global windows."


def _same(mine, weights) -> bool:
    return all(
        not wrong_kind(mine[name], weight) and off(mine[name], weight, 1e-5, 1e-5) is None
        for name, weight in weights.items()
    )


def _wrong_ways(world_size):
    """Yield (what it looks like, the change to the right training)."""
    yield (
        "The micro-batches' mean losses were added up: weigh each by its share of the window.",
        {"shares": "means added"},
    )
    yield (
        "Each loss was divided by the number of micro-batches: the last one is smaller, and should "
        "count by its sequences.",
        {"shares": "by len(window)"},
    )
    yield (
        "Each loss was divided by accumulation_steps, also in the last window, which is shorter.",
        {"shares": "by accumulation_steps"},
    )
    yield "The last, incomplete window was dropped.", {"drop_window": True}
    yield "The gradients were not clipped.", {"clip": "none"}
    yield "The learning rate stayed as it was: is the schedule stepped?", {"schedule": "none"}
    yield "The learning rate stayed as it was: is the schedule stepped?", {"schedule": "stuck"}
    yield "The schedule was stepped once an epoch: once a step.", {"schedule": "epoch"}
    yield "Every epoch had the order of epoch 0: set_epoch.", {"epoch": lambda epoch: 0}
    yield "Gradients of earlier windows are still in .grad: zero_grad().", {"keep_gradients": True}
    if world_size == 1:
        return
    yield (
        "Each rank's gradients were clipped before they were averaged: clip the average.",
        {"clip": "local"},
    )
    yield "Each rank trained alone: is the model wrapped in DDP?", {"alone": True}
    yield (
        "Each rank trained alone, from weights of its own: is the model wrapped in DDP?",
        {"alone": True, "own_start": True},
    )
    yield "Each rank began with weights of its own: rank 0's are meant.", {"own_start": True}
    yield (
        "The learning rate was multiplied by the ranks: plan.learning_rate is meant as it is.",
        {"rate": world_size},
    )


def wrong_losses(outputs, expected, seed) -> str | None:
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["losses"]
        if len(mine) != len(expected.losses):
            return (
                f"rank {rank}: {len(mine)} losses for {len(expected.losses)} optimizer steps: one "
                "for each step."
            )
        if off(mine, expected.losses, 1e-5, 1e-5) is not None:
            told = tell("a step's loss", rank, mine, expected.losses, 1e-5)
            own = [parts[rank] for parts in expected.parts]
            if expected.world_size > 1 and off(mine, own, 1e-5, 1e-5) is None:
                told += "\nIt is this rank's own loss: the other ranks' sequences are not in it."
            elif off(mine, [expected.world_size * x for x in expected.losses], 1e-5) is None:
                told += "\nThe ranks' losses were added up, not averaged."
            else:
                told += "\nIt is the mean over all tokens of the window, of all ranks."
            return told
    return None


def wrong_calls(outputs, expected, seed) -> str | None:
    size = sum(p.numel() for p in expected.models[0].parameters())
    steps, batches = expected.steps, expected.micro_batches
    for rank, output in enumerate(outputs):
        sent = sum(map(_numbers, output["collectives"]))
        times = round(sent / size / steps, 2)
        if sent >= size * batches:
            return (
                f"rank {rank}: the gradients went over the wire {sent // size} times for {steps} "
                "steps: all but the last micro-batch of a window belong inside no_sync()."
            )
        if not 0.99 <= times <= 1.5:
            return f"rank {rank}: {times:g} times the gradients were all-reduced a step: once."
    return same_calls(outputs)


def _numbers(call: str) -> int:
    """Return how many numbers a collective such as "all_reduce(float64[4, 5])" reduces."""
    if not re.match(r"_?(all_?reduce|reduce_scatter)", call):
        return 0
    total = 0
    for shape in re.findall(r"\[([\d, ]*)\]", call):
        size = 1
        for length in filter(None, shape.split(", ")):
            size *= int(length)
        total += size
    return total


def wrong_test_loss(outputs, expected, seed) -> str | None:
    right = expected.test_loss()
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["test_loss"]
        if off(mine, right, 1e-5, 1e-5) is None:
            continue
        told = tell("the test loss", rank, mine, right, 1e-5)
        for message, groups in _other_test_losses(rank, expected):
            if off(mine, expected.test_loss(groups), 1e-5, 1e-5) is None:
                return f"{told}\n{message}"
        return told
    return None


def _other_test_losses(rank, expected):
    world_size, batch = expected.world_size, expected.plan.micro_batch
    dealt = [list(range(r, TEST, world_size)) for r in range(world_size)]
    padded = [[i % TEST for i in range(r, TEST + -TEST % world_size, world_size)] for r in
              range(world_size)]  # fmt: skip
    yield "It is this rank's part of the test set alone.", [dealt[rank]]
    yield "It is this rank's part of the test set alone.", [padded[rank]]
    yield "Sequences that pad the ranks' parts were counted twice.", padded
    yield "It is the mean of the ranks' means, and their parts are not equal.", dealt
    yield (
        "It is the mean of the batches' means, and the last batch is smaller.",
        [range(start, min(start + batch, TEST)) for start in range(0, TEST, batch)],
    )


def wrong_16(outputs, expected, seed) -> str | None:
    for rank, output in enumerate(outputs):
        if wrong := wrong_names(output["weights"], expected.weights()):
            return f"rank {rank}: {wrong}"
        if not all(torch.as_tensor(w).isfinite().all() for w in output["weights"].values()):
            return (
                f"rank {rank}: inf or nan in the weights: scaler.step leaves out a step whose "
                "gradients overflowed, if the scaler does the step."
            )
        if any(off(w, outputs[0]["weights"][n]) for n, w in output["weights"].items()):
            return f"rank {rank}: other weights than rank 0's."
    mine, found = outputs[0]["weights"], []
    for message, change in _WAYS_16:
        changed = {name: value for name, value in change.items() if name != "init_scale"}
        plan = dataclasses.replace(
            expected.plan, init_scale=expected.plan.init_scale * change.get("init_scale", 1)
        )
        other = Simulated(seed, expected.world_size, plan, **changed).weights()
        gap = sum((mine[name] - weight).norm().item() for name, weight in other.items())
        if gap < 0.05 and not message:
            return None
        found.append((gap, message))
    gap, message = min(found)
    if gap > 0.3:
        return "the weights are not those of training in fp16 with this scale."
    return message or None


_WAYS_16 = (
    *(("", {"init_scale": by}) for by in (1.0, 0.9, 1.1)),  # overflows are decided by a hair
    (
        "The schedule moved on in steps that were skipped: it should count steps taken.",
        {"schedule": "skipped too"},
    ),
    (
        "Clipped while the gradients were still scaled: scaler.unscale_(optimizer) first.",
        {"clip": "scaled"},
    ),
)


def wrong_resume(outputs, expected, seed) -> str | None:
    for rank, output in enumerate(outputs):
        share = output["share"]
        if output["asked"] > 3 * share:
            return (
                f"rank {rank}: started again it trains on {output['asked']} sequences, and "
                f"{2 * share} were left: the epochs that were done are done."
            )
    wrong = wrong_weights(outputs, expected, seed)
    if wrong is None:
        return None
    return (
        f"{wrong.splitlines()[0]}\nStarted again, the run should end where one ends that never "
        "stopped: model, optimizer, schedule and epoch go on from the checkpoint, on every rank."
    )


def wrong_text(outputs, world_size, seed) -> str | None:
    target = text_target()
    for rank, output in enumerate(outputs):
        if "wrong" in output:
            return f"rank {rank}: {output['wrong']}"
        if off(output["test_loss"], output["really"], 0.02) is not None:
            return (
                f"rank {rank}: it says a test loss of {output['test_loss']:.4f}, and the weights "
                f"it returns have {output['really']:.4f}."
            )
        if not output["really"] < target:
            return (
                f"rank {rank}: a test loss of {output['really']:.3f}; below {target:.3f} is asked "
                "for, which is what one learns from the frequency of single characters."
            )
    return None


def text_target() -> float:
    """Return the test loss of guessing each character by its frequency in the text trained on."""
    train, test = data.characters(context=TEXT_CONTEXT)
    counts = torch.bincount(train.data, minlength=len(train.vocabulary)) + 1.0
    return -(counts / counts.sum()).log()[test.data].mean().item()


def wrong_throughput(outputs, world_size, seed) -> str | None:
    plan, share = plan_of(seed), -(-TRAIN // world_size)
    length = Sequences(seed, 1).numbers.shape[1] - 1
    tokens = plan.epochs * share * world_size * length
    right = tokens / max(output["seconds"] for output in outputs)
    for rank, output in enumerate(outputs):
        if "wrong" in output:
            return f"rank {rank}: {output['wrong']}"
        ratio = output["tokens_per_s"] / right
        if 0.5 < ratio < 1.7:
            continue
        told = f"rank {rank}: {output['tokens_per_s']:.0f} tokens/s, and it was about {right:.0f}."
        for message, other in (
            ("They are one rank's tokens: count those of all.", 1 / world_size),
            ("They are sequences: each holds several tokens.", 1 / length),
        ):
            if 0.5 < ratio / other < 1.7:
                return f"{told}\n{message}"
        return f"{told}\nTokens of all ranks, divided by the seconds that training took."
    rates = [output["tokens_per_s"] for output in outputs]
    if max(rates) - min(rates) > 1e-6 * max(rates):
        return f"the ranks report different tokens/s, {rates[0]:.0f} and {rates[-1]:.0f} …: one."
    return None
