"""Lesson 07: batches, divisors, windows, no_sync, memory and schedules."""

import math

from ..quiz import choice, number


def global_batch(random, micro=None, steps=None, ranks=None):
    micro = micro or random.choice([8, 16, 32, 48])
    steps = steps or random.choice([2, 4, 8])
    ranks = ranks or random.choice([2, 4, 8, 16])
    total = micro * steps * ranks
    return {
        "question": f"Micro-batch {micro}, accumulation over {steps} steps, {ranks} GPUs. What is "
        "the global batch?",
        "answer": total,
        "unit": "samples",
        "why": f"micro_batch × accumulation_steps × world_size = {micro} × {steps} × {ranks} = "
        f"{total}.",
        "mistakes": {
            micro * steps: "That is what one GPU adds up. All GPUs contribute to the step.",
            micro * ranks: "That is one micro-batch on each GPU. A step adds up several of them.",
            micro: "That is the micro-batch.",
        },
    }


def optimizer_steps(random, samples=None, micro=None, steps=None):
    samples = samples or random.choice([1000, 1437, 5000])
    micro, steps = micro or random.choice([16, 32, 64]), steps or random.choice([4, 8])
    batches = math.ceil(samples / micro)
    return {
        "question": f"One process, {samples} samples, micro-batches of {micro}, accumulation over "
        f"{steps}, and nothing is dropped. How many optimizer steps has an epoch? (A schedule "
        "needs this number.)",
        "answer": math.ceil(batches / steps),
        "unit": "steps",
        "why": f"{samples} / {micro}, rounded up, are {batches} micro-batches; {batches} / "
        f"{steps}, "
        f"rounded up, are {math.ceil(batches / steps)} windows. The last may be ragged.",
        "mistakes": {
            batches: "These are the micro-batches. The optimizer steps once a window.",
            batches // steps: "So many *full* windows; the ragged last one is a step too.",
        },
        "tolerance": 0,
    }


def all_reduces(random, buckets=None, steps=None):
    buckets, steps = buckets or random.randint(2, 9), steps or random.choice([2, 4, 8])
    return {
        "question": f"DDP has {buckets} buckets, a window {steps} micro-batches. Somebody writes "
        "`loss = criterion(model(x), y)` and then `with model.no_sync(): loss.backward()` for all "
        "but the last micro-batch. How many all-reduces has a window?",
        "answer": buckets * steps,
        "why": f"DDP decides in the forward, which is outside. So every backward sends all "
        "buckets: "
        f"{steps} × {buckets} = {buckets * steps}.",
        "mistakes": {
            buckets: "So it would be with forward *and* backward inside no_sync.",
            steps: "Every backward sends each of the buckets.",
            0: "It would be 0 if nothing ever synchronised; here everything does.",
        },
        "tolerance": 0,
    }


QUESTIONS = [
    number(global_batch, original={"micro": 64, "steps": 4, "ranks": 4}, name="Q1"),
    choice(
        "A window has 4 micro-batches of 64, 64, 64 and 29 samples. Which loss gives the gradient "
        "of the mean over its 221 samples?",
        right="The summed loss of each micro-batch, divided by 221",
        why="The mean over all samples is the sum over all of them, divided by their number. Each "
        "micro-batch contributes its sum.",
        wrong={
            "The mean loss of each micro-batch, divided by 4": "A sample of the last micro-batch "
            "then weighs more than twice as much as the others.",
            "The mean loss of each micro-batch, undivided": "The gradient is four times too long, "
            "and the last micro-batch weighs too much.",
            "The summed loss of each micro-batch, divided by 256": "There are 221 samples, not "
            "256: the gradient is too short.",
        },
    ),
    number(optimizer_steps, original={"samples": 1437, "micro": 64, "steps": 4}),
    number(all_reduces, original={"buckets": 3, "steps": 4}),
    choice(
        "`loss.backward()` for each micro-batch, or add up the losses and call `backward()` once: "
        "what is the difference?",
        right="The same gradient, but the second keeps all activations of the window at once",
        why="Backward is linear, so the sum of gradients is the gradient of the sum. But each loss "
        "holds its graph until backward has run over it.",
        wrong={
            "The second gives another gradient": "Gradients of a sum are the sum of gradients.",
            "The second needs less memory, because backward runs once": "It needs as much as the "
            "big batch: look at what section 8 measured.",
            "None at all": "The gradient is the same; the memory is not.",
        },
    ),
    choice(
        "Why is the gradient of 4 × 64 samples not that of 256 if the model has BatchNorm?",
        right="BatchNorm takes mean and variance over the micro-batch, not over the window",
        why="Every sample's output depends on the other samples of its forward. LayerNorm and "
        "GroupNorm look at one sample at a time.",
        wrong={
            "Its running statistics are updated four times": "They are, but in training the "
            "forward does not use them.",
            "It has no gradient": "Its scale and shift do have gradients.",
            "The division by the number of micro-batches is wrong for it": "The division is the "
            "same for all parameters.",
        },
    ),
]
