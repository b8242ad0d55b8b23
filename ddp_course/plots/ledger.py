"""Memory of one GPU as stacked bars: weights, gradients, optimizer state, activations."""

from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from ..memory import in_bytes
from .drawing import (
    MEMORY,
    SKIPPED,
    Picture,
    canvas,
    course_style,
    finish,
    wrap,
)

EDGE = "#444444"


@course_style()
def memory_ledger(memory, limit: float | None = 80e9, title: str | None = None) -> Picture:
    """Draw what one GPU holds against what it has: `limit` bytes, or None for no line.

    `memory`: one `Memory`, drawn as it adds up part by part, or {"name": Memory, ...}, a bar each.
    """
    bars = memory if isinstance(memory, dict) else _added_up(memory)
    if not bars or not all(hasattr(held, "parts") for held in bars.values()):
        raise TypeError('memory_ledger() draws a Memory, or {"name": Memory, ...}: see memory.py.')
    if limit is not None and not limit > 0:
        raise ValueError(f"limit={limit!r} is the bytes of one GPU, above 0, or None.")
    figure, (axes,) = canvas(1, 2.1 + 0.5 * len(bars))
    _label_axes(axes, bars, limit)
    for row, held in enumerate(bars.values()):
        _draw_bar(axes, row, held, limit)
    told = _told(bars, limit) if isinstance(memory, dict) else _told_of_one(bars, limit)
    finish(figure, title, told, "bar chart")
    figure.subplots_adjust(bottom=92 / figure.bbox.height)
    fills = [Patch(facecolor=color, edgecolor=EDGE, label=n) for n, color in MEMORY.items()]
    figure.legend(handles=fills, loc="lower center", ncols=4, borderaxespad=0.5, columnspacing=1.2)
    return figure


def _label_axes(axes, bars, limit) -> None:
    axes.set_yticks(range(len(bars)), [wrap(name, 22) for name in bars])
    names = max(label.get_window_extent().width for label in axes.get_yticklabels())
    width = axes.figure.bbox.width
    axes.figure.subplots_adjust(left=(names + 28) / width, right=1 - 44 / width)  # as finish does
    most = max([held.total for held in bars.values()] + [limit or 0])
    axes.set(xlim=(0, 1.45 * most), ylim=(len(bars) - 0.5, -1.0))
    axes.set_xlabel(f"memory of one {'GPU' if limit else 'rank'}")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value)))
    axes.locator_params(axis="x", nbins=6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    if limit is not None:
        axes.axvline(limit, color="black", linestyle="--", linewidth=1.6)
        said = {"xytext": (4, -2), "textcoords": "offset points", "va": "top"}
        axes.annotate(f"one GPU: {in_bytes(limit)}", (limit, -0.95), **said)


def _added_up(memory) -> dict:
    """Return a bar for each part, with those before it: how a ledger grows."""
    if not hasattr(memory, "parts"):
        return {}
    bars, so_far = {}, dict.fromkeys(memory.parts(), 0.0)
    for name, value in memory.parts().items():
        so_far[name] = value
        if value:
            bars[f"+ {name}" if bars else name] = _Held(dict(so_far))
    return bars


class _Held:
    def __init__(self, parts):
        self._parts, self.total = parts, sum(parts.values())

    def parts(self):
        return self._parts


def _draw_bar(axes, row, held, limit) -> None:
    left, pixel = 0.0, axes.get_xlim()[1] / axes.bbox.width
    for name, value in held.parts().items():
        axes.barh(row, value, 0.62, left, color=MEMORY[name], edgecolor=EDGE, linewidth=0.8)
        ink = "white" if name in ("weights", "gradients") else "#222222"
        words = axes.text(left + value / 2, row, in_bytes(value), color=ink, ha="center")
        words.set(va="center", visible=words.get_window_extent().width + 6 < value / pixel)
        left += value
    total = axes.text(left + 8 * pixel, row, in_bytes(held.total), weight="bold", va="center")
    total.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # above the limit's line
    if limit is not None and held.total > limit:
        x = left + (total.get_window_extent().width + 24) * pixel
        axes.plot(x, row, markersize=9, markeredgecolor="white", **SKIPPED)
        axes.text(x + 12 * pixel, row, "too much", color=SKIPPED["color"], va="center")


def _told_of_one(bars, limit) -> list[str]:
    total = list(bars.values())[-1].total
    if limit is None:
        first = f"Training takes {in_bytes(total)}"
    elif total <= limit:
        first = f"Training takes {in_bytes(total)}: one GPU's {in_bytes(limit)} hold it"
    else:
        times = total / limit
        many = f"{times:.2g}" if times < 100 else f"{times:,.0f}"
        first = f"Training takes {in_bytes(total)}, {many} times what one GPU has"
    return [first, *map(_in_words, bars, bars.values())]


def _told(bars, limit) -> list[str]:
    over = [name for name, held in bars.items() if limit is not None and held.total > limit]
    if limit is None:
        first = f"From {_range(bars)} on a rank"
    elif not over:
        first = f"Everything fits into one GPU's {in_bytes(limit)}"
    elif len(over) == len(bars):
        first = f"Nothing here fits into one GPU's {in_bytes(limit)}"
    else:
        first = f"Too much for one GPU's {in_bytes(limit)}: {'; '.join(over)}"
    return [first, *map(_in_words, bars, bars.values())]


def _range(bars) -> str:
    totals = [held.total for held in bars.values()]
    return f"{in_bytes(min(totals))} to {in_bytes(max(totals))}"


def _in_words(name, held) -> str:
    parts = ", ".join(f"{part} {in_bytes(value)}" for part, value in held.parts().items())
    return f"{name}: {in_bytes(held.total)} ({parts})"
