"""Lesson 06: whose loss, threads and cores, batch size and learning rate, steps in an epoch."""

from math import ceil

from ..quiz import choice, number


def scaled_rate(random, micro_batch=None, accumulation_steps=None, world_size=None):
    micro_batch = micro_batch or random.choice([8, 16, 32, 64])
    steps = accumulation_steps or random.choice([1, 2, 4])
    ranks = world_size or random.choice([2, 4, 8, 16])
    tuned, rate = random.choice([16, 32, 64]), random.choice([0.02, 0.05, 0.1])
    if (micro_batch, steps, ranks) == (16, 2, 8):
        tuned, rate = 64, 0.05
    batch = micro_batch * steps * ranks
    answer = rate * batch / tuned
    return {
        "question": f"A learning rate of {rate} was tuned for one process with batches of {tuned}. "
        f"Now {ranks} ranks take micro-batches of {micro_batch}, {steps} accumulation step(s) "
        "each. Which learning rate does the linear scaling rule ask for?",
        "answer": answer,
        "why": f"Global batch {micro_batch} × {steps} × {ranks} = {batch}, "
        f"{batch / tuned:g} times {tuned}: {rate} × {batch / tuned:g} = {answer:g}, with a "
        "warm-up where it is large.",
        "mistakes": {
            rate: "The same rate, with fewer steps in an epoch, leads less far: your four ranks "
            "showed it.",
            rate * ranks: "The rule compares *global batches*, not numbers of ranks: micro-batch × "
            "accumulation steps × world size, against the batch the rate was tuned for.",
            rate * micro_batch * ranks / tuned: "You left out the accumulation steps: they make "
            "the global batch bigger, too.",
            rate * tuned / batch: "Upside down: a bigger batch has fewer steps, so each must be "
            "longer, not shorter.",
        },
    }


def steps_in_an_epoch(random, micro_batch=None, world_size=None):
    micro_batch = micro_batch or random.choice([16, 24, 48, 64])
    ranks = world_size or random.choice([2, 3, 4, 6, 8])
    images = ceil(1437 / ranks)
    steps = ceil(images / micro_batch)
    return {
        "question": f"The 1,437 images, {ranks} ranks, batches of {micro_batch} on each rank. How "
        "many steps has an epoch? (`trained` in section 6 counts them: the records of rank 0.)",
        "answer": steps,
        "unit": "steps",
        "tolerance": 0.001,
        "why": f"The sampler gives each rank ⌈1437 / {ranks}⌉ = {images} images, and those make "
        f"⌈{images} / {micro_batch}⌉ = {steps} batches, the last of them perhaps smaller.",
        "mistakes": {
            ceil(1437 / micro_batch): "That is one process alone. The ranks share the images.",
            images // micro_batch: "The last, smaller batch counts: `DataLoader` keeps it unless "
            "you say `drop_last=True`.",
        },
    }


QUESTIONS = [
    choice(
        "Rank 0 prints loss 0.31, rank 1 prints 0.35; both hold equally many samples. Which "
        "number goes into the report?",
        right="0.33, their mean",
        why="The loss of the global batch is the mean over ranks when they hold equally many "
        "samples. It takes an `all_reduce` that every rank calls.",
        wrong={
            "0.31, rank 0's": "Rank 0 saw half of the batch. Section 3 measured how far off that "
            "is in its worst step.",
            "0.66, their sum": "A sum grows with the number of ranks: the same model would look "
            "twice as bad on twice as many.",
            "0.35, the larger one": "Neither rank's own loss is the loss: each knows its own part "
            "of the batch only.",
        },
    ),
    number(scaled_rate, original={"micro_batch": 16, "accumulation_steps": 2, "world_size": 8}),
    choice(
        "Two ranks on a machine with eight cores. How many threads should each rank use for its "
        "tensor operations?",
        right="Four",
        why="The cores are shared out. More threads than cores wait for one another at the end of "
        "every operation, and burn processor time while they wait.",
        wrong={
            "Eight, what PyTorch takes by default": "Then 16 threads fight for eight cores. "
            "Section 5 measured the processor time that burns.",
            "One, always": "That is `torchrun`'s careful default. It leaves six cores idle here.",
            "Sixteen, so that some can wait": "Threads of a tensor operation do not wait for a "
            "disk: they compute. Beyond one for each core they are in each other's way.",
        },
    ),
    number(steps_in_an_epoch, original={"micro_batch": 32, "world_size": 4}),
]
