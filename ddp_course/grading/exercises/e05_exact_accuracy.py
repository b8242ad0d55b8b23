"""05 · exact_accuracy(model, dataset, batch_size): one number on all ranks, each sample once."""

import math

import torch
from torch import nn
from torch.utils.data import Dataset

from ..compare import many
from ..exercise import Case, Exercise, calls, generator, same_calls
from .accuracies import wrong_ways

CLOSE = 1e-6  # no quotient of other counts is so near


class _Net(nn.Module):
    """A network with dropout that notes how it was called."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
        self.sizes, self.trained, self.graphs = [], 0, 0

    def forward(self, x):
        self.sizes.append(len(x))
        self.trained += self.training
        logits = self.layers(x)
        self.graphs += logits.requires_grad
        return logits


class _Samples(Dataset):
    """Samples of which a list says which the network gets right."""

    def __init__(self, seed: int, net: _Net, right: list):
        self.x = torch.randn(len(right), 6, generator=generator(seed), dtype=torch.float64)
        with torch.no_grad():
            predicted = net.eval()(self.x).argmax(1)
        net.sizes.clear()
        net.trained = 0
        self.y = torch.where(torch.tensor(right), predicted, (predicted + 1) % 4)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.x[index], self.y[index]


def _right(seed: int, length: int) -> list:
    """Which samples are to be right: in a long set the first two and the last two, so that what is
    padded or dropped is seen, and two that are not.
    """
    if length < 8:
        return [index == 0 for index in range(length)]
    drawn = torch.rand(length, generator=generator(seed, length)) < 0.6
    drawn[:2], drawn[2:4], drawn[-2:] = True, False, True
    return drawn.tolist()


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)  # also of NumPy's numbers
    return None if value is None else repr(value)[:40]


def _run(lengths, batch_size: int):
    def run(fn, rank, world_size, seed):
        told = {}
        for length in lengths:
            net = _Net(seed)
            dataset = _Samples(seed, net, _right(seed, length))
            net.train()
            called = len(calls())
            value = fn(net, dataset, batch_size)
            made, after_train = calls()[called:], net.training
            sizes, trained, graphs = list(net.sizes), net.trained, net.graphs
            fn(net.eval(), dataset, batch_size)
            told[str(length)] = {
                "value": _plain(value),
                "sizes": sizes,
                "trained": trained,
                "graphs": graphs,
                "modes": [after_train, net.training],
                "collectives": made,
            }
        return told

    return run


def _judge(lengths, batch_size: int):
    def judge(outputs, world_size, seed):
        for length in lengths:
            right = _right(seed, length)
            told = [output[str(length)] for output in outputs]
            wrong = _wrong(told, right, world_size, batch_size) or same_calls(told)
            if wrong:
                return f"{many(length, 'sample')}: {wrong}"
        return None

    return judge


def _wrong(told, right, world_size, batch_size) -> str | None:
    truth, length = sum(right) / len(right), len(right)
    values, evaluated = [], sum(sum(output["sizes"]) for output in told)
    for rank, output in enumerate(told):
        if wrong := _wrong_call(output):
            return f"rank {rank}: {wrong}"
        value = output["value"]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            return f"rank {rank} returns {_short(value)}: every rank returns the accuracy."
        values.append(float(value))
    for rank, value in reversed(list(enumerate(values))):
        if not abs(value - truth) <= CLOSE:
            return (
                f"rank {rank} says {value:.4f}, and {sum(right)} of {length} are right: "
                f"{truth:.4f}.\n{_misconception(values, right, batch_size, evaluated)}"
            ).rstrip()
    # With equal parts a mean of means is right but for rounding: it fails where they are not.
    if wrong := _rounded(values, truth, 0 if length % world_size else 1e-12):
        return wrong
    if evaluated < length:
        return f"evaluated: {many(evaluated, 'sample')}. It is luck that the number is right."
    return _wrong_work(told, length, world_size, batch_size)


def _rounded(values, truth, allowed) -> str | None:
    """Say what rounds the last digits of these numbers, which are right but for these."""
    for rank, value in enumerate(values):
        if abs(value - truth) <= allowed:
            continue
        told = f"rank {rank} says {value!r}, where {truth!r} is right: the last digits are off.\n"
        if value == torch.tensor(value, dtype=torch.float32).item():
            return told + (
                "It is a number in float32, which has 7 digits. torch divides tensors of whole "
                "numbers in float32: divide Python's numbers (.item()), or in torch.float64."
            )
        return told + (
            "Shares that are added up are rounded each. Add up whole numbers, and divide once."
        )
    return None


def _short(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "nothing" if value is None else value


def _wrong_call(output) -> str | None:
    if output["trained"]:
        return "the forward ran in training mode, where dropout drops: call model.eval() first."
    if output["graphs"]:
        return (
            "the forward built a graph that nobody needs, and kept its activations: evaluate "
            "under torch.no_grad()."
        )
    before = (True, False)
    for was, now in zip(before, output["modes"], strict=True):
        if was != now:
            modes = {True: "training", False: "evaluation"}
            return (
                f"the model came in {modes[was]} mode and is left in {modes[now]} mode: note "
                "model.training first, and put it back."
            )
    return None


def _wrong_work(told, length, world_size, batch_size) -> str | None:
    share = math.ceil(length / world_size)
    for rank, output in enumerate(told):
        if sum(output["sizes"]) > share:
            return (
                f"rank {rank} evaluates {sum(output['sizes'])} samples, where its share is {share}:"
                " the ranks do the same work several times over."
            )
        if max(output["sizes"], default=0) > batch_size:
            return (
                f"rank {rank}: {max(output['sizes'])} samples in one forward, and batch_size is "
                f"{batch_size}."
            )
    return None


def _misconception(values, right, batch_size, evaluated) -> str:
    if any(map(math.isnan, values)):
        return "A rank without a sample has no accuracy (0/0 is nan). Add up counts instead."
    for message, theirs in wrong_ways(right, len(values), batch_size, evaluated):
        if all(abs(a - b) <= CLOSE for a, b in zip(values, theirs, strict=True)):
            return message
    return "And the ranks do not agree: is something not added up?" * (len(set(values)) > 1)


_INSIDE = (
    "Likely: a collective inside the loop. Here some ranks have a batch more than others: add up "
    "first, and all-reduce once after the loop."
)
_EMPTY = (
    "Likely: here a rank has no sample at all. It has nothing to stack or to divide, and still has "
    "to take part in the all-reduce, with zeros."
)
_NOTHING = "non-empty|division by zero|empty (list|sequence)|at least one"


def _case(name, points, lengths, batch_size, worlds, stuck="") -> Case:
    run, judge = _run(lengths, batch_size), _judge(lengths, batch_size)
    return Case(name, points, run, judge, worlds, stuck, {_NOTHING: _EMPTY})


EXERCISE = Exercise(
    "05_exact_accuracy",
    "exact_accuracy",
    ("model", "dataset", "batch_size"),
    (
        _case("a size that divides", 3, (36, 60), 8, (1, 2, 3)),
        _case("a size that does not divide", 4, (37, 61), 2, (2, 3), _INSIDE),
        _case("fewer samples than ranks", 3, (2,), 4, (3,), _EMPTY),
    ),
)
