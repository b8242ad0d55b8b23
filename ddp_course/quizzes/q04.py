"""Lesson 04: what keeps ranks equal, what is averaged, when it is sent, and what DDP cannot see."""

from ..quiz import choice, number


def bytes_sent(random, millions=None, ranks=None):
    millions = millions or random.choice([10, 25, 70, 110, 340])
    ranks = ranks or random.choice([2, 4, 8, 16])
    size = 4 * millions
    sent = 2 * (ranks - 1) / ranks * size
    return {
        "question": f"A model has {millions} million parameters in float32. In a ring all-reduce "
        "over "
        f"{ranks} ranks, how many megabytes of gradients does each rank send in a step?",
        "answer": sent,
        "unit": "MB",
        "why": f"The gradients are 4 × {millions} = {size} MB. In a ring every rank sends "
        f"2 (N − 1) / N of that: 2 × {ranks - 1} / {ranks} × {size} = {sent:g} MB.",
        "mistakes": {
            2
            * (ranks - 1)
            * size: "Each of the 2 (N − 1) messages holds only an N-th of the data.",
            millions: "A float32 number has four bytes.",
            (ranks - 1) * size: "So it would be if each rank sent all it has to every other one. A "
            "ring does better.",
        },
    }


def hidden(random, backward=None, wire=None, last=None):
    backward = backward or random.choice([60, 80, 100])
    last = last or random.choice([5, 10, 15])
    wire = wire or backward // 2
    return {
        "question": f"Backward takes {backward} ms and sending all buckets one after another "
        f"{wire} ms, {last} ms of it for the last bucket, which is ready exactly when backward "
        "ends. The others arrive during backward. How long does the rank wait after backward?",
        "answer": last,
        "unit": "ms",
        "why": f"Only the last bucket is still to be sent when backward ends: {last} ms. The other "
        f"{wire - last} ms were hidden.",
        "mistakes": {
            wire: "So it would be with one bucket, which cannot go before the last gradient is "
            "there.",
            wire - last: "That is what was hidden under backward.",
            0: "The last bucket holds the first layer's gradient: nothing is left to compute while "
            "it travels.",
        },
    }


QUESTIONS = [
    choice(
        "What goes wrong if ranks train on different data without synchronising their gradients?",
        right="Every rank trains a network of its own, on its own part of the data, without an "
        "error",
        why="Weights drift apart from the first step, as the picture of section 1 showed. All "
        "losses fall, nothing complains, and the checkpoint is that of one rank.",
        wrong={
            "Training is slower, but ends at the same weights": "It is even a little quicker, and "
            "ends elsewhere: different gradients lead to different weights.",
            "The first step raises an error, because the gradients differ": "Nobody compares them. "
            "That is what makes this fault so hard to see.",
            "Nothing, if all ranks start from the same weights": "They are equal for one forward. "
            "After the first optimizer step they are not.",
        },
        name="Q4",
    ),
    choice(
        "All ranks average their gradients in every step, but start from different weights. What "
        "becomes of the distance between them (plain SGD)?",
        right="It stays what it was at the start",
        why="The same gradient moves all ranks by the same step, so the difference of their "
        "weights never changes. Hence the broadcast at the start.",
        wrong={
            "It shrinks to 0": "Averaging gradients pulls no weights together: all ranks take the "
            "same step.",
            "It grows and grows": "That is what happens without averaging.",
            "It is 0 after the first step": "Gradients are averaged, not weights.",
        },
    ),
    choice(
        "Rank 0 has 24 samples in its batch and rank 1 has 8; each computes its mean loss. What "
        "does DDP's averaged gradient belong to?",
        right="A loss in which each sample of rank 1 counts three times as much as one of rank 0",
        why="Each rank's mean gets half of the weight: 1/48 for a sample of rank 0, 1/16 for one "
        "of rank 1. DDP sums and divides by the number of ranks; it knows no samples.",
        wrong={
            "The mean loss over the 32 samples": "Only with equal counts on all ranks.",
            "The summed loss over the 32 samples": "Each rank took a mean, and DDP divides by 2.",
            "The loss of rank 0, which has more samples": "Both ranks count, and equally.",
        },
    ),
    number(bytes_sent, original={"millions": 25, "ranks": 4}),
    number(hidden, original={"backward": 80, "wire": 40, "last": 10}),
    choice(
        "A training loop calls `model.module.encode(x)` on a DDP model, computes a loss and calls "
        "`backward()`. What happens to the gradients?",
        right="Each rank keeps its own: they are not averaged",
        why="DDP arms its hooks in its own `forward`. A call that goes around it leaves them "
        "asleep, without an error.",
        wrong={
            "They are averaged, because the hooks sit on the parameters": "They do sit there, but "
            "without DDP's forward before it, they send nothing.",
            "DDP raises an error in backward": "It does not notice.",
            "They are averaged in the next step": "The next step goes around DDP as well.",
        },
    ),
]
