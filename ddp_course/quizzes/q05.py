"""Lesson 05: padding, set_epoch, exact accuracy, seeds, uneven inputs, weights of samples."""

from fractions import Fraction
from math import ceil

from ..quiz import choice, number


def processed(random, samples=None, ranks=None):
    ranks = ranks or random.choice([3, 4, 6, 8, 16])
    samples = samples or random.randint(4, 30) * ranks + random.randint(1, ranks - 1)
    each = ceil(samples / ranks)
    return {
        "question": f"{samples} samples, {ranks} ranks, `DistributedSampler` as it is by default. "
        "How many samples do all ranks process together in an epoch?",
        "answer": each * ranks,
        "unit": "samples",
        "tolerance": 1e-6,
        "why": f"Each rank gets ⌈{samples} / {ranks}⌉ = {each}: {ranks} × {each} = {each * ranks}, "
        f"{each * ranks - samples} of them dealt a second time.",
        "mistakes": {
            samples: "That would need ranks with different numbers of samples. The sampler makes "
            "them equal by dealing some twice.",
            samples // ranks * ranks: "That is `drop_last=True`. By default nothing is left out.",
            each: "That is one rank.",
        },
    }


def padded_accuracy(random, samples=None, ranks=None, right=None):
    ranks = ranks or random.choice([4, 5, 8])
    samples = samples or ranks * random.randint(2, 4) + 1
    extra = -samples % ranks
    right = right or random.randint(samples // 3, samples - extra)
    answer = Fraction(right, samples + extra)
    return {
        "question": f"A test set of {samples} samples is dealt to {ranks} ranks by "
        f"`DistributedSampler(shuffle=False)`. The model gets {right} of them right, none of them "
        f"among the first {extra}. Which accuracy do the ranks report? (Your run in section 3 "
        "shows such numbers.)",
        "answer": float(answer),
        "tolerance": 0.004,
        "why": f"{samples} are padded to {samples + extra} with the first {extra}, which count as "
        f"wrong twice: {right} / {samples + extra} = {float(answer):.4f}, where {right} / "
        f"{samples} = {right / samples:.4f} is true.",
        "mistakes": {
            right / samples: "That is the true accuracy. Padding changes what is reported.",
            (right + extra) / (samples + extra): "The repeated samples are the first ones, and "
            "those it gets wrong.",
        },
    }


def weight_of_a_sample(random, first=None, second=None):
    first = first or random.choice([8, 12, 16, 24, 32])
    second = second or random.choice([n for n in (2, 3, 4, 6) if n < first])
    answer = Fraction(first, second)
    return {
        "question": f"Rank 0's batch holds {first} samples, rank 1's holds {second}. Each takes "
        "the mean of its losses, DDP averages the gradients. How many times as much does a sample "
        "on rank 1 count as one on rank 0?",
        "answer": float(answer),
        "unit": "times",
        "why": f"Each rank has half of the average: 1/{2 * first} a sample on rank 0, 1/"
        f"{2 * second} on rank 1, so {first}/{second} = {float(answer):.4g} times.",
        "mistakes": {
            1: "That is what count-weighting gives. The mean of two means does not.",
            float(1 / answer): "The other way round: the *fewer* samples share a half, the more "
            "each of them counts.",
        },
    }


QUESTIONS = [
    number(processed, original={"samples": 22, "ranks": 4}),
    choice(
        "A run forgets `sampler.set_epoch(epoch)`. What would you see?",
        right="Nothing unusual: each epoch has the same order, and the loss falls",
        why="Each sample is still seen once an epoch. Only the order of the first epoch comes back "
        "in every one, on every rank.",
        wrong={
            "Ranks train on overlapping samples": "All ranks shuffle with the same seed either "
            "way: their parts do not overlap.",
            "An error in the second epoch": "The sampler does not know that there is a second "
            "epoch. That is the problem.",
            "Rank 0 and rank 1 swap their parts every epoch": "They keep them: rank 0 never sees "
            "the samples of rank 1.",
        },
    ),
    number(padded_accuracy, original={"samples": 21, "ranks": 4, "right": 14}),
    choice(
        "Which seed goes where?",
        right="The same on all ranks for weights and data order, then seed + rank for dropout and "
        "augmentation",
        why="What ranks must agree on needs one seed; what should differ between them needs their "
        "own, set after the model is built.",
        wrong={
            "The same seed for everything": "Then all ranks draw the same augmentations: you "
            "counted four different ones of eight.",
            "seed + rank for everything": "Then the sampler's orders differ: some samples go to "
            "two ranks and some to none. (DDP repairs the weights only.)",
            "No seed at all": "The sampler has a seed of 0 by default, and DDP copies rank 0's "
            "weights, so it even works. But no run could be repeated.",
        },
    ),
    choice(
        "Rank 0 has five batches, rank 1 has four, both inside `with Join([model])`. How much of "
        "rank 0's gradient is in the fifth step?",
        right="Half of it",
        why="Rank 1 answers with zeros, and DDP divides by the two ranks that there were at the "
        "start.",
        wrong={
            "All of it": "It would be if DDP divided by the ranks still at work, for which `Join` "
            "has the option divide_by_initial_world_size=False.",
            "None, the step is skipped": "Rank 0 takes its step, and rank 1 shadows it.",
        },
    ),
    number(weight_of_a_sample, original={"first": 6, "second": 2}),
]
