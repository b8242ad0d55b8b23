"""Ranks as rows: heat maps of what they hold, with numbers and shades; lanes of when they ran."""

import math

import torch
from matplotlib.patches import Rectangle

from .drawing import (
    COMMUNICATION,
    COMPUTE,
    DIM,
    WAITING,
    Picture,
    canvas,
    course_style,
    finish,
    rank_style,
)

MOST_COLUMNS = 6  # of one rank, before and after: more could not be read
LIGHT, DARK = 0.98, 0.4  # grey of the smallest and of the largest number
ROW, HEAD, NAME = 34, 26, 92  # pixels: a row of cells, the words above, the name on the left


@course_style()
def before_after(before: list, after: list, title: str | None = None) -> Picture:
    """Draw what each rank held before and after: a list by rank of tensors, lists or numbers.

    None stands for a rank that holds nothing; the tensors of a list are drawn one after the other.
    What is new or changed has a frame in the colour of communication. Raises TypeError or
    ValueError for lists that do not match, or more than 6 elements on a rank.
    """
    before, after = _rows(before, "before"), _rows(after, "after")
    if len(before) != len(after):
        raise ValueError(f"{len(before)} rank(s) before, but {len(after)} after.")
    left, right = (max(1, *map(len, rows)) for rows in (before, after))
    start = left + 1.7
    figure, axes = grid_canvas(len(before), max(start + right, 10.5))
    shades = shades_of(before + after)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        name_rank(axes, rank, rank)
        draw_row(axes, 0, rank, old, shades)
        draw_row(axes, start, rank, new, shades, _changed(old, new))
    for middle, word in ((left / 2, "before"), (start + right / 2, "after")):
        axes.text(middle, -0.15, word, ha="center", va="bottom", weight="bold")
    look = {"arrowstyle": "-|>", "color": COMMUNICATION, "linewidth": 2.5, "mutation_scale": 18}
    ends = [(x, len(before) / 2) for x in (start - 0.35, left + 0.35)]
    axes.annotate("", *ends, arrowprops=look)
    axes.set_xlabel("element, by its place on the rank (framed: new or changed)")
    return finish_grid(figure, title, _told(before, after), "heat map")


@course_style()
def turns(workers: dict, title: str | None = None) -> Picture:
    """Draw when each worker ran: {"two threads": {"thread 0": [(start, end), …], …}, …}.

    Times in seconds on one clock, one or two groups of workers, each from its own zero. Raises
    TypeError or ValueError for what is no such dict.
    """
    if not isinstance(workers, dict) or not 1 <= len(workers) <= 2:
        raise TypeError('turns() draws {"group": {"worker": [(start, end), …]}}, 1 or 2 groups.')
    if not all(spans for lanes in workers.values() for spans in lanes.values()):
        raise ValueError("turns(): a worker has no spans: it never ran.")
    lanes = max(map(len, workers.values()))
    figure, panels = canvas(len(workers), 1.3 + len(workers) * (0.4 + 0.5 * lanes))
    told = []
    for axes, (name, group) in zip(panels, workers.items(), strict=True):
        zero = min(start for spans in group.values() for start, _ in spans)
        end = max(end for spans in group.values() for _, end in spans)
        for row, spans in enumerate(group.values()):
            bars = [(1e3 * (a - zero), max(1e3 * (b - a), 0.02)) for a, b in spans]
            axes.broken_barh([(0, 1e3 * (end - zero))], (row - 0.3, 0.6), **WAITING)
            axes.broken_barh(bars, (row - 0.3, 0.6), color=COMPUTE["optimizer step"])
        axes.set_yticks(range(len(group)), list(group))
        axes.set(ylim=(len(group) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)
        axes.set_title(name, loc="left", fontsize=11)
        told.append(f"{name}: {overlap(list(group.values())):.0%} of the time more than one ran")
    panels[-1].set_xlabel("ms (filled: it ran; hatched: it waited)")
    finish(figure, title, told, "time line")
    inches = figure.get_figheight()
    panels[0].get_gridspec().set_height_ratios([1] * len(panels))
    top = figure.subplotpars.top - 0.3 / inches
    panels[0].get_gridspec().update(hspace=0.9 / lanes)
    figure.subplots_adjust(left=0.12, top=top, right=0.97)  # moves the panels
    return figure


def overlap(lanes: list[list]) -> float:
    """Return the share of the time in which at least two of the lanes of (start, end) ran."""
    edges = sorted(
        (at, change) for spans in lanes for a, b in spans for at, change in ((a, 1), (b, -1))
    )
    running, since, both = 0, edges[0][0], 0.0
    for at, change in edges:
        both += (at - since) * (running > 1)
        running, since = running + change, at
    return both / ((edges[-1][0] - edges[0][0]) or 1)


def grid_canvas(rows: float, right: float) -> tuple:
    """Return a picture and its axes, on which a cell is 1 × 1 and rows count downwards from 0."""
    figure, (axes,) = canvas(1, (rows * ROW + HEAD + 86) / 100)
    left = -NAME * right / (742 - NAME)
    axes.set(xlim=(left, right), ylim=(rows + 0.05, -HEAD / ROW), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.subplots_adjust(left=0.01)
    return figure, axes


def finish_grid(figure, title: str | None, told: list[str], kind: str) -> Picture:
    """Finish a figure that has no ticks: its label is all that needs room below."""
    finish(figure, title, told, kind)
    figure.subplots_adjust(bottom=34 / figure.bbox.height)
    return figure


def draw_row(axes, x: float, y: float, values: list, shades: dict, framed=()) -> None:
    """Draw values as cells from `x` to the right, with frames around those at `framed`."""
    if not values:
        axes.text(x + 0.5, y + 0.5, "–", ha="center", va="center", color=DIM)
        axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=DIM, linestyle=":"))
    for column, value in enumerate(values):
        fill, ink = shades[key(value)]
        look = {"facecolor": fill, "edgecolor": "#AAAAAA", "linewidth": 0.8}
        axes.add_patch(Rectangle((x + column, y), 1, 1, **look))
        at = {"ha": "center", "va": "center", "zorder": 4}
        axes.text(x + column + 0.5, y + 0.5, written(value), color=ink, **at)
    for column in framed:
        look = {"fill": False, "edgecolor": COMMUNICATION, "linewidth": 2.2, "zorder": 3}
        axes.add_patch(Rectangle((x + column + 0.04, y + 0.06), 0.92, 0.88, **look))


def name_rank(axes, rank: int, row: float) -> None:
    """Write "rank k" left of a row, with the rank's own marker and colour."""
    look = rank_style(rank) | {"markeredgecolor": "#444444", "markeredgewidth": 0.6}
    left = axes.get_xlim()[0]
    axes.plot(0.91 * left, row + 0.5, linestyle="none", markersize=8, **look)
    axes.text(0.77 * left, row + 0.5, f"rank {rank}", va="center")


def shades_of(rows: list[list]) -> dict:
    """Return (fill, ink) for each number: the larger, the darker, in equal steps."""
    different = sorted({key(value) for row in rows for value in row})
    steps = max(1, len(different) - 1)
    greys = [LIGHT + (DARK - LIGHT) * place / steps for place in range(len(different))]
    inks = ["white" if grey < 0.47 else "black" for grey in greys]
    return {v: ((g, g, g), ink) for v, g, ink in zip(different, greys, inks, strict=True)}


def key(value: float) -> float:
    """Return what stands for a number in `shades_of`: nan, unequal to itself, as the smallest."""
    return -math.inf if math.isnan(value) else value


def written(value: float) -> str:
    """Return a number as it stands in a cell: whole numbers in full, others in four digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{value:.0f}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def values_of(held) -> list[float]:
    """Return the numbers in None, a number, a tensor, or a list of these, one after the other."""
    if held is None:
        return []
    if isinstance(held, list | tuple):
        return [value for part in held for value in values_of(part)]
    if isinstance(held, torch.Tensor | int | float):
        return torch.as_tensor(held).detach().double().flatten().tolist()
    raise TypeError(f"a rank holds a tensor, numbers or None, not {held!r}.")


def _rows(held: list, name: str) -> list[list[float]]:
    if not isinstance(held, list | tuple) or not held:
        raise TypeError(f"{name}: give a list with what each rank holds, not {held!r}.")
    rows = [values_of(part) for part in held]
    if (most := max(map(len, rows))) > MOST_COLUMNS:
        raise ValueError(f"{name}: {most} elements on a rank; {MOST_COLUMNS} can be drawn.")
    return rows


def _changed(old: list, new: list) -> list[int]:
    return [i for i, value in enumerate(new) if i >= len(old) or key(old[i]) != key(value)]


def _told(before: list, after: list) -> list[str]:
    full = [rank for rank, row in enumerate(after) if row]
    if len(full) == 1:
        told = f"Afterwards only rank {full[0]} holds a result"
    elif all(row == after[0] for row in after):
        told = "Afterwards all ranks hold the same"
    else:
        told = "Afterwards each rank holds something of its own"
    return [told, f"Before: {_in_words(before)}", f"After: {_in_words(after)}"]


def _in_words(rows: list) -> str:
    return "; ".join(
        f"rank {rank}: {', '.join(map(written, row)) or 'nothing'}" for rank, row in enumerate(rows)
    )
