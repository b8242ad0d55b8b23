"""Lesson 01: bytes per parameter, memory of several GPUs, days, and what a strategy splits."""

from math import ceil

from ..quiz import choice, number


def memory_in_all(random, batch=None, gpus=None, each=None):
    batch = batch or random.choice([16, 32, 64, 256])
    gpus = gpus or random.choice([2, 3, 6, 8])
    each = each or random.choice([10, 16, 24, 60])
    return {
        "question": f"Training with a batch of {batch} takes {each} GB on one GPU. You train on "
        f"{gpus} GPUs with DDP and a batch of {batch} on each. How much memory is used in all?",
        "answer": each * gpus,
        "unit": "GB",
        "why": f"Each GPU holds a whole copy of the model's state and the activations of its own "
        f"{batch} samples: {each} GB each, {gpus} × {each} = {each * gpus} GB in all. The global "
        f"batch is {gpus} × {batch} = {gpus * batch}.",
        "mistakes": {
            each: "That is what each GPU holds, not all of them together.",
            each / gpus: "DDP does not share the model out: every rank holds all of it.",
            each * gpus * gpus: "Each GPU sees its own batch only: its memory does not grow with "
            "the number of GPUs.",
        },
    }


def gpus_needed(random):
    billions = random.choice([3, 7, 13, 30, 65])
    size = random.choice([24, 40, 80])
    total = 16 * billions
    answer = ceil(total / size)
    return {
        "question": f"A model of {billions} billion parameters is trained with Adam in mixed "
        f"precision. Its state (no activations) is shared out over GPUs with {size} GB each. How "
        "many GPUs are needed at least?",
        "answer": answer,
        "unit": "GPUs",
        "tolerance": 0.001,
        "why": f"16 bytes × {billions}e9 = {total} GB, and ⌈{total} / {size}⌉ = {answer}.",
        "mistakes": {
            ceil(2 * billions / size): "That holds the 16-bit weights. Training also keeps "
            "gradients and the optimizer's numbers: 16 bytes a parameter.",
            ceil(4 * billions / size): "That holds weights in 32 bits, or weights and gradients in "
            "16. The optimizer's 12 bytes are missing.",
            total / size: "You cannot buy a part of a GPU: round up.",
        },
    }


def days(random):
    billions, tokens = random.choice([1, 3, 7, 13]), random.choice([100, 200, 500])
    gpus, peak, share = random.choice([8, 32, 64]), random.choice([312, 989]), 0.4
    work, speed = 6 * billions * 1e9 * tokens * 1e9, gpus * peak * 1e12 * share
    answer = work / speed / 86400
    return {
        "question": f"{billions} billion parameters, {tokens} billion tokens, {gpus} GPUs of "
        f"{peak}e12 FLOP/s, of which training reaches 40 %. How many days? (Your calculator in "
        "section 4 does the same sum.)",
        "answer": answer,
        "unit": "days",
        "tolerance": 0.03,
        "why": f"6·N·D = {work:.3g} operations; {gpus} × {peak}e12 × 0.4 = {speed:.3g} a second; "
        f"{work / speed:.3g} s are {answer:.3g} days.",
        "mistakes": {
            answer * share: "Training does not reach the peak: divide by the 40 % too.",
            answer / 3: "2·N·D is the forward pass alone. Backward takes twice that: 6·N·D.",
            answer * 24: "Those are hours.",
            answer * gpus: "That is one GPU alone.",
        },
    }


QUESTIONS = [
    number(memory_in_all, original={"batch": 128, "gpus": 4, "each": 40}, name="Q3"),
    number(gpus_needed),
    choice(
        "GPT-3's weights are 350 GB in fp16. Why do five GPUs with 80 GB each not suffice to "
        "train it?",
        right="Gradients and the optimizer's numbers take seven times as much again",
        why="16 bytes a parameter in all, of which the 16-bit weight is 2: 2,800 GB, and then "
        "there are activations.",
        wrong={
            "350 GB do not fit into 5 × 80 = 400 GB": "They do, with 50 GB to spare. That is "
            "enough to hold the weights, not to train.",
            "DDP needs a power of two": "Any number of ranks works.",
            "The batch would be too small": "The batch only sets the activations. Without any "
            "batch at all the state does not fit.",
        },
    ),
    choice(
        "The state of your model takes 100 GB, your GPUs have 80 GB, and one layer fits easily. "
        "Which strategy do you try first?",
        right="sharded data (FSDP)",
        why="It shares the state out over the ranks and gathers the weights of the layer at work: "
        "the model's code stays as it is.",
        wrong={
            "data (DDP)": "Every rank would hold all 100 GB. You measured it in section 6.",
            "tensor": "It works, but sends activations several times in every layer. It is for "
            "layers that are too big for one GPU; yours fit.",
            "sequence, context": "It splits activations of long sequences, not the model's state.",
        },
    ),
    number(days),
]
