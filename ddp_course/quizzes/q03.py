"""Lesson 03: threads and the GIL, what goes through device 0, memory, ranks and GPUs."""

from ..quiz import choice, number


def through_device_0(random, devices=None, gigabytes=None):
    n = devices or random.choice([3, 5, 6, 16])
    size = gigabytes or random.choice([3, 5, 10])
    answer = 2 * (n - 1) * size
    return {
        "question": f"A model of {size} GB under `DataParallel` on {n} GPUs. How many GB of "
        "weights and gradients does device 0 send and receive in one step?",
        "answer": answer,
        "unit": "GB",
        "why": f"Weights to {n - 1} others, gradients back from them: 2 × {n - 1} × {size} = "
        f"{answer} GB, in every step.",
        "mistakes": {
            (n - 1) * size: "That is the weights alone. The gradients come back.",
            2 * n * size: "Device 0 does not send to itself.",
            4 * (n - 1) / n * size: "That is what each rank of a *ring* sends and receives, under "
            "DDP.",
            2 * size: "Once there and back, but to and from each of the others.",
        },
    }


def gathered_outputs(random, devices=None):
    n = devices or random.choice([2, 4, 6])
    texts, vocabulary = random.choice([2, 4, 16]), random.choice([32_000, 128_000])
    if devices == 8:
        texts, vocabulary = 4, 32_000
    each = texts * 1000 * vocabulary * 4 / 1e9
    answer = n * each
    return {
        "question": f"A language model with a vocabulary of {vocabulary:,} on {n} GPUs, {texts} "
        "texts of 1,000 tokens on each, outputs in fp32 (4 bytes). How many GB of outputs does "
        "`DataParallel` gather on device 0?",
        "answer": answer,
        "unit": "GB",
        "why": f"{texts} × 1,000 × {vocabulary:,} × 4 bytes = {each:g} GB a device, {n} times: "
        f"{answer:g} GB. Under DDP each rank keeps its own {each:g}.",
        "mistakes": {
            each: "That is one device's share. All are gathered on device 0.",
            (n - 1) * each: "Device 0 has its own outputs as well.",
            answer / 4: "You counted numbers. Each has 4 bytes.",
        },
    }


QUESTIONS = [
    choice(
        "You time `DataParallel` on a laptop without a GPU: as fast as the plain model. What does "
        "it show?",
        right="Nothing: without GPUs it only passes the call on",
        why="`device_ids` is empty and the whole batch goes through the plain model, in the main "
        "thread. Section 1 watched it.",
        wrong={
            "That threads cost nothing": "No thread was started. Section 1 printed the thread "
            "that ran the forward: the main one.",
            "That the GIL is no problem for PyTorch": "There was one thread, which nobody had to "
            "take turns with.",
            "That DataParallel is as good as DDP": "It did not do anything here. Where it does, "
            "it replicates in every step.",
        },
    ),
    choice(
        "For which model do threads lose most to the GIL?",
        right="One with many small operations and much Python between them",
        why="An operation lets go of the GIL while it computes; the Python around it does not. "
        "The smaller the operations, the larger the share of Python.",
        wrong={
            "One with a few huge matrix products": "These run outside of the GIL: threads can "
            "compute them side by side.",
            "One with many parameters": "Parameters cost memory and copies. The GIL is about "
            "executing Python.",
            "All models alike": "Only the Python part is serialised. Section 3 measured two.",
        },
    ),
    number(through_device_0, original={"devices": 4, "gigabytes": 2}),
    number(gathered_outputs, original={"devices": 8}),
    choice(
        "Four ranks with NCCL on a machine with two GPUs. What happens?",
        right="NCCL refuses: two ranks on one GPU",
        why="“Duplicate GPU detected”, in the first collective. One rank per GPU; or gloo, if "
        "ranks must share one.",
        wrong={
            "It works, at half the speed": "That is gloo, with which ranks can share a GPU. NCCL "
            "wants one for each rank.",
            "Ranks 2 and 3 run on the CPU": "Nothing moves a rank to another device in silence, "
            "and NCCL does not know CPUs.",
            "It hangs": "It could have, but NCCL compares the devices of all ranks when they "
            "meet, and raises an error.",
        },
    ),
]
