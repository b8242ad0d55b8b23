"""Lesson 08: formats, the loss scale, the order of a step."""

import math

from ..quiz import choice, number


def scale_after(random, power=None, overflows=None):
    power = power or random.choice([13, 14, 15, 17])
    overflows = overflows or random.choice([2, 3])
    answer = 2.0 ** (power - overflows)
    return {
        "question": f"A `GradScaler` is at 2^{power} = {2**power:,}. The next {overflows} steps "
        "overflow, then 100 are fine (growth interval 2,000). Which loss scale has it then?",
        "answer": answer,
        "tolerance": 1e-6,
        "why": f"It is halved {overflows} times: 2^{power} / 2^{overflows} = "
        f"2^{power - overflows} = {answer:,.0f}. 100 good steps are not yet 2,000.",
        "mistakes": {
            2.0**power: "Each overflow halves it, and 100 good steps do not bring it back.",
            2.0 ** (power - 1): f"It is halved at *each* of the {overflows} overflows.",
            2.0 ** (power + 1): "It grows after 2,000 good steps in a row, not when it pleases.",
        },
    }


def smallest_scale(random, power=None):
    power = power or random.choice([-30, -32, -35])
    needed = -24 - power
    return {
        "question": f"The gradients that matter are as small as 2^{power}. fp16's smallest number "
        "above 0 is 2^−24. By which power of 2 must the loss be multiplied, at least, for them to "
        "survive? (The exponent.)",
        "answer": needed,
        "tolerance": 1e-6,
        "why": f"2^{power} × 2^{needed} = 2^−24. More is better: at 2^−24 there is one bit left; "
        "from 2^−14 on fp16 has all of its digits.",
        "mistakes": {
            -power: "That would lift them to 1. They need to reach 2^−24 only.",
            -14 - power: "That reaches the *normal* numbers, from 2^−14 on. Subnormal ones, down "
            "to 2^−24, are above 0 already.",
        },
    }


def clip_sees(random, norm=None, power=None):
    norm = norm or random.choice([0.5, 0.75, 1.5])
    power = power or random.choice([10, 12, 16])
    return {
        "question": f"The true gradient norm is {norm}, the loss scale 2^{power} = {2**power:,}. "
        "`clip_grad_norm_` is called *before* `unscale_`. Which norm does it see?",
        "answer": norm * 2**power,
        "why": f"{norm} × {2**power:,} = {norm * 2**power:,.0f}: the gradients still carry the "
        "scale.",
        "mistakes": {
            norm: "It would, after unscale_.",
            norm / 2**power: "The loss was multiplied by the scale, so the gradients are larger.",
            norm * math.sqrt(2**power): "A norm grows like its vector: by the whole factor.",
        },
    }


QUESTIONS = [
    choice(
        "fp16 on two ranks: one gradient on rank 1 becomes inf. What does `GradScaler` do?",
        right="Both ranks skip the step, keep their weights, and halve the scale",
        why="The all-reduce carries the inf to rank 0's gradients, so both scalers see it. A "
        "skipped step changes neither weights nor optimizer state.",
        wrong={
            "Rank 1 skips its step, rank 0 takes it": "Then their weights would differ from now "
            "on. The gradients are all-reduced before the scaler looks: both see the inf.",
            "Both ranks set the inf to 0 and take the step": "It repairs nothing: a gradient that "
            "overflowed says nothing about the direction. The step is skipped.",
            "It raises an error": "Overflows belong to the search for the scale. It says nothing: "
            "you have to watch the scale.",
        },
        name="Q2",
    ),
    number(scale_after, original={"power": 16, "overflows": 2}, name="Q2 in numbers"),
    number(clip_sees, original={"norm": 0.75, "power": 16}),
    number(smallest_scale, original={"power": -30}),
    choice(
        "Why does bf16 need no loss scale?",
        right="Its exponent has as many bits as fp32's: what fp32 can hold, it does not flush to 0",
        why="8 bits of exponent: the same range. What it lacks are digits, which a scale could not "
        "give back.",
        wrong={
            "It has more digits than fp16": "Fewer: 7 bits of fraction against 10. It has range.",
            "Autocast keeps bf16 gradients in fp32": "Activations' gradients flow back in the type "
            "of the forward. It is the range that saves them.",
            "GradScaler recognises bf16 and does nothing": "It would scale bf16 as well. It just "
            "is not needed.",
        },
    ),
    choice(
        "In section 2, which gradients were lost in fp16?",
        right="Those of activations, which flow back through the layers",
        why="The weights are fp32 and so are their gradients; what passes between layers is in the "
        "type of the forward.",
        wrong={
            "Those of the weights, which are fp16 under autocast": "Weights and their gradients "
            "stay fp32: section 3 prints their types.",
            "Those of the optimizer": "An optimizer has state, not gradients; it is fp32.",
        },
    ),
]
