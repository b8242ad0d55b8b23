"""Lesson 13: what is shared out, what it sends, and what fits."""

from ..quiz import choice, number


def zero_memory(random, billions=None, gpus=None):
    billions = billions or random.choice([3, 7, 13])
    gpus = gpus or random.choice([4, 8, 16])
    answer = 4 * billions + 12 * billions / gpus
    return {
        "question": f"{billions} billion parameters in mixed precision with Adam: 2 bytes for a "
        f"weight, 2 for a gradient, 12 for the optimizer. ZeRO-1 on {gpus} GPUs. How many GB does "
        "one GPU hold, without activations?",
        "answer": answer,
        "unit": "GB",
        "why": f"Weights and gradients stay whole, (2 + 2) × {billions} = {4 * billions} GB; the "
        f"optimizer state is shared out: 12 × {billions} / {gpus} = {12 * billions / gpus:.4g} GB. "
        f"Together {answer:.4g} GB.",
        "mistakes": {
            16 * billions: "That is DDP: nothing is shared out.",
            16 * billions / gpus: "That is FSDP (ZeRO-3), which shares out weights and gradients "
            "as well.",
            12 * billions / gpus: "Weights and gradients are on every GPU, too.",
        },
    }


def bubble(random, stages=None, micro_batches=None):
    stages = stages or random.choice([4, 8, 16])
    micro_batches = micro_batches or random.choice([8, 16, 32])
    slots = micro_batches + stages - 1
    answer = 100 * (stages - 1) / slots
    return {
        "question": f"A pipeline of {stages} stages and {micro_batches} micro-batches a step, all "
        "equally long. What share of a step does a stage wait in the bubble?",
        "answer": answer,
        "unit": "%",
        "why": f"(p − 1) / (m + p − 1) = {stages - 1} / {slots} = {answer:.3g} %.",
        "mistakes": {
            100 * (stages - 1) / micro_batches: "That is the bubble against the *work*; a step is "
            "the work and the bubble.",
            100 / stages: "That would be the share of one stage, whatever the micro-batches.",
        },
    }


def traffic(random, measured=None):
    unit = measured or random.choice([2, 4, 8])
    return {
        "question": f"In a step, DDP's all-reduces make each rank send {unit} GB. You change to "
        "FSDP (`reshard_after_forward=True`), nothing else, with a backend that has a "
        "reduce-scatter. How many GB does a rank send now? Use what you measured in section 3.",
        "answer": 1.5 * unit,
        "unit": "GB",
        "why": f"DDP sends 2 Φ(n−1)/n, FSDP 3 Φ(n−1)/n: 3 / 2 × {unit} = {1.5 * unit:g} GB. The "
        "weights are gathered twice, the gradients scattered once.",
        "mistakes": {
            unit: "That is ZeRO-1, or FSDP that keeps the weights until backward.",
            2 * unit: "That is what gloo did, which makes a reduce-scatter of an all-reduce.",
            unit / 2: "Each rank holds a part, but needs all the weights in every step.",
        },
    }


QUESTIONS = [
    number(zero_memory, original={"billions": 7, "gpus": 8}),
    choice(
        "A script makes Adam, then calls `fully_shard(model)`, then trains. What happens?",
        right="It runs, and no weight moves",
        why="The model has new, sharded parameters; the optimizer holds the old ones, which get "
        "no gradient.",
        wrong={
            "An error at the first step": "The optimizer finds parameters without gradients, and "
            "leaves those alone.",
            "It trains, with the whole state on each rank": "The optimizer would have to hold the "
            "model's parameters for that. It holds the old ones.",
            "It trains as usual": "Section 3 measured it: nothing moves.",
        },
    ),
    number(traffic, original={"measured": 4}),
    choice(
        "Tensor parallelism over 2 GPUs, data parallelism over 4 pairs of them. By what does the "
        "sampler share out the data?",
        right="By the 4 pairs: both GPUs of a pair read the same samples",
        why="The halves of a layer's output are added up: they must be of the same samples.",
        wrong={
            "By the 8 GPUs": "Then halves of different samples are added up, without an error.",
            "By the 2 GPUs of a pair": "Those work on one batch together.",
            "Not at all": "Then the 4 pairs all learn the same.",
        },
    ),
    number(bubble, original={"stages": 4, "micro_batches": 8}),
    choice(
        "Inside a node the links are fast, between nodes slow. A model needs 16 GPUs for one copy, "
        "8 to a node. How is it split?",
        right="Tensor 8 inside each node, a pipeline of 2 across",
        why="Tensor parallelism waits for activations several times a layer, a pipeline sends them "
        "once at each cut.",
        wrong={
            "Tensor 16": "Then each layer waits several times for the slow links.",
            "Pipeline of 16": "It works, but has a larger bubble; tensor parallelism is cheap "
            "inside a node.",
            "Pipeline of 8 inside each node, tensor 2 across": "The other way round: tensor "
            "parallelism is the one that needs fast links.",
        },
    ),
]
