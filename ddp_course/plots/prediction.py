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

WORDS = 16  # characters in a line of the column that says the difference


@course_style()
def prediction(
    pairs: dict,
    unit: str = "",
    title: str | None = None,
    source: str = "measured",
    guess: str = "predicted",
) -> Picture:
    """Draw {"what": (predicted, measured), ...} as open and filled dots, each with its value.

    The difference is said in words at the right. `guess` and `source` name the two numbers of a
    pair where they are no prediction, or were not measured. Raises TypeError or ValueError for a
    pair that is not two numbers.
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
        _draw_pair(axes, row, predicted, measured, guess)
    _label_axes(axes, pairs, unit, (guess, source))
    names = max(label.get_window_extent().width for label in axes.get_yticklabels())
    figure = finish(figure, title, _told(pairs, unit, (guess, source)), "dot chart")
    sides = {"left": max(30, names + 25), "right": figure.bbox.width - 165}
    figure.subplots_adjust(**{side: x / figure.bbox.width for side, x in sides.items()})
    return figure


def difference(predicted: float, measured: float, guess: str = "predicted") -> str:
    """Return in words how the measurement differs from the prediction, or what `guess` calls it."""
    than = "the prediction" if guess == "predicted" else f"the {guess}"
    if predicted == measured:
        return "as predicted" if guess == "predicted" else f"equal to {than}"
    where = "above" if measured > predicted else "below"
    if predicted <= 0 or measured <= 0:
        return f"{say(abs(measured - predicted))} {where} {than}"
    ratio = measured / predicted
    if ratio >= 2:
        return f"{say(ratio)} times {than}"
    if ratio <= 0.5:
        return f"{say(100 * ratio)} % of {than}"
    percent = abs(round(100 * (ratio - 1)))
    return f"{percent or 'less than 1'} % {where} {than}"


def _draw_pair(axes, row, predicted, measured, guess) -> None:
    axes.plot([predicted, measured], [row, row], color=DIM, linestyle="--", zorder=1)
    axes.plot(predicted, row, **PREDICTED, markersize=11, markeredgewidth=1.8, clip_on=False)
    axes.plot(measured, row, **MEASURED, markersize=6, clip_on=False)  # seen inside the open one
    left = -1 if predicted <= measured else 1
    for value, side, weight in ((predicted, left, "normal"), (measured, -left, "bold")):
        beside = {"xytext": (12 * side, 0), "textcoords": "offset points", "va": "center"}
        beside["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        align = "left" if side > 0 else "right"
        axes.annotate(say(value), (value, row), ha=align, weight=weight, **beside)
    words = wrap(difference(predicted, measured, guess), WORDS)
    at = {"transform": axes.get_yaxis_transform(), "va": "center", "linespacing": 1.05}
    axes.text(1.03, row, words, style="italic", **at)


def _label_axes(axes, pairs, unit, names) -> None:
    words = zip(next(iter(pairs.values())), names, strict=True)
    words = sorted(words, key=lambda word: word[0])  # if equal, as the values stand: measured right
    for (value, word), side, shift in zip(words, ("right", "left"), (-3, 3), strict=True):
        text = axes.annotate(word, (value, 0), (shift, 9), textcoords="offset points", ha=side)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})  # over the zero line
    values = [value for pair in pairs.values() for value in pair]
    least, most = min(values), max(values)
    if decades(values):
        room = (most / least) ** 0.25
        axes.set(xscale="log", xlim=(least / room, most * room))
        axes.xaxis.set_major_formatter(PLAIN)
    else:  # with room for the numbers
        room = 0.25 * (most - min(0, least)) or 1
        axes.set_xlim(min(0, least - room), most + room)
        if least >= 0:
            axes.axvline(0, color=DIM, linewidth=0.8)
            axes.set_xticks([x for x in axes.get_xticks() if 0 <= x <= most + room])
    axes.set_yticks(range(len(pairs)), [wrap(what, 24) for what in pairs])
    axes.set(ylim=(len(pairs) - 0.5, -0.8), xlabel=unit or "value")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _told(pairs, unit, names) -> list[str]:
    guess, source = names
    unit = unit if len(unit) <= 10 else ""  # a long one is read off the axis
    told = []
    for what, (predicted, measured) in pairs.items():
        numbers = f"{guess} {say(predicted, unit)}, {source} {say(measured, unit)}"
        named = f"{what}: {numbers}" if what else numbers[0].upper() + numbers[1:]
        told.append(f"{named} ({difference(predicted, measured, guess)})")
    if len(pairs) > 1 and guess == "predicted":
        close = sum(abs(one - value) <= 0.1 * abs(value) for one, value in pairs.values())
        told.insert(0, f"{close} of {len(pairs)} predictions came within 10 % of the measurement")
    return told
