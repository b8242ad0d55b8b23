"""Lesson 11: reading reports of hangs, victims and causes, what each tool finds."""

from ..quiz import choice, number


def missing_call(random, done=None, batches=None):
    batches = batches or random.choice([40, 60, 90])
    done = done or batches - random.choice([3, 7, 11])
    return {
        "question": f"An epoch of {batches} batches, one all_reduce a batch. Rank 2's list of "
        f"collectives ends with number {done}, done; all others wait in number {done + 1}. For how "
        "many batches did rank 2 have data?",
        "answer": done,
        "tolerance": 1e-6,
        "why": f"It has finished {done} and never called number {done + 1}: its loop ended after "
        f"{done} batches.",
        "mistakes": {
            done + 1: "That is the one it never called.",
            batches: "Then it would have called as many.",
            batches - done: "So many are missing.",
        },
    }


def gpu_hours(random, gpus=None, minutes=None):
    gpus = gpus or random.choice([64, 256, 1024])
    minutes = minutes or random.choice([10, 30])
    answer = gpus * minutes / 60
    return {
        "question": f"A job on {gpus:,} GPUs hangs, and the first time-out is {minutes} minutes. "
        "How many GPU hours does this one hang cost, until somebody hears of it?",
        "answer": answer,
        "unit": "GPU hours",
        "why": f"{gpus:,} × {minutes} / 60 = {answer:,.1f}: all of them wait.",
        "mistakes": {
            minutes / 60: "For one GPU. All of them wait.",
            gpus * minutes: "Those are minutes.",
        },
    }


QUESTIONS = [
    choice(
        "Rank 3 says: *Connection closed by peer*. What does that tell you?",
        right="Another rank has gone: look for one that says something else",
        why="The message comes from who is left behind. The cause is on the rank that went.",
        wrong={
            "Rank 3's network is broken": "Rarely. Its peer's process has ended, and with it the "
            "connection.",
            "Rank 3 called the wrong collective": "It waited in one; its partner went away.",
            "The time-out was too short": "A time-out says *Timed out*.",
        },
    ),
    choice(
        "The report: *rank 0 waits in barrier() (line 12); rank 1 waits in all_reduce (line 30)*. "
        "Line 12 is inside of a function `save`. Where is the line to mend?",
        right="Where rank 0 calls save and rank 1 does not",
        why="The barrier is right if all call it. The fault is where the paths part: read rank 0's "
        "stack from the top.",
        wrong={
            "Line 12: the barrier must go": "Then nobody would wait for the file. All have to call "
            "it.",
            "Line 30: the all_reduce is one too many": "It is where rank 1 should be.",
            "Nowhere: a longer time-out": "Neither can ever go on.",
        },
    ),
    choice(
        "Two ranks all-reduce *loss* and *accuracy*, one number each, in another order. What "
        "happens?",
        right="No error: both get the same wrong sums",
        why="The n-th collective meets the n-th, whatever it is. Operation, shape and type agree: "
        "section 4.",
        wrong={
            "A hang": "Both call two all_reduces; all of them are answered.",
            "An error with TORCH_DISTRIBUTED_DEBUG=DETAIL": "It compares operation, shape and "
            "type, which are the same.",
            "The ranks' results differ": "Both sums are 101 on both ranks. So comparing ranks "
            "finds nothing.",
        },
    ),
    number(missing_call, original={"batches": 40, "done": 37}),
    number(gpu_hours, original={"gpus": 1024, "minutes": 30}),
    choice(
        "DDP says *Expected to have finished reduction in the prior iteration*. What is the "
        "cheapest right fix, if one layer is never used in training?",
        right="Freeze the layer, or leave it out of the model",
        why="DDP then does not wait for its gradients, and nothing has to be searched in each "
        "step.",
        wrong={
            "find_unused_parameters=True": "Right, but it walks through the graph in every step.",
            "A barrier before backward": "DDP waits for gradients, not for ranks.",
            "A longer time-out": "It is no question of time: the gradient never comes.",
        },
    ),
]
