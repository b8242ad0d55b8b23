"""Lesson 09: the order of the lines, one decision on all ranks, what a checkpoint holds."""

from ..quiz import choice, number


def optimizer_steps(random, samples=None, micro=None, steps=None, ranks=None):
    samples = samples or random.choice([12_800, 25_600, 51_200])
    micro = micro or random.choice([8, 16, 32])
    steps = steps or random.choice([2, 4])
    ranks = ranks or random.choice([2, 4, 8])
    answer = samples / (micro * steps * ranks)
    return {
        "question": f"{samples:,} samples, micro-batches of {micro}, accumulation over {steps}, "
        f"{ranks} ranks, no step skipped. How many times does the schedule advance in an epoch?",
        "answer": answer,
        "tolerance": 1e-6,
        "why": f"Once an optimizer step: {samples:,} / ({micro} × {steps} × {ranks}) = "
        f"{answer:,.0f}.",
        "mistakes": {
            samples / (micro * ranks): "Those are micro-batches. The schedule counts steps: one a "
            "window.",
            samples / (micro * steps): "The ranks share the samples.",
            samples / micro: "Those are the micro-batches of all ranks.",
        },
    }


def data_again(random, done=None, saved=None):
    saved = saved or random.choice([300, 400, 600])
    done = done or saved + random.choice([70, 150, 220])
    return {
        "question": f"A checkpoint was written after step {saved}, the run died after step {done}. "
        "It resumes from the checkpoint, with everything in it. How many steps are done twice?",
        "answer": done - saved,
        "tolerance": 1e-6,
        "why": f"{done} − {saved} = {done - saved} steps were lost and are done again, on the same "
        "data with the same random numbers: the result is that of a run which never died.",
        "mistakes": {
            done: "Only what came after the checkpoint.",
            saved: "Those are saved. What came after them is lost.",
        },
    }


QUESTIONS = [
    choice(
        "Where does `no_sync` have to be, for all but the last micro-batch?",
        right="Around forward and backward",
        why="DDP decides in the forward whether the coming backward will all-reduce.",
        wrong={
            "Around backward only": "Then the forward has already armed the all-reduce: nothing is "
            "saved (lesson 07 counts it).",
            "Around the optimizer step": "The all-reduce happens during backward.",
            "Around the last micro-batch only": "The other way round: the last one has to "
            "synchronise, with the sum of all.",
        },
    ),
    choice(
        "Two ranks train without an error, but their weights differ slightly. Which of these can "
        "be the cause?",
        right="The scaler's state was restored on rank 0 only",
        why="Gradients of different scales are averaged, and each rank divides by its own scale: "
        "section 3.",
        wrong={
            "An inf on rank 1 in step 10": "The all-reduce carries it to rank 0: both skip.",
            "`no_sync` is missing": "Then there is too much synchronising, not too little.",
            "The learning rate is too high": "It would be too high on both, in the same way.",
        },
    ),
    number(optimizer_steps, original={"samples": 25_600, "micro": 16, "steps": 4, "ranks": 4}),
    number(data_again, original={"saved": 400, "done": 470}),
    choice(
        "A network with dropout is resumed. The same images come in the same order as in the run "
        "that never stopped, and the loss goes on where it was, but it is not bitwise the same. "
        "What is missing from the checkpoint?",
        right="The state of the random generators",
        why="Dropout and augmentation then draw other numbers: as good, but not the same.",
        wrong={
            "The weights": "It would begin to learn from nothing.",
            "The epoch": "Then the images would come in the order of an earlier epoch.",
            "The process group": "It cannot be saved, and need not be.",
        },
    ),
]
