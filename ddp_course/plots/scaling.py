"""Scaling: speed-up by ranks, and the time of a step against bandwidth and bucket size."""

from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from .drawing import (
    DIM,
    MEASURED,
    PLAIN,
    PREDICTED,
    Picture,
    canvas,
    course_style,
    finish,
    line,
    say,
)
from .records import number

MARKS = ("o", "s", "^", "D", "v", "P")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))


@course_style()
def speedup(measured: dict, predicted: dict | None = None, title: str | None = None) -> Picture:
    """Draw the speed-up by ranks, {"name": {ranks: speed-up}}, with the ideal line.

    `predicted`: the same for predictions (open circles, dashed). Beside the last point of each line
    stands its efficiency, speed-up / ranks. Raises TypeError or ValueError for what cannot be
    drawn.
    """
    both = _curves(measured, MEASURED, "measured") + _curves(predicted or {}, PREDICTED, "")
    if not both:
        raise ValueError('speedup() draws {"name": {1: 1.0, 2: 1.8}}: ranks and speed-ups.')
    most = max(max(curve) for _, curve, _ in both)
    figure, (axes,) = canvas(1, 4.8)
    logarithmic = most > 8
    if logarithmic:
        axes.set(xscale="log", yscale="log")
    ticks = sorted({ranks for _, curve, _ in both for ranks in curve})
    line(axes, [1, most], [1, most], label="ideal", color=DIM, linestyle=":", linewidth=2)
    for index, (name, curve, look) in enumerate(both):
        told = f"{name}: {curve[max(curve)] / max(curve):.0%} efficient"
        mark = MARKS[index % len(MARKS)]
        axes.plot(list(curve), list(curve.values()), label=told, **look | {"marker": mark})
    axes.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_major_formatter(PLAIN)
    if logarithmic:
        axes.yaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    else:
        axes.set_ylim(0, None)
    scale = ", log axis" if logarithmic else ""
    axes.set(xlabel=f"ranks{scale}", ylabel=f"speed-up (times one rank){scale}")
    said = "; ".join(
        f"{name}: {', '.join(f'{say(up)} with {ranks}' for ranks, up in curve.items())}"
        for name, curve, _ in both
    )
    return finish(figure, title, [f"Speed-up by ranks. {said}"])


def _curves(curves, look, words) -> list:
    if not isinstance(curves, dict) or not all(isinstance(c, dict) and c for c in curves.values()):
        raise TypeError('give {"name": {ranks: speed-up, ...}, ...}.')
    checked = []
    for name, curve in curves.items():
        points = {ranks: number(up, f"{name}: a speed-up") for ranks, up in sorted(curve.items())}
        if min(points) < 1 or min(points.values()) <= 0:
            raise ValueError(f"{name}: ranks are at least 1, and speed-ups above 0.")
        checked.append((name, points, look))
    return checked


@course_style()
def slow_link(ways: dict, predicted: dict | None = None, title: str | None = None) -> Picture:
    """Draw the seconds a micro-batch against the link's bytes per second, {"way": {bytes/s: s}}.

    `predicted` has the same form: a thin grey dashed line beside the measured one.
    """
    told = "Time of a micro-batch by the link's speed"
    figure, axes, told = _against(ways, predicted, _bits, told, fast_first=True)
    axes.yaxis.set(
        major_locator=LogLocator(10, (1, 2, 5), numticks=20), minor_locator=NullLocator()
    )
    axes.set(xlabel="speed of the link, log axis", ylabel="ms a micro-batch, log axis")
    axes.invert_xaxis()  # the lines are far apart where the link is slow: labels go there
    return finish(figure, title, [told])


def _bits(speed, _=None) -> str:
    giga = speed >= 1.25e8
    return f"{say(8 * speed / (1e9 if giga else 1e6))} {'G' if giga else 'M'}bit/s"


@course_style()
def bucket_sweep(
    measured: dict, predicted: dict | None = None, title: str | None = None
) -> Picture:
    """Draw the seconds of a step against the number of buckets, {"name": {buckets: seconds}}.

    `predicted` has the same form: a thin grey dashed line beside the measured one.
    """
    told = "Time of a step by the number of buckets"
    figure, axes, told = _against(measured, predicted, say, told)
    axes.set(xlabel="number of buckets, log axis", ylabel="ms a step", yscale="linear")
    axes.set_ylim(0, None)
    return finish(figure, title, [told])


def _against(measured, predicted, words, told, fast_first=False) -> tuple:
    """Return the figure with all curves drawn, its axes, and what is to be told of it."""
    for curves in (measured, predicted or {}):
        if not isinstance(curves, dict) or not all(isinstance(c, dict) for c in curves.values()):
            raise TypeError('give {"name": {value: seconds, ...}, ...}.')
    if not measured or not all(measured.values()):
        raise ValueError('there is nothing to draw: {"name": {value: seconds, ...}, ...}.')
    figure, (axes,) = canvas(1, 4.8)
    axes.set(xscale="log", yscale="log")
    said = []
    for name, curve in (predicted or {}).items():
        points = sorted(curve.items(), reverse=fast_first)
        look = {"color": DIM, "linestyle": "--", "linewidth": 1.2, "zorder": 1}
        axes.plot(*_columns(points), label=name, **look)
    for index, (name, curve) in enumerate(measured.items()):
        times = {x: number(seconds, f"{name}: seconds") for x, seconds in curve.items()}
        points = sorted(times.items(), reverse=fast_first)
        look = {"marker": MARKS[index % 6], "linestyle": LINES[index % 6], "color": "black"}
        axes.plot(*_columns(points), label=name, linewidth=1.6, **look)
        ends = ", ".join(f"{say(1e3 * t)} ms at {words(x)}" for x, t in (points[0], points[-1]))
        said.append(f"{name}: {ends}")
    ticks = sorted({x for curve in measured.values() for x in curve})
    axes.xaxis.set(major_locator=FixedLocator(ticks), minor_locator=NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axes.yaxis.set_major_formatter(PLAIN)
    grey = "; dashed grey: predicted" if predicted else ""
    return figure, axes, f"{told}{grey}. {'; '.join(said)}"


def _columns(points) -> tuple[list, list]:
    return [x for x, _ in points], [1e3 * seconds for _, seconds in points]
