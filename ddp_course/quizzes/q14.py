"""Lesson 14: how to know that a distributed training script is right."""

from ..quiz import choice, number


def all_reduces(random, sequences=None, micro=None, steps=None, ranks=None):
    micro = micro or random.choice([8, 16, 32])
    steps = steps or random.choice([2, 4, 8])
    ranks = ranks or random.choice([2, 4, 8])
    windows = random.choice([50, 100, 200])
    sequences = sequences or windows * micro * steps * ranks
    answer = sequences / (micro * steps * ranks)
    return {
        "question": f"An epoch of {sequences:,} sequences, micro-batches of {micro}, accumulation "
        f"over {steps}, {ranks} ranks, one gradient bucket. How many times are the gradients "
        "all-reduced in an epoch, if the script is right?",
        "answer": answer,
        "tolerance": 1e-6,
        "why": f"Once a window: {sequences:,} / ({micro} × {steps} × {ranks}) = {answer:,.0f}.",
        "mistakes": {
            sequences / (micro * ranks): "Once for each micro-batch is what a script does that "
            "forgot `no_sync`.",
            answer * ranks: "An all-reduce is one operation, in which all ranks take part.",
        },
    }


def efficiency(random, one=None, many=None, ranks=None):
    ranks = ranks or random.choice([4, 8, 16])
    one = one or random.choice([10_000, 12_000, 20_000])
    many = many or round(one * ranks * random.choice([0.7, 0.8, 0.9]))
    answer = 100 * many / one / ranks
    return {
        "question": f"One GPU trains on {one:,} tokens/s, {ranks} GPUs together on {many:,}. "
        "What is the efficiency, in percent?",
        "answer": answer,
        "unit": "%",
        "why": f"The speed-up is {many:,} / {one:,} = {many / one:.1f}; divided by {ranks} ranks: "
        f"{answer:.0f} %.",
        "mistakes": {
            100 * many / one: "That is the speed-up; divide it by the number of ranks.",
            100 * one * ranks / many: "The other way round.",
        },
    }


QUESTIONS = [
    choice(
        "You made a script distributed. Which observation is the best sign that it is right?",
        right="On a small model in float64, two ranks end with the weights of one process that "
        "takes the global batches",
        why="It covers sampler, averaging, windows, clipping and schedule at once, to many digits.",
        wrong={
            "The loss goes down on all ranks": "It also goes down when each rank trains alone "
            "(section 2).",
            "All ranks print the same loss": "They do so too with a wrong divisor, without "
            "clipping, or when all train on the same data.",
            "It runs for an hour without an error": "First attempts do.",
        },
    ),
    number(all_reduces, original={"sequences": 12_800, "micro": 16, "steps": 4, "ranks": 2}),
    choice(
        "The test loss of a run on three ranks is a little higher than that of one process with "
        "the same weights. What is the likely cause?",
        right="Sequences that pad the ranks' parts are counted twice",
        why="A DistributedSampler repeats items until all parts are equal: right for training, a "
        "bias in a test (lesson 05).",
        wrong={
            "Rounding: sums in another order": "That shows in the sixth digit, not in the second.",
            "The weights differ between ranks": "Then more than the test loss is wrong; and it "
            "said: with the same weights.",
            "The test set was not shuffled": "A mean does not depend on the order.",
        },
    ),
    number(efficiency, original={"one": 10_000, "many": 64_000, "ranks": 8}),
    choice(
        "After a restart from its checkpoint the loss jumps up for fifty steps, then goes on as "
        "before. What was not restored?",
        right="The optimizer's state",
        why="AdamW begins with empty moments again: its first steps are large and blind.",
        wrong={
            "The model's weights": "Then it would begin at the loss of an untrained model.",
            "The epoch number": "It would train on old data again, and the loss would rather be "
            "too low.",
            "The world size": "With another number of ranks the global batch changes: nothing that "
            "passes after fifty steps.",
        },
    ),
]
