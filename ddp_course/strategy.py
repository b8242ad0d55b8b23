"""From a model and a cluster to a strategy, with its arithmetic shown.

    print(strategy.choose(parameters=405e9, layers=126, width=16_384, heads=128, context=8192,
                          global_batch=2048, gpus=16_384))

The simplest that works is taken: 1. DDP, 2. ZeRO-1, 3. FSDP (ZeRO-3), 4. tensor parallelism inside
a node, then pipeline stages across nodes, then context parallelism where the batch is too small.
The rules are arithmetic on memory, batch and network; what a real run reaches is to be measured.
"""

import math
from dataclasses import dataclass, field, replace

from .memory import STRATEGIES, Memory, activation_memory, in_bytes, say

# Bytes per parameter of (weights, gradients, optimizer state), in mixed precision with Adam.
ZERO_PAPER = (2, 2, 12)  # Rajbhandari et al. 2020, section 3.1
MEGATRON_FP16 = (2, 2, 16)  # fp16 gradients and an fp32 copy: Megatron Core, Distributed Optimizer
FP32_GRADIENTS = (2, 4, 12)  # bf16 weights, gradients added up in fp32: the same page


@dataclass(frozen=True)
class Strategy:
    """How to share out training: data · tensor · pipeline · context = number of GPUs.

    `stage`: what of ZeRO the data-parallel ranks share out, 0 (nothing), 1 (optimizer state) or 3
    (everything). `memory`: of one GPU. `formula`: the steps that led here. `micro_batches`: for
    each pipeline in a step. `bubble`: the share of a step in which a pipeline stage idles.
    """

    data: int
    tensor: int
    pipeline: int
    context: int
    stage: int
    memory: Memory
    micro_batches: int
    formula: str = field(repr=False)

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the weights together, ZeRO aside."""
        return self.tensor * self.pipeline

    @property
    def bubble(self) -> float:
        """(p − 1) / (m + p − 1), for p stages and m micro-batches (Huang et al., GPipe, 2019)."""
        return (self.pipeline - 1) / (self.micro_batches + self.pipeline - 1)

    @property
    def name(self) -> str:
        """Return "DDP", "FSDP", "tensor 8 · pipeline 16 · data 128 + ZeRO-1"…"""
        if self.model_parallel * self.context == 1:
            return {0: "DDP", 1: "DDP + ZeRO-1", 3: "FSDP (ZeRO-3)"}[self.stage]
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        parts = [f"{kind} {size}" for kind, size in sizes.items() if size > 1]
        return " · ".join([*parts, f"data {self.data}"]) + " + ZeRO-1" * (self.stage == 1)

    def __str__(self):
        return self.formula


@dataclass(frozen=True)
class _Problem:
    """The model and the cluster, as `choose` was given them."""

    parameters: float
    layers: int
    width: int
    heads: int
    context: int
    global_batch: int
    gpus: int
    gpus_per_node: int
    gpu_memory: float
    usable: float
    bytes_each: tuple
    recompute: str
    sharding: bool
    flops: float
    bandwidth: float

    @property
    def room(self) -> float:
        return self.usable * self.gpu_memory

    @property
    def tokens(self) -> float:
        return self.global_batch * self.context / self.gpus

    def activations(self, t=1, p=1, c=1, micro_batches=1) -> float:
        """Return the bytes that one GPU of the first stage keeps, with one sample a micro-batch.

        A stage of a pipeline has up to p micro-batches on the way (1F1B: Narayanan et al. 2021).
        With full recomputation, the layer that is computed anew comes on top.
        """
        shared = {"width": self.width, "heads": self.heads, "context": self.context // c,
                  "tensor_parallel": t, "sequence_parallel": t > 1}  # fmt: skip
        stage, on_the_way = math.ceil(self.layers / p), min(p, micro_batches)
        kept = {"layers": stage, "micro_batch": on_the_way, "recompute": self.recompute}
        one = {"layers": 1, "micro_batch": 1, "recompute": "selective"}
        anew = activation_memory(**one, **shared).value if self.recompute == "full" else 0
        return activation_memory(**kept, **shared).value + anew

    def memory(self, stage, data, t=1, p=1, c=1) -> Memory:
        """Return what one GPU holds; ZeRO shares out over data · c, which all hold the same."""
        split = STRATEGIES[{0: "ddp", 1: "zero1", 3: "zero3"}[stage]]
        over = [t * p * (data * c if shared else 1) for shared in split]
        held = [size * self.parameters / n for size, n in zip(self.bytes_each, over, strict=True)]
        sums = dict.fromkeys(over, 0)
        for size, n in zip(self.bytes_each, over, strict=True):
            sums[n] += size
        words = [f"{size} B·Φ" + f" / {n:,}" * (n > 1) for n, size in sums.items()]
        if stage == 3:  # the layer at work is gathered whole, and the next one meanwhile
            gathered = 2 * self.bytes_each[0] * self.parameters / self.layers
            held[0] += gathered
            words.append(f"two layers {in_bytes(gathered)}")
        activations = self.activations(t, p, c, max(1, self.global_batch // data))
        total = sum(held) + activations
        words.append(f"activations {in_bytes(activations)} = {in_bytes(total)}")
        mark = "✓" if total <= self.room else "✗"
        return Memory(*held, activations, f"{' + '.join(words)} {mark}")


def choose(
    *,
    parameters: float,
    layers: int,
    width: int,
    heads: int,
    context: int,
    global_batch: int,
    gpus: int,
    gpus_per_node: int = 8,
    gpu_memory: float = 80e9,
    usable: float = 0.9,
    bytes_each: tuple = ZERO_PAPER,
    recompute: str = "full",
    sharding: bool = True,
    flops: float = 400e12,
    bandwidth: float = 50e9,
) -> Strategy:
    """Return a `Strategy` for a transformer on `gpus` GPUs; its `formula` shows each step.

    `global_batch`: sequences of `context` tokens in a step. `usable`: the share of `gpu_memory`
    (bytes) left by CUDA, NCCL and fragmentation. `bytes_each`: per parameter, of weights,
    gradients, optimizer state. `sharding=False`: without ZeRO. `flops`: FLOP/s that a GPU
    delivers; `bandwidth`: bytes/s of its network, between nodes. Raises ValueError for numbers
    that make no sense, and if nothing fits. Rules: D. Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", 2021 (tensor inside a node, then
    pipeline); S. Rajbhandari et al., "ZeRO", 2020 (memory and traffic of its stages).
    """
    given = dict(locals())
    _check(given)
    problem = _Problem(**given | {"gpus_per_node": min(gpus_per_node, gpus)})
    lines = [
        f"Φ = {say(parameters)} parameters, {sum(bytes_each)} B each; "
        f"room on a GPU: {usable:.0%} of {in_bytes(gpu_memory)} = {in_bytes(problem.room)}",
        f"batch: {global_batch:,} sequences × {context:,} tokens on {gpus:,} GPUs "
        f"= {problem.tokens:,.0f} tokens a GPU and step",
    ]
    found = _data_only(problem, lines) or _model_parallel(problem, lines)
    if found is None:
        raise ValueError("\n".join([*lines, "Nothing fits: more GPUs, or a smaller model."]))
    memory, micro_batches = found[-1], max(1, global_batch // found[0])
    chosen = Strategy(*found, micro_batches, "")
    idle = f", idle in the bubble {chosen.bubble:.0%}" if chosen.bubble else ""
    lines.append(f"→ {chosen.name}: {in_bytes(memory.total)} of {in_bytes(problem.room)}{idle}")
    return replace(chosen, formula="\n".join(lines))


def _data_only(problem, lines):
    """Try DDP, ZeRO-1 and FSDP: every GPU has samples of its own."""
    gpus = problem.gpus
    if problem.global_batch < gpus:
        lines.append(f"data parallel alone: {problem.global_batch:,} sequences for {gpus:,} GPUs ✗")
        return None
    for stage, name in ((0, "DDP"), (1, "ZeRO-1"), (3, "FSDP")):
        if stage and (not problem.sharding or gpus == 1):
            break
        memory = problem.memory(stage, gpus)
        lines.append(f"{name}: {memory}")
        if memory.total <= problem.room and (stage < 3 or _network_keeps_up(problem, lines)):
            return gpus, 1, 1, 1, stage, memory
    return None


def _network_keeps_up(problem, lines) -> bool:
    """Say whether FSDP's traffic can hide under its compute, where it leaves the node.

    Weights cross twice and gradients once, 3 × 2 B × Φ; a step computes 6 × Φ × tokens. Φ cancels.
    """
    if problem.gpus <= problem.gpus_per_node:
        return True
    needed = problem.flops / problem.bandwidth
    lines.append(
        f"FSDP's traffic, 6 B·Φ / ({in_bytes(problem.bandwidth)}/s), hides under 6·Φ·tokens / "
        f"({problem.flops / 1e12:.0f} TFLOP/s) from {needed:,.0f} tokens on "
        f"{'✓' if problem.tokens >= needed else '✗'}"
    )
    return problem.tokens >= needed


def _model_parallel(problem, lines):
    """Try tensor sizes up to a node, then pipelines of whole nodes, the smallest that fits."""
    node = [t for t in _divisors(problem.gpus_per_node) if problem.heads % t == 0]
    for t in node[1:]:
        if found := _try(problem, t, 1, lines):
            return found
    for p in _divisors(problem.gpus // node[-1])[1:]:
        # Stages of equal size; embedding and output may count as layers (Llama 3, section 3.3.2).
        equal = problem.layers % p == 0 or (problem.layers + 2) % p == 0
        if equal and (found := _try(problem, node[-1], p, lines)):
            return found
    return None


def _try(problem, t, p, lines):
    """Return a strategy of these sizes if it fits, with the context shared out as far as needed."""
    if problem.gpus % (t * p):
        return None
    ranks = problem.gpus // (t * p)
    # At least p micro-batches for each pipeline, or more than half of a step is bubble.
    most = problem.global_batch // p
    for c in _divisors(ranks):
        data = ranks // c
        if data > most or problem.global_batch % data or problem.context % c:
            continue
        stage = int(problem.sharding and data * c > 1)
        memory = problem.memory(stage, data, t, p, c)
        sizes = f"tensor {t}, pipeline {p}" + f", context {c}" * (c > 1)
        lines.append(f"{sizes}, data {data}: {memory}")
        return (data, t, p, c, stage, memory) if memory.total <= problem.room else None
    return None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _check(given: dict) -> None:
    whole = ("layers", "width", "heads", "context", "global_batch", "gpus", "gpus_per_node")
    for name in whole:
        if type(given[name]) is not int or given[name] < 1:
            raise ValueError(f"{name}={given[name]!r} must be a whole number of at least 1.")
    for name in ("parameters", "gpu_memory", "flops", "bandwidth"):
        if isinstance(given[name], bool) or not given[name] > 0:
            raise ValueError(f"{name}={given[name]!r} must be a number above 0.")
    if not 0 < given["usable"] <= 1:
        raise ValueError(
            f"usable={given['usable']!r} is a share of the memory: above 0, at most 1."
        )
    if len(given["bytes_each"]) != 3:
        raise ValueError("bytes_each: three numbers, for weights, gradients, optimizer state.")
    if given["width"] % given["heads"]:
        raise ValueError(f"width={given['width']} must be a multiple of heads={given['heads']}.")
    if given["gpus"] > given["gpus_per_node"] and given["gpus"] % given["gpus_per_node"]:
        raise ValueError(f"{given['gpus']} GPUs are no whole nodes of {given['gpus_per_node']}.")
