"""How much memory training takes, how big a batch is, how long it lasts: arithmetic, and a check.

Every function returns its number with the `formula` that gave it, numbers filled in. Bytes, unless
said otherwise; 1 GB is 10^9 bytes. `measure` counts what a real model allocates in a real step.
"""

from dataclasses import dataclass, replace

import torch

# Bytes per parameter: weights, gradients, and what the optimizer keeps besides its own states.
# "fp16", "bf16": 16-bit weights and gradients, with fp32 weights kept by the optimizer
# (Rajbhandari et al. 2020, section 3.1). "amp": what torch.amp.autocast does, fp32 weights and
# gradients, only the work in 16 bit.
PRECISIONS = {"fp32": (4, 4, 0), "amp": (4, 4, 0), "fp16": (2, 2, 4), "bf16": (2, 2, 4)}
OPTIMIZERS = {"sgd": 0, "momentum": 4, "adam": 8, "adamw": 8}  # fp32 states, bytes per parameter
# Which of (weights, gradients, optimizer state) a strategy shares out over its GPUs.
STRATEGIES = {
    **dict.fromkeys(("none", "ddp"), (False, False, False)),
    "zero1": (False, False, True),
    "zero2": (False, True, True),
    **dict.fromkeys(("zero3", "fsdp", "tensor", "pipeline"), (True, True, True)),
}


@dataclass(frozen=True)
class Memory:
    """What one GPU holds during training, in bytes, and the `formula` that says so."""

    weights: float
    gradients: float
    optimizer_state: float
    activations: float = 0
    formula: str = ""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer_state + self.activations

    def parts(self) -> dict[str, float]:
        """Return the four parts in the order in which they are always stacked."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "activations": self.activations,
        }

    def __str__(self):
        return self.formula


@dataclass(frozen=True)
class Result:
    """A number with its unit, and the `formula` that gave it."""

    value: float
    unit: str
    formula: str

    def __str__(self):
        return self.formula


def training_memory(
    parameters: float,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    strategy: str = "none",
    gpus: int = 1,
    activations: float = 0,
) -> Memory:
    """Return what one of `gpus` GPUs holds to train a model with so many parameters.

    `activations`: bytes on one GPU, taken as they are (see `activation_memory`). Mixed precision
    with Adam is 16 bytes a parameter, and ZeRO's stages share them out, as in S. Rajbhandari et
    al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. Left out:
    the CUDA context, communication buffers (DDP's buckets hold the gradients once more unless
    gradient_as_bucket_view=True), what ZeRO-3 gathers for the layer at work, and fragmentation.
    """
    _positive(parameters=parameters)
    _whole(gpus=gpus)
    chosen = {"precision": (precision, PRECISIONS), "optimizer": (optimizer, OPTIMIZERS)}
    for name, (value, known) in {**chosen, "strategy": (strategy, STRATEGIES)}.items():
        if value not in known:
            raise ValueError(f"{name}={value!r}: choose from {', '.join(known)}.")
    if strategy == "none" and gpus != 1:
        raise ValueError(f'strategy "none" is for one GPU, not {gpus}: name a strategy.')
    if not activations >= 0:
        raise ValueError(f"activations={activations!r}: a number of bytes, 0 or more.")
    weight, gradient, master = PRECISIONS[precision]
    each = (weight, gradient, master + OPTIMIZERS[optimizer])
    names = ("weights", "gradients", "optimizer state")
    lines, held = [], []
    for name, size, shared in zip(names, each, STRATEGIES[strategy], strict=True):
        held.append(size * parameters / (gpus if shared else 1))
        split = f" / {gpus:,}" if shared and gpus > 1 else ""
        lines.append(f"{name}: {size} B × {say(parameters)}{split} = {in_bytes(held[-1])}")
    lines.append(f"activations: {in_bytes(activations)}")
    whole = sum(held) + activations
    lines.append(f"one GPU: {' + '.join(map(in_bytes, (*held, activations)))} = {in_bytes(whole)}")
    return Memory(*held, activations, "\n".join(lines))


def activation_memory(
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    micro_batch: int,
    recompute: str = "none",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> Result:
    """Return the bytes of activations that a transformer saves for backward, in 16 bit, on a GPU.

    A layer: s·b·h·(34 + 5·a·s/h) bytes, for s = context, b = micro_batch, h = width, a = heads.
    `recompute`: "selective" leaves out the attention matrices (as flash attention does), "full"
    keeps each layer's input, 2·s·b·h. Over t GPUs, tensor parallelism shares out 24 of the 34 and
    the attention, sequence parallelism the other 10 too. Embedding and logits are left out. Source:
    V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
    _whole(**sizes, micro_batch=micro_batch, tensor_parallel=tensor_parallel)
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f'recompute={recompute!r}: choose "none", "selective" or "full".')
    t, whole = tensor_parallel, 1 if sequence_parallel else tensor_parallel
    attention = 5 * heads * context / width if recompute == "none" else 0
    factor = 10 * whole / t + (24 + attention) / t if t > 1 else 34 + attention
    words = f"(34 + 5·{heads}·{context:,}/{width:,})" if attention else "34"
    if recompute == "full":
        factor, words = 2 / (1 if whole == t else t), "2"
    elif t > 1:
        words = f"{factor:.4g}"
    value = layers * context * micro_batch * width * factor
    numbers = f"{layers} layers × {context:,} × {micro_batch} × {width:,}"
    return Result(value, "B", f"activations: {numbers} × {words} B = {in_bytes(value)}")


def gpt_parameters(*, layers: int, width: int, vocabulary: int, context: int) -> Result:
    """Return the parameters of a GPT-2 or GPT-3 (learned positions, tied output weights).

    12·h² + 13·h a layer: query, key, value, output 4·h², the MLP 8·h², biases and norms 13·h.
    """
    _whole(layers=layers, width=width, vocabulary=vocabulary, context=context)
    value = layers * (12 * width**2 + 13 * width) + (vocabulary + context + 2) * width
    in_layers = f"{layers} × (12 × {width:,}² + 13 × {width:,})"
    around = f"({vocabulary:,} + {context:,} + 2) × {width:,}"
    return Result(value, "parameters", f"parameters: {in_layers} + {around} = {say(value)}")


def global_batch(micro_batch: int, accumulation_steps: int = 1, world_size: int = 1) -> Result:
    """Return the number of samples that one optimizer step learns from."""
    _whole(micro_batch=micro_batch, accumulation_steps=accumulation_steps, world_size=world_size)
    value = micro_batch * accumulation_steps * world_size
    numbers = f"{micro_batch:,} × {accumulation_steps:,} × {world_size:,} = {value:,}"
    names = "micro-batch × accumulation steps × world size"
    return Result(value, "samples", f"global batch: {names} = {numbers}")


def training_time(
    parameters: float, tokens: float, *, gpus: int, peak: float, utilisation: float = 0.4
) -> Result:
    """Return the days that training takes: 6·N·D floating point operations, by what GPUs deliver.

    2·N a token forward and 4·N backward (J. Kaplan et al., "Scaling Laws for Neural Language
    Models", 2020). `peak`: FLOP/s that one GPU's data sheet names; `utilisation`: the share of it
    that training reaches, above 0, at most 1.
    """
    _positive(parameters=parameters, tokens=tokens, peak=peak, utilisation=utilisation)
    _whole(gpus=gpus)
    if utilisation > 1:
        raise ValueError(f"utilisation={utilisation} is a share of the peak: at most 1.")
    work, speed = 6 * parameters * tokens, gpus * peak * utilisation
    days, share = work / speed / 86_400, f"{utilisation:.0%}"
    said = f"{days:,.0f} days" if days >= 100 else f"{days:.3g} days"
    lines = (
        f"work: 6 × {say(parameters)} × {say(tokens)} = {_power(work)} FLOP",
        f"speed: {gpus:,} GPU(s) × {_power(peak)} FLOP/s × {share} = {_power(speed)} FLOP/s",
        f"time: {_power(work)} / {_power(speed)} = {_power(work / speed)} s = {said}",
    )
    return Result(days, "days", "\n".join(lines))


def measure(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of) -> Memory:
    """Take one training step, and return the bytes of the tensors that it really allocated.

    `loss_of(model)` returns the loss. Activations are all tensors that autograd saved for backward
    (a storage once, however many views of it), the batch among them, the weights not. Optimizer
    state: all but the step counters. Buffers of a wrapper such as DDP are not counted.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = {}  # holds the storages, so that no address is used twice

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    optimizer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    activations = sum(storage.nbytes() for storage in saved.values())
    loss.backward()
    optimizer.step()
    states = (value for state in optimizer.state.values() for value in state.values())
    held = Memory(
        sum(parameter.nbytes for parameter in model.parameters()),
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        sum(v.nbytes for v in states if isinstance(v, torch.Tensor) and v.dim() > 0),
        activations,
    )
    lines = [f"{name}: {in_bytes(value)}" for name, value in held.parts().items()]
    return replace(held, formula="\n".join([*lines, f"counted: {in_bytes(held.total)}"]))


def in_bytes(value: float) -> str:
    """Return "2,800 GB", "1.5 MB", "0 B": three digits, or whole from 1,000 on; GB at most."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:,.0f} {unit}" if scaled >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} B"


def say(count: float) -> str:
    """Return a count as people write it: 512, 4,810, 4.81e6, 175e9."""
    if count < 1e5:
        return f"{count:,.6g}"
    power = next(p for p in (12, 9, 6, 3) if count >= 0.9995 * 10**p)
    return f"{count / 10**power:.4g}e{power}"


def _power(value: float) -> str:
    return f"{value:.3g}".replace("e+", "e")


def _positive(**numbers) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}={value!r} must be a number above 0.")


def _whole(**numbers) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
