"""Gradients against number formats: where fp16 ends, and what loss scaling moves."""

import math

import torch

from ..formats import FORMATS
from .drawing import DIM, PALE, SKIPPED, Picture, canvas, course_style, finish, say

BINS = 1  # for a power of 2


@course_style()
def gradient_histogram(
    gradients, loss_scale: float = 1, title: str | None = None, against: str = "fp16"
) -> Picture:
    """Draw |gradient| × loss_scale on a log2 axis with the ranges of a format, and the share lost.

    `gradients`: a tensor, or a list of them; zeros are left out, and counted. Raises ValueError if
    there is nothing else, or a loss scale that is not above 0.
    """
    values = torch.cat([g.detach().flatten().double() for g in _tensors(gradients)]).abs()
    if not loss_scale > 0:
        raise ValueError(f"loss_scale must be above 0, not {loss_scale!r}.")
    seen = values[values > 0]
    if not len(seen):
        raise ValueError("every gradient is 0: there is nothing to draw.")
    powers = (seen * loss_scale).log2()
    format = FORMATS[against]
    shares = _shares(powers, format)
    figure, (axes,) = canvas(1, 4.4)
    tail = float(powers.sort().values[len(powers) // 500])  # a few tiny ones would take all room
    low = min(math.floor(tail), math.log2(format.smallest) - 6)
    high = max(math.ceil(powers.max()), math.ceil(math.log2(format.largest)) + 6)
    bins = int((high - low) * BINS)
    counts = torch.histc(powers.clamp(low, high), bins=bins, min=low, max=high) / len(seen)
    edges = [low + i / BINS for i in range(len(counts))]
    lost = [edge + 1 / BINS <= math.log2(format.smallest / 2) + 1e-9 for edge in edges]
    colors = [SKIPPED["color"] if gone else "#444444" for gone in lost]
    hatches = ["xxx" if gone else "" for gone in lost]
    bars = axes.bar(edges, counts.tolist(), width=1 / BINS, align="edge", color=colors)
    for bar, hatch in zip(bars, hatches, strict=True):
        bar.set(hatch=hatch, edgecolor="white", linewidth=0.4)
    _draw_bands(axes, format, shares, low, high, float(counts.max()))
    scale = "" if loss_scale == 1 else f" × 2^{math.log2(loss_scale):g}"
    axes.set(xlabel=f"|gradient|{scale}, as a power of 2", ylabel="share of all that are not 0")
    too_large = f" and {say(100 * shares['inf'])} % inf" if shares["inf"] else ""
    told = [
        f"{say(100 * shares['zero'])} % of the gradients become 0{too_large} in {against}"
        + (f" with loss scale 2^{math.log2(loss_scale):g}" if loss_scale != 1 else ""),
        ", ".join(f"{say(100 * share)} % {name}" for name, share in shares.items()),
        f"{len(values) - len(seen):,} of {len(values):,} are 0 in fp32 already",
    ]
    return finish(figure, title, told, "histogram")


def _tensors(gradients) -> list[torch.Tensor]:
    found = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
    if not found or not all(isinstance(tensor, torch.Tensor) for tensor in found):
        raise TypeError("gradient_histogram() draws a tensor of gradients, or a list of them.")
    return found


def _shares(powers: torch.Tensor, format) -> dict[str, float]:
    """Return the shares that become 0 (half of the smallest and below), subnormal, normal, inf."""
    zero = powers <= math.log2(format.smallest) - 1
    small = ~zero & (powers < math.log2(format.smallest_normal))
    big = powers > math.log2(format.largest)
    total = len(powers)
    return {
        "zero": zero.sum().item() / total,
        "subnormal": small.sum().item() / total,
        "normal": (~zero & ~small & ~big).sum().item() / total,
        "inf": big.sum().item() / total,
    }


def _draw_bands(axes, format, shares, low, high, most) -> None:
    ends = [low, *(math.log2(x) for x in (format.smallest / 2, format.smallest_normal))]
    ends += [math.log2(format.largest), high]
    for index, (name, share) in enumerate(shares.items()):
        left, right = ends[index], ends[index + 1]
        if index % 2 == 0:
            axes.axvspan(left, right, color=PALE, zorder=0)
        axes.axvline(right, color=DIM, linestyle=":", linewidth=1)
        words = f"{name}\n{say(100 * share)} %"
        axes.text((left + right) / 2, 1.28 * most, words, ha="center", va="top", color="#222222")
    axes.set(xlim=(low, high), ylim=(0, 1.34 * most))
