"""What a collective costs: time against bytes, with the two regimes named."""

import math

from matplotlib.ticker import FuncFormatter, LogLocator

from .drawing import (
    MEASURED,
    PALE,
    PLAIN,
    Picture,
    canvas,
    course_style,
    finish,
    line,
    say,
)


@course_style()
def time_against_bytes(points: list, cost, title: str | None = None) -> Picture:
    """Draw measured (bytes, seconds) on log axes with the line α + β·n and its two regimes.

    `cost`: the fitted `collectives.Cost`.
    """
    points = sorted(points)
    if len(points) < 2 or min(min(point) for point in points) <= 0:
        raise ValueError("time_against_bytes() draws two or more (bytes, seconds) above 0.")
    first, last = points[0][0], points[-1][0]
    figure, (axes,) = canvas(1, 4.6)
    axes.set(xscale="log", yscale="log", xlim=(first / 1.6, last * 1.6))
    sizes = [first * (last / first) ** (i / 60) for i in range(61)]
    times = [1e3 * cost.seconds(size) for size in sizes]
    dots = MEASURED | {"linestyle": "none", "markersize": 8, "zorder": 4}
    axes.plot([size for size, _ in points], [1e3 * t for _, t in points], label="measured", **dots)
    line(axes, sizes, times, label="α + β·n, fitted", color="black", linestyle="--")
    edge = min(max(cost.crossover, first), last)
    _name_regimes(axes, cost, first, edge, last)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: in_bytes(size)))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set(xlabel="size of the tensor, log axis", ylabel="ms until all ranks have it, log axis")
    return finish(figure, title, _cost_told(points, cost), "line chart")


def in_bytes(size: float) -> str:
    """Return a number of bytes with its unit, in powers of 1,000."""
    power = min(3, max(0, math.floor(math.log10(max(size, 1)) / 3 + 1e-9)))
    return f"{say(size / 1000**power)} {('B', 'kB', 'MB', 'GB')[power]}"


def _name_regimes(axes, cost, first, edge, last) -> None:
    """Shade the sizes for which α is the larger part, and name both parts in the picture."""
    at = {"ha": "center", "transform": axes.get_xaxis_transform()}
    if edge > first:
        axes.axvspan(axes.get_xlim()[0], edge, color=PALE, zorder=0)
        words = f"latency: α = {_time(cost.alpha)},\nhowever small the tensor"
        axes.text((first * edge) ** 0.5, 0.95, words, va="top", **at)
    if edge < last:
        words = f"bandwidth:\n1/β = {in_bytes(1 / cost.beta)}/s"
        axes.text((edge * last) ** 0.5, 0.06, words, va="bottom", **at)


def _time(seconds: float) -> str:
    return f"{say(1e6 * seconds)} µs" if seconds < 1e-3 else f"{say(1e3 * seconds)} ms"


def _cost_told(points, cost) -> list[str]:
    first, last = points[0], points[-1]
    if first[0] < cost.crossover < last[0]:
        told = f"Up to about {in_bytes(cost.crossover)} latency rules, beyond it bandwidth"
    else:
        regime = "latency" if cost.crossover >= last[0] else "bandwidth"
        told = f"At all of these sizes {regime} rules"
    fitted = f"Fitted: α = {_time(cost.alpha)}, β = {say(1e9 * cost.beta)} ns per byte"
    ends = ", ".join(f"{in_bytes(size)} in {_time(seconds)}" for size, seconds in (first, last))
    return [told, fitted, f"Measured: {ends}"]
