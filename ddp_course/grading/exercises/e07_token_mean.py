"""07 · token_mean(ddp_model, window): the mean over all tokens of all micro-batches and ranks."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..compare import factor, is_times, off
from ..exercise import Case, Exercise, generator
from .noted import CLIPPED, clipped, flat, gradients, judge, not_reduced, watch

PAD, VOCABULARY, LONGEST = -100, 9, 6
TOKENS = {  # in each sentence of each micro-batch of each rank
    "equal": [[(6, 2), (1, 3), (5, 5)], [(1, 2), (2, 6), (4,)], [(4, 6), (6, 6), (2, 2)]],
    "unlike": [[(6, 1)], [(2,), (5, 3, 1), (1, 1)], [(4, 4), (6,)]],
    "padding": [[(3, 5), (0, 0), (2, 1)], [(0,), (0, 0)], [(6, 4, 5), (1,), (0,)]],
}


class _Net(nn.Module):
    """Numbers [N, T] → logits [N, T, V]; output weights tied to the embedding."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.token, self.mix = nn.Embedding(VOCABULARY, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.token.weight
        self.double()

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.token(x))))


def _window(seed: int, kind: str, rank: int) -> list:
    draw = generator(seed, len(kind), rank)
    window = []
    for lengths in TOKENS[kind][rank]:
        x, y = torch.randint(VOCABULARY, (2, len(lengths), LONGEST), generator=draw)
        y[torch.arange(LONGEST) >= torch.tensor(lengths)[:, None]] = PAD
        window.append((x, y))
    return window


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        return watch(fn, _Net(seed + rank), _window(seed, kind, rank))

    return run


class _Part:
    """What one micro-batch brings: its summed loss, the gradient of that, tokens, places."""

    def __init__(self, model, x, y):
        model.zero_grad()
        logits = model(x).flatten(0, 1)
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=PAD)
        loss.backward()
        self.gradient, self.loss = flat(gradients(model)), loss.item()
        self.tokens, self.places = int((y != PAD).sum()), y.numel()


class _Expected:
    def __init__(self, seed, kind, world_size):
        self.model, self.world_size = _Net(seed), world_size
        self.ranks = [
            [_Part(self.model, x, y) for x, y in _window(seed, kind, rank)]
            for rank in range(world_size)
        ]
        every = [part for parts in self.ranks for part in parts]
        self.tokens, self.places = (
            sum(getattr(part, what) for part in every) for what in ("tokens", "places")
        )
        self.mean = sum(part.gradient for part in every) / self.tokens
        self.loss = sum(part.loss for part in every) / self.tokens

    def over_ranks(self, of_rank) -> torch.Tensor:
        return sum(of_rank(parts) for parts in self.ranks) / self.world_size


def _own(parts, count="tokens"):
    """The mean gradient of one rank's window."""
    return sum(part.gradient for part in parts) / max(1, sum(getattr(p, count) for p in parts))


def _of_means(parts):
    return sum(part.gradient / max(1, part.tokens) for part in parts) / len(parts)


def _judge(kind: str):
    def judge_window(outputs, world_size, seed):
        expected = _Expected(seed, kind, world_size)

        def misconception(output, rank):
            return _misconception(output, rank, expected)

        if wrong := judge(outputs, expected.mean, misconception):
            return wrong
        for rank, output in enumerate(outputs):
            if wrong := _wrong_loss(output, rank, expected):
                return f"rank {rank}: {wrong}"
        return None

    return judge_window


def _misconception(output, rank, expected) -> str:
    mine, right, world = flat(output["gradients"]), expected.mean, expected.world_size
    if mine.isnan().any():
        return (
            "It is nan: the mean over a micro-batch, or a rank, that has no token is 0/0. Sum the "
            "losses, and divide by the tokens of all."
        )
    if not mine.any():
        return "It is zero: was backward() called, and nothing cleared after it?"
    if is_times(mine, right, expected.tokens / world):
        return f"The summed loss was not divided: all ranks hold {expected.tokens} tokens."
    for count in (expected.places, expected.places / world):
        if is_times(mine, right, expected.tokens / count):
            return (
                f"Padding was counted: of {expected.places} places only {expected.tokens} hold a "
                "token to predict (y != -100)."
            )
    if world > 1 and (wrong := _of_ranks(output, mine, rank, expected)):
        return wrong
    if factor(mine, expected.over_ranks(_of_means)) is not None:
        return (
            "It is a mean of the micro-batches' means, in which a token of a short sentence counts "
            "more: sum each loss, and divide by all tokens."
        )
    if clipped(mine, flat(output["twice"]), right):
        return f"It is {factor(mine, right):.4g}× the mean over all tokens: {CLIPPED}"
    if (times := factor(mine, right)) is not None:
        return f"It is {times:.4g}× the mean over all {expected.tokens} tokens."
    return f"It is that of no mean over the {expected.tokens} tokens of all ranks."


def _of_ranks(output, mine, rank, expected) -> str | None:
    """Say what was mistaken between the ranks, if it was."""
    right, world, parts = expected.mean, expected.world_size, expected.ranks[rank]
    if any(factor(mine, own) is not None for own in (_own(parts), _of_means(parts))):
        return f"It is this rank's own gradient: {not_reduced(output['notes'])}"
    if is_times(mine, right, 1 / world):
        reduced = sum("float64[]" in c or "float64[1]" in c for c in output["collectives"])
        if reduced >= len(parts):
            return (
                f"It is {world}× too small. An all-reduced loss has the value of all ranks, but "
                "its gradient is this rank's alone: divide the rank's own sum, and let DDP add up."
            )
        return (
            f"It is {world}× too small: DDP takes the mean over ranks, which divides by world_size "
            "once more. Divide by (tokens of all ranks) / world_size."
        )
    if is_times(mine, right, world):
        return f"It is {world}× too large: world_size was multiplied in once too often."
    whole = expected.tokens // world
    if expected.tokens % world and is_times(mine, right, expected.tokens / world / whole):
        return (
            f"The divisor was cut to a whole number: {expected.tokens} / {world} is not {whole}. "
            "Divide with /, or in floating point."
        )
    for count, what in (("tokens", "tokens"), ("places", "places, padding too")):
        own = expected.over_ranks(lambda parts, count=count: _own(parts, count))
        if factor(mine, own) is not None:
            return (
                f"Each rank divided by its own {what}: then a token counts more on a rank that has "
                "few. All-reduce the count."
            )
    return None


def _wrong_loss(output, rank, expected) -> str | None:
    if output["graph"]:
        return "the returned loss still carries its graph: add up loss.item() or loss.detach()."
    mine, parts, world = output["loss"], expected.ranks[rank], expected.world_size
    if mine is None:
        return "it returns no number: return the mean loss over all tokens of all ranks."
    if math.isnan(mine):
        return "it returns nan: the mean of a micro-batch that has no token is 0/0. Add up sums."
    if off(mine, expected.loss, 1e-6, 1e-6) is None:
        return None
    told = f"it returns the loss {mine:.6g}, and the mean over all tokens is {expected.loss:.6g}."
    own = sum(part.loss for part in parts)
    if off(mine, own / max(1, sum(part.tokens for part in parts)), 1e-6, 1e-6) is None:
        return f"{told} It is the mean over this rank's tokens alone."
    if any(off(mine, own / expected.tokens * c, 1e-6, 1e-6) is None for c in (1, world)):
        return f"{told} It is this rank's part of it: the parts were not added up over the ranks."
    if off(mine, expected.loss * world, 1e-6, 1e-6) is None:
        return f"{told} It was added up over the ranks, but is {world}× too large."
    return told


_UNLIKE = (
    "Likely: here the ranks have unequal numbers of micro-batches, and something is all-reduced "
    "for each. Count the tokens of the whole window first, with one all_reduce, and let all but "
    "the last micro-batch run in no_sync."
)
_PADDING = (
    "Likely: here a micro-batch, or all of a rank's, has no token, and is left out. Its forward "
    "and backward still run: a rank without them leaves the others waiting in DDP's all-reduce."
)
_ERRORS = {
    "division by zero": "A micro-batch, or all of a rank's, may have no token. Its sum is 0, and "
    "may be divided by the count of all ranks."
}


def _case(name, points, kind, worlds, stuck="") -> Case:
    return Case(name, points, _run(kind), _judge(kind), worlds, stuck, _ERRORS)


EXERCISE = Exercise(
    "07_token_mean",
    "token_mean",
    ("ddp_model", "window"),
    (
        _case("sentences of unequal length", 4, "equal", (2, 3, 1)),
        _case("unequal numbers of micro-batches", 2, "unlike", (2, 3), _UNLIKE),
        _case("a rank with padding only", 3, "padding", (2, 3), _PADDING),
    ),
)
