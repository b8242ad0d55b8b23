"""Lesson 12: rank and local rank, restarts, how often to save."""

from math import sqrt

from ..quiz import choice, number


def place(random, node=None, local=None, per_node=None):
    per_node = per_node or random.choice([4, 8])
    node = random.choice([2, 3, 5]) if node is None else node
    local = random.randrange(1, per_node) if local is None else local
    answer = node * per_node + local
    return {
        "question": f"{per_node} GPUs a node. Which RANK has the process with LOCAL_RANK {local} "
        f"on the node with GROUP_RANK {node}, counted from 0?",
        "answer": answer,
        "tolerance": 1e-6,
        "why": f"{node} × {per_node} + {local} = {answer}: the nodes before it have "
        f"{node * per_node} ranks.",
        "mistakes": {
            local: "That is its number on its own node.",
            (node - 1) * per_node + local: "GROUP_RANK counts from 0.",
            node + local: "Each node before it has several ranks.",
        },
    }


def interval(random, gpus=None, years=None, save=None):
    gpus = gpus or random.choice([500, 1000, 4000])
    years = years or random.choice([4, 5, 6])
    save = save or random.choice([1, 2, 5])
    between = years * 8766 * 60 / gpus  # minutes
    answer = sqrt(2 * save * between)
    return {
        "question": f"A GPU fails once in {years} years (of 8,766 hours); you have {gpus:,}. A "
        f"save takes {save} min. What is Young's interval, in minutes?",
        "answer": answer,
        "unit": "minutes",
        "tolerance": 0.02,
        "why": f"M = {years} × 8,766 × 60 / {gpus:,} = {between:,.0f} min; "
        f"√(2 × {save} × {between:,.0f}) = {answer:,.0f} min.",
        "mistakes": {
            between: "That is the time between failures.",
            sqrt(2 * save * between * gpus): "That is the interval for one GPU.",
            sqrt(save * between): "There is a 2 under the root.",
            between / 2: "Half the time between failures is lost with each failure, not more.",
        },
    }


QUESTIONS = [
    number(place, original={"node": 1, "local": 4, "per_node": 8}),
    choice(
        "A script has `torch.cuda.set_device(dist.get_rank())`. When does it fail?",
        right="From the second node on",
        why="There the rank is not the local rank: rank 8 looks for a ninth GPU.",
        wrong={
            "Always": "On one node rank and local rank are the same.",
            "With more than one rank": "On one node it is right, by luck.",
            "Never: PyTorch takes the rank modulo the GPUs": "It says *invalid device ordinal*.",
        },
    ),
    choice(
        "A rank of 16 is killed. What does torchrun do, with `--max-restarts 3`?",
        right="It ends all 16 and starts all 16 again, from the script's first line",
        why="A process group cannot lose a member and go on. What they knew is gone, unless it is "
        "in a checkpoint.",
        wrong={
            "It starts the one again, the others wait": "They have lost their connection to it, "
            "and their group with it.",
            "It starts the one again where it was": "Nobody has saved where it was but your "
            "script.",
            "It goes on with 15": "Only with another number of *nodes*, if `--nnodes` is a range; "
            "and then all start again, too.",
        },
    ),
    choice(
        "A run for 4 nodes goes on with 3, and the script does not take notice. What changes?",
        right="The global batch is three quarters, with the old learning rate",
        why="micro_batch × accumulation_steps × world_size: fewer ranks, smaller batch, more steps "
        "an epoch. No error.",
        wrong={
            "Nothing, only the time": "Time changes, too.",
            "It fails: the checkpoint does not fit": "Weights and optimizer have no rank in them.",
            "A quarter of the data is never seen": "The sampler deals all of it to those that are "
            "there.",
        },
    ),
    number(interval, original={"gpus": 1000, "years": 5, "save": 1}),
]
