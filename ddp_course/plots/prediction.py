"""What the student predicted beside what was measured."""

import math

from .drawing import (
    DIM,
    MEASURED,
    PLAIN,
    PREDICTED,
    Picture,
    canvas,
    course_style,
    decades,
    finish,
    say,
    wrap,
)
from .records import number


@course_style()
def prediction(pairs: dict, unit: str = "", title: str | None = None) -> Picture:
    """Draw {"what": (predicted, measured), ...} as open and filled dots, the difference beside.

    Raises TypeError or ValueError for a pair that is not two numbers.
    """
    if not isinstance(pairs, dict) or not pairs:
        raise TypeError('prediction() draws {"what": (predicted, measured), ...}.')
    for what, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{what}: give (predicted, measured), not {pair!r}.")
        for word, value in zip(("predicted", "measured"), pair, strict=True):
            if not math.isfinite(number(value, f"{what}: {word}")):
                raise ValueError(f"{what}: {word} must be finite, not {value}.")
    pairs = {what: [float(value) for value in pair] for what, pair in pairs.items()}
    figure, (axes,) = canvas(1, 1.5 + 0.55 * len(pairs))
    for row, (predicted, measured) in enumerate(pairs.values()):
        _draw_pair(axes, row, predicted, measured)
    _label_axes(axes, pairs, unit)
    names = max(label.get_window_extent().width for label in axes.get_yticklabels())
    figure.subplots_adjust(left=max(90, names + 25) / figure.bbox.width)
    return finish(figure, title, _told(pairs, unit), "dot chart")


def difference(predicted: float, measured: float) -> str:
    """Return how far off a prediction was: in percent, beyond a factor of two as a factor."""
    if predicted <= 0 or measured <= 0:
        return f"{'+' * (measured > predicted)}{say(measured - predicted)}"
    ratio = measured / predicted
    if 0.5 <= ratio <= 2:
        percent = round(100 * (ratio - 1))
        return f"{percent:+d} %".replace("-", "−") if percent else "0 %"
    return f"× {say(ratio)}" if ratio > 1 else f"÷ {say(1 / ratio)}"


def _draw_pair(axes, row, predicted, measured) -> None:
    axes.plot([predicted, measured], [row, row], color=DIM, linestyle="--", zorder=1)
    axes.plot(predicted, row, **PREDICTED, markersize=11, markeredgewidth=1.8, clip_on=False)
    axes.plot(measured, row, **MEASURED, markersize=6, clip_on=False)  # seen inside the open one
    gap, end = difference(predicted, measured), max(predicted, measured)
    beside = {"xytext": (12, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(gap, (end, row), weight="bold", **beside)


def _label_axes(axes, pairs, unit) -> None:
    words = sorted(zip(next(iter(pairs.values())), ("predicted", "measured"), strict=True))
    for (value, word), side, shift in zip(words, ("right", "left"), (-3, 3), strict=True):
        axes.annotate(word, (value, 0), (shift, 9), textcoords="offset points", ha=side)
    values = [value for pair in pairs.values() for value in pair]
    axes.margins(x=0.2)  # room for the differences
    if decades(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(PLAIN)
    elif min(values) >= 0:
        axes.set_xlim(0, 1.3 * max(values) or 1)
    axes.set_yticks(range(len(pairs)), [wrap(what, 24) for what in pairs])
    axes.set(ylim=(len(pairs) - 0.5, -0.8), xlabel=unit or "value")
    axes.grid(axis="y", visible=False)


def _told(pairs, unit) -> list[str]:
    unit = unit if len(unit) <= 10 else ""  # a long one is read off the axis
    told = []
    for what, (predicted, measured) in pairs.items():
        numbers = f"predicted {say(predicted, unit)}, measured {say(measured, unit)}"
        told.append(f"{what}: {numbers} ({difference(predicted, measured)})")
    if len(pairs) > 1:
        close = sum(abs(guess - value) <= 0.1 * abs(value) for guess, value in pairs.values())
        told.insert(0, f"{close} of {len(pairs)} predictions came within 10 % of the measurement")
    return told
