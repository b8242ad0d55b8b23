"""Calculators to play with: training memory, global batch, training time.

Each shows the formula with its numbers; the sum is done by `memory`. Where nobody can use a widget
(nbval, nbconvert, a terminal) the start values are shown once.
"""

from . import memory, plots
from .widgets import interactive, place

SIZES = {  # layers, width, heads, as published for GPT-3 (T. Brown et al., 2020)
    "GPT-3 small, 125 M": (12, 768, 12),
    "GPT-3 2.7 B": (32, 2560, 32),
    "GPT-3 6.7 B": (32, 4096, 32),
    "GPT-3 175 B": (96, 12288, 96),
}
VOCABULARY, CONTEXT = 50257, 2048
GPUS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


def training_memory(model: str = "GPT-3 175 B", **start) -> None:
    """Show a ledger of training memory for a model, precision, optimizer, strategy, GPU count.

    `start`: other start values, such as strategy="zero3", gpus=64, micro_batch=1, gpu_memory=80 (in
    GB).
    """
    values = {
        "model": model, "precision": "bf16", "optimizer": "adamw", "strategy": "none", "gpus": 1,
        "micro_batch": 1, "recompute": "none", "gpu_memory": 80,
    } | start  # fmt: skip
    _check(values, "training_memory", model=SIZES, gpus=GPUS)
    choices = {
        "model": SIZES, "precision": memory.PRECISIONS, "optimizer": memory.OPTIMIZERS,
        "strategy": memory.STRATEGIES, "gpus": GPUS, "micro_batch": (1, 64),
        "recompute": ("none", "selective", "full"), "gpu_memory": (8, 192),
    }  # fmt: skip
    _show("training memory", values, choices, _training_memory)


def _training_memory(model, micro_batch, recompute, gpu_memory, **chosen):
    layers, width, heads = SIZES[model]
    shape = {"layers": layers, "width": width, "context": CONTEXT}
    if chosen["strategy"] == "none" and chosen["gpus"] > 1:
        return "Several GPUs need a strategy: choose another one than none.", None
    counted = memory.gpt_parameters(vocabulary=VOCABULARY, **shape)
    saved = memory.activation_memory(
        heads=heads, micro_batch=micro_batch, recompute=recompute, **shape,
        tensor_parallel=chosen["gpus"] if chosen["strategy"] == "tensor" else 1,
    )  # fmt: skip
    factor = 2 if chosen["precision"] == "fp32" else 1  # the formula is for 16 bit
    held = memory.training_memory(counted.value, activations=factor * saved.value, **chosen)
    twice = " (twice that in fp32)" * (factor == 2)
    text = f"{counted.formula}\n{saved.formula}{twice}\n{held.formula}"
    return text, plots.memory_ledger(held, limit=gpu_memory * 1e9)


def global_batch(micro_batch: int = 64, accumulation_steps: int = 4, world_size: int = 4) -> None:
    """Show the global batch, and in how many micro-batches and optimizer steps it is done."""
    values = {
        "micro_batch": micro_batch, "accumulation_steps": accumulation_steps,
        "world_size": world_size,
    }  # fmt: skip
    choices = {"micro_batch": (1, 512), "accumulation_steps": (1, 64), "world_size": (1, 1024)}
    _show("global batch", values, choices, lambda **v: (memory.global_batch(**v).formula, None))


def training_time(model: str = "GPT-3 175 B", **start) -> None:
    """Show how many days training takes.

    `start`: tokens=300 (in 1e9), gpus=1024, peak=312 (in 1e12 FLOP/s), utilisation=40 (in %).
    """
    values = {"model": model, "tokens": 300, "gpus": 1024, "peak": 312, "utilisation": 40} | start
    _check(values, "training_time", model=SIZES, gpus=GPUS)
    choices = {
        "model": SIZES, "tokens": (1, 2000), "gpus": GPUS, "peak": (10, 2500),
        "utilisation": (1, 100),
    }  # fmt: skip
    _show("training time", values, choices, _training_time)


def _training_time(model, tokens, gpus, peak, utilisation):
    layers, width, _ = SIZES[model]
    counted = memory.gpt_parameters(
        layers=layers, width=width, vocabulary=VOCABULARY, context=CONTEXT
    )
    days = memory.training_time(
        counted.value, tokens * 1e9, gpus=gpus, peak=peak * 1e12, utilisation=utilisation / 100
    )
    return days.formula, None


LABELS = {
    "gpus": "GPUs",
    "gpu_memory": "memory of a GPU (GB)",
    "tokens": "tokens (1e9)",
    "peak": "peak of a GPU (1e12 FLOP/s)",
    "utilisation": "utilisation (%)",
    "recompute": "recompute activations",
}


def _show(name: str, values: dict, choices: dict, compute) -> None:
    """Show what `compute(**values)` returns, (text, picture or None), and again at each change."""
    text, picture = compute(**values)
    if not interactive():
        settings = ", ".join(f"{_label(key)} {value}" for key, value in values.items())
        print(f"{name}: {settings}\n{text}")
        if picture is not None:
            plots.show(picture)
        return
    import ipywidgets

    inputs = {key: _input(key, choices[key], value) for key, value in values.items()}
    said, drawn = ipywidgets.HTML(), ipywidgets.HTML()

    def redraw(_=None):
        text, picture = compute(**{key: part.value for key, part in inputs.items()})
        said.value = f'<pre role="status">{text}</pre>'
        drawn.value = "" if picture is None else picture.html()

    redraw()
    for part in inputs.values():
        part.observe(redraw, "value")
    place(("calculator", name), ipywidgets.VBox([*inputs.values(), said, drawn]))


def _input(key, choice, value):
    import ipywidgets

    look = {"description": _label(key), "style": {"description_width": "15em"}}
    look["layout"] = {"width": "37em"}
    if isinstance(choice, tuple) and isinstance(choice[0], int):
        low, high = choice
        return ipywidgets.IntSlider(value, low, high, continuous_update=False, **look)
    # not a list to choose from: JupyterLab takes the arrow keys from those
    return ipywidgets.SelectionSlider(
        options=list(choice), value=value, continuous_update=False, **look
    )


def _label(key: str) -> str:
    return LABELS.get(key, key.replace("_", " "))


def _check(values, name, **known) -> None:
    for key, choices in known.items():
        if values[key] not in choices:
            raise ValueError(f"{key}={values[key]!r}: choose from {', '.join(map(str, choices))}.")
