"""07 · accumulate_window(model, window): one gradient from many micro-batches, one process."""

import torch
import torch.nn.functional as F
from torch import nn

from ..compare import factor, is_times, off, tell, wrong_kind
from ..exercise import Case, Exercise, generator
from .noted import CLIPPED, Forwards, clipped, not_added, too_much_memory

SIZES = {"equal": (8, 8, 8, 8), "ragged": (8, 8, 5), "single": (6,), "uneven": (1, 9, 2)}


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _window(seed: int, kind: str) -> list:
    draw = generator(seed, len(kind))
    return [
        (
            torch.randn(size, 6, generator=draw, dtype=torch.float64),
            torch.randint(3, (size,), generator=draw),
        )
        for size in SIZES[kind]
    ]


def _gradients(model) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        model = _model(seed)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        window, forwards = _window(seed, kind), Forwards()
        model.register_forward_hook(lambda _, inputs, output: forwards.note(inputs[0], output))
        loss = fn(model, window)
        notes = forwards.notes()
        moved = [name for name, p in model.named_parameters() if not p.equal(before[name])]
        alive = sum(p.grad is not None and p.grad.requires_grad for p in model.parameters())
        plain = isinstance(loss, torch.Tensor) and loss.requires_grad
        first = _gradients(model)
        fn(model, window)  # a second window without zero_grad adds to the first
        return {
            "gradients": first,
            "twice": _gradients(model),
            "loss": loss.detach() if isinstance(loss, torch.Tensor) else loss,
            "moved": moved,
            "graph_kept": bool(plain or alive),
            "notes": notes,
        }

    return run


def _expected(seed: int, window: list):
    """Return the mean loss over all samples of the window, and its gradients."""
    model = _model(seed)
    x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
    loss = F.cross_entropy(model(x), y, reduction="sum") / len(y)
    loss.backward()
    return loss.detach(), _gradients(model)


def _mean_of_means(seed: int, window: list):
    model = _model(seed)
    for x, y in window:
        (F.cross_entropy(model(x), y) / len(window)).backward()
    return _gradients(model)


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        window = _window(seed, kind)
        loss, wanted = _expected(seed, window)
        output = outputs[0]
        if output["moved"]:
            return (
                f"it changes the weights ({output['moved'][0]}): stepping is the optimizer's job."
            )
        for name, expected in wanted.items():
            if off(output["gradients"][name], expected) is not None:
                told = tell(f"the gradient of {name}", 0, output["gradients"][name], expected)
                return f"{told}\n{_misconception(output, wanted, seed, window)}"
        if output["graph_kept"]:
            return KEEPS_GRAPH
        if wrong_kind(output["loss"], loss):
            return f"it should return the window's mean loss, not {output['loss']!r}."
        if off(output["loss"], loss, 1e-6, 1e-7) is not None:  # it may be a float32 tensor
            return tell("the returned mean loss", 0, output["loss"], loss, 1e-7)
        if wrong := not_added(_flat(output["twice"]), _flat(wanted)):
            return wrong
        return too_much_memory(output["notes"], [len(y) for _, y in window])

    return judge


KEEPS_GRAPH = (
    "the returned loss still carries its graph, which keeps the activations of a whole window in "
    "memory: add up loss.item() or loss.detach()."
)


def _misconception(output, wanted, seed, window) -> str:
    mine, right = _flat(output["gradients"]), _flat(wanted)
    samples, count = sum(len(y) for _, y in window), len(window)
    if not mine.any():
        return "It is zero: was backward() called, and nothing cleared after it?"
    if is_times(mine, right, count):
        return (
            f"It is {count}× the large batch's: the loss was not divided by the number of "
            "micro-batches."
        )
    if is_times(mine, right, samples):
        return (
            f"It is {samples}× the large batch's: the summed loss was not divided by the number of "
            "samples."
        )
    if is_times(mine, right, 1 / count):
        return f"It is {count}× too small: it was divided by the number of micro-batches twice."
    if clipped(mine, _flat(output["twice"]), right):
        return f"It is {factor(mine, right):.4g}× the large batch's: {CLIPPED}"
    if (times := factor(mine, right)) is not None:
        return (
            f"It is {times:.4g}× the large batch's: the window holds {samples} samples in {count} "
            "micro-batches."
        )
    if off(mine, _flat(_mean_of_means(seed, window))) is None:
        return (
            "It is the mean of the micro-batches' means, in which the samples of a small "
            "micro-batch count too much: divide summed losses by the window's samples."
        )
    return _left_out(mine, seed, window)


def _left_out(mine, seed, window) -> str:
    for which, part in (("last", window[-1:]), ("first", window[:1])):
        if factor(mine, _flat(_expected(seed, part)[1])) is not None:
            return (
                f"Only the {which} micro-batch is in it: are gradients cleared in between, or is "
                "backward() called for one only?"
            )
    if factor(mine, _flat(_expected(seed, window[:-1])[1])) is not None:
        return "The last micro-batch is not in it: it was dropped."
    return "It is that of no mean over these samples."


def _flat(gradients: dict) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def _case(name: str, points: int, kind: str) -> Case:
    return Case(name, points, _run(kind), _judge(kind), worlds=(1,))


EXERCISE = Exercise(
    "07_accumulate_window",
    "accumulate_window",
    ("model", "window"),
    (
        _case("four equal micro-batches", 2, "equal"),
        _case("a ragged last micro-batch", 3, "ragged"),
        _case("one micro-batch alone", 1, "single"),
        _case("sizes all over the place", 2, "uneven"),
    ),
)
