"""Gradient accumulation: equal to the big batch or not, and what no_sync saves in a window."""

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .. import trace
from .drawing import (
    COMMUNICATION,
    COMPUTE,
    DIM,
    MEAN,
    PALE,
    WAITING,
    Picture,
    canvas,
    course_style,
    finish,
    line,
    say,
    wrap,
)
from .records import count, number
from .timeline import from_zero, spans_of

WRONG = (  # ways to do it wrong: never the thick black line
    {"color": DIM, "linestyle": "--", "marker": "o"},
    {"color": DIM, "linestyle": ":", "marker": "s"},
    {"color": DIM, "linestyle": "-.", "marker": "^"},
    {"color": DIM, "linestyle": "-", "marker": "D"},
)


@course_style()
def accumulated(differences: dict, rounding: float, title: str | None = None) -> Picture:
    """Draw how far gradients are from the big batch's, by step, on a logarithmic axis.

    `differences`: {"name": [relative difference of each step], ...}, the right way first, then up
    to four wrong ones. What is below `rounding` is rounding and shaded; an exact 0 is drawn at the
    axis. Raises TypeError or ValueError for what cannot be drawn.
    """
    if not isinstance(differences, dict) or not 1 <= len(differences) <= 1 + len(WRONG):
        raise TypeError('accumulated() draws {"name": [difference of each step], ...}, up to five.')
    curves = {
        name: [number(value, f"{name}: a difference") for value in values]
        for name, values in differences.items()
    }
    positive = [value for values in curves.values() for value in values if value > 0]
    if not rounding > 0 or not all(curves.values()) or min(map(min, curves.values())) < 0:
        raise ValueError(
            "differences are at least 0, of one step or more, and rounding is above 0."
        )
    floor = min([*positive, rounding]) / 3
    figure, (axes,) = canvas(1, 4.4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.0e}")
    for (name, values), look in zip(curves.items(), (MEAN, *WRONG), strict=False):
        line(axes, range(len(values)), [max(value, floor) for value in values], name, **look)
    axes.set_ylim(floor, 5 * max([*positive, rounding]))
    axes.axhspan(floor, rounding, color=PALE, zorder=0)
    axes.annotate(
        "rounding", (0, rounding), (6, -5), textcoords="offset points", va="top", color=DIM
    )
    axes.set(xlabel="optimizer step", ylabel="relative difference, log axis")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    said = [f"{name}: at most {say(max(values))}" for name, values in curves.items()]
    figure.subplots_adjust(left=0.13)
    return finish(
        figure, title, ["Difference from the gradient of the big batch. " + "; ".join(said)]
    )


@course_style()
def placements(windows: dict, title: str | None = None) -> Picture:
    """Draw one window of micro-batches for each placement of no_sync: compute, and all-reduces.

    `windows`: {"no no_sync": spans of one rank, ...}, see `trace`. A dot is an all-reduce, where it
    began; beside each lane their number and the time the window took.
    """
    if not isinstance(windows, dict) or not windows:
        raise TypeError('placements() draws {"name": spans of one rank, ...}.')
    windows = {name: from_zero(spans_of(spans)) for name, spans in windows.items()}
    figure, (axes,) = canvas(1, 1.9 + 0.75 * len(windows))
    told = [_draw_window(axes, row, *item) for row, item in enumerate(windows.items())]
    names = [wrap(name, 20) for name in windows]
    axes.set_yticks([row + 0.1 for row in range(len(names))], names)
    end = max(span["end"] for spans in windows.values() for span in spans)
    axes.set(xlabel="time (ms)", ylim=(len(windows) - 0.4, -0.5), xlim=(0, end))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    finish(figure, title, told, "time line")
    figure.subplots_adjust(left=0.24, right=0.8, bottom=0.95 / figure.get_figheight())
    _explain(figure, windows)
    return figure


def _draw_window(axes, row, name, spans) -> str:
    for span in spans:
        at = [(span["start"], span["end"] - span["start"])]
        if span["name"] in COMPUTE:
            color = COMPUTE[span["name"]]
            axes.broken_barh(at, (row - 0.28, 0.4), facecolor=color, edgecolor="white")
        elif span["name"] == trace.WAITING:
            axes.broken_barh(at, (row - 0.28, 0.4), **WAITING)
    starts = [span["start"] for span in spans if span["name"] == trace.COMMUNICATION]
    dots = {"color": COMMUNICATION, "marker": "o", "linestyle": "none", "markersize": 7}
    axes.plot(starts, [row + 0.32] * len(starts), **dots, markeredgecolor="white", zorder=4)
    took = say(max(span["end"] for span in spans), "ms")
    words = count(len(starts), "all-reduce")
    axes.annotate(f"{words}\n{took}", (1.02, row), xycoords=axes.get_yaxis_transform(), va="center")
    return f"{name}: {words}, {took}"


def _explain(figure, windows) -> None:
    found = {span["name"] for spans in windows.values() for span in spans}
    boxes = [Patch(color=color, label=name) for name, color in COMPUTE.items() if name in found]
    boxes += [Patch(label="waiting", **WAITING)] * (trace.WAITING in found)
    dots = {"color": COMMUNICATION, "marker": "o", "linestyle": "none"}
    handles = [*boxes, figure.axes[0].plot([], [], label="an all-reduce begins", **dots)[0]]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), handlelength=1.2)
