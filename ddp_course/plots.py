"""The figures of the course: one visual language, drawn from the records that ranks report.

    plots.summary(run)                                      # as a cell's last value it shows itself
    plots.compare({"one rank": first, "two ranks": second})

What a colour or a shape means is said here, once; fonts, sizes and grid are in course.mplstyle.
Functions take a `Run` or a list of records, dicts with "rank", "step" and the quantity drawn, and
return a `Picture`: a matplotlib Figure with its alternative text. pyplot is never touched.
A quantity of all ranks, such as the loss, is read from the lowest rank that reported the step.
"""

import base64
import functools
import html
import io
import itertools
import math
import statistics
import textwrap
from pathlib import Path

from matplotlib import rcParams, style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

STYLE = Path(__file__).with_name("course.mplstyle")
course_style = functools.partial(style.context, ["default", STYLE])

# Hues in Okabe and Ito's order, which colour-blind eyes can tell apart. Their black is the mean of
# the ranks, their vermilion communication; yellow, hard to see in a thin line, comes last.
RANK_COLORS = (
    "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#CC79A7", "#332288", "#5C2E0B", "#F0E442",
)  # fmt: skip
RANK_MARKERS = ("o", "s", "^", "D", "v", "P", "*", "p")
MEAN = {"color": "black", "linewidth": 2.6, "zorder": 3}
COMPUTE = {"forward": "#C6DBEF", "backward": "#6BAED6", "optimizer step": "#2171B5"}
COMMUNICATION = "#D55E00"
WAITING = {"facecolor": "#EEEEEE", "edgecolor": "#AAAAAA", "hatch": "////", "linewidth": 0}
FAILED = {"color": "#D00000", "marker": "X", "markersize": 9, "linestyle": "none", "zorder": 5}
PREDICTED = {"color": "black", "marker": "o", "markerfacecolor": "white", "linestyle": "--"}
MEASURED = {"color": "black", "marker": "o", "markerfacecolor": "black", "linestyle": "-"}
MEMORY = {  # always stacked in this order
    "weights": "#3B1F5B",
    "gradients": "#7B5EA7",
    "optimizer state": "#B9A3D6",
    "activations": "#E8E0F3",
}
# Runs side by side: a broad pale line below thin dark ones, so that equal curves are all seen.
RUNS = (
    {"color": "#B5B5B5", "linewidth": 5.5, "linestyle": "-"},
    {"color": "black", "linewidth": 2, "linestyle": "--"},
    {"color": "black", "linewidth": 2.4, "linestyle": ":"},
    {"color": "#707070", "linewidth": 1.6, "linestyle": "-"},
)
PRECISION = {"fp32": RUNS[0], "bf16": RUNS[1], "fp16": RUNS[2]}
PALE, DIM = "#F1F1F1", "#6A6A6A"  # grounds and notes that stand back

LABELS = {
    "loss": "loss (mean per sample)",
    "local_loss": "loss (mean per sample)",
    "loss_scale": "loss scale (factor)",
    "samples_per_s": "samples/s, all ranks",
    "grad_norm": "gradient norm (L2)",
    "seconds": "seconds per step",
    "step": "optimizer step",
    "samples": "samples seen, all ranks",
    "time": "seconds since launch",
}
_BY_CLOCK = ("seconds", "samples_per_s", "time")  # each rank has its clock: values differ a little


def rank_style(rank: int) -> dict:
    """Return the colour and the marker of a rank, the same in every figure."""
    return {"color": RANK_COLORS[rank % 8], "marker": RANK_MARKERS[rank % 8]}


class Picture(Figure):
    """A matplotlib Figure that shows itself in a notebook as a PNG with its alternative text."""

    alternative_text = ""

    @course_style()
    def savefig(self, *args, **kwargs):
        """Save like any Figure, in the course's style."""
        super().savefig(*args, **kwargs)

    def png(self) -> bytes:
        """Return the content of a PNG file, the same for the same figure."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", metadata={"Software": None})
        return buffer.getvalue()

    def _ipython_display_(self):
        # Not _repr_mimebundle_: "%matplotlib inline" has a writer for Figures that would win over it.
        # JupyterLab (4.6) ignores "alt" in the metadata of image/png but prefers text/html to it.
        from IPython.display import display

        png, alt = base64.b64encode(self.png()).decode(), self.alternative_text
        tag = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}">'
        data = {"text/html": tag, "image/png": png, "text/plain": alt}
        display(data, metadata={"image/png": {"alt": alt}}, raw=True)


def show(figure: Picture) -> None:
    """Display a picture in the notebook from the middle of a cell."""
    figure._ipython_display_()


@course_style()
def loss(run_or_records, title: str | None = None) -> Picture:
    """Draw the loss by step: each rank's own (`local_loss`, if reported) and the mean over ranks."""
    records = _records(run_or_records)
    figure, (axes,) = _canvas(1, 4.2)
    return _finish(figure, title, _draw_loss(axes, records))


@course_style()
def loss_scale(
    run_or_records, growth_interval: int | None = None, title: str | None = None
) -> Picture:
    """Draw the loss scale each step was taken with, ✕ at skipped steps, and the loss below.

    Without loss scaling (fp32, bf16) only the loss is drawn, and the title says so.
    `growth_interval`: steps without overflow until the scale doubles, marked when given.
    """
    records = _records(run_or_records)
    if _unscaled(records):
        figure, (axes,) = _canvas(1, 4.2)
        told = ["The loss scale stayed at 1: fp32 and bf16 need no loss scaling"]
        return _finish(figure, title, told + _draw_loss(axes, records, ranks=False))
    figure, (upper, lower) = _canvas(2, 5.6)
    told = _draw_loss_scale(upper, records, growth_interval)
    return _finish(figure, title, told + _draw_loss(lower, records, ranks=False))


@course_style()
def throughput(run_or_records, warmup: int | None = None, title: str | None = None) -> Picture:
    """Draw samples/s over all ranks by step; the first `warmup` steps are grey, not in the median.

    `warmup` defaults to a tenth of the steps, at least one. Raises ValueError if no step is left.
    """
    figure, (axes,) = _canvas(1, 3.8)
    return _finish(figure, title, _draw_throughput(axes, _records(run_or_records), warmup))


@course_style()
def summary(run_or_records, title: str | None = None) -> Picture:
    """Draw a run's loss, loss scale (if there was one) and throughput over the same steps."""
    records = _records(run_or_records)
    unscaled = _unscaled(records)
    figure, panels = _canvas(2, 5.6) if unscaled else _canvas(3, 7.4)
    told = _draw_loss(panels[0], records)
    told += [] if unscaled else _draw_loss_scale(panels[1], records)
    return _finish(figure, title, told + _draw_throughput(panels[-1], records))


@course_style()
def compare(
    runs: dict, quantity: str = "loss", x: str = "step", title: str | None = None
) -> Picture:
    """Draw one quantity of up to four runs, {"name": run or records, ...}.

    `x`: "step", "samples" (seen so far, over all ranks) or "time" (seconds since launch). A run
    named "fp32", "bf16" or "fp16" has that precision's line, whatever it is compared with.
    """
    if not isinstance(runs, dict) or not 1 <= len(runs) <= len(RUNS):
        raise TypeError(f'compare() draws {{"name": run, ...}}, one to {len(RUNS)} runs.')
    if x not in ("step", "samples", "time"):
        raise ValueError(f'x must be "step", "samples" or "time", not {x!r}.')
    figure, (axes,) = _canvas(1, 4.2)
    free = [look for look in RUNS if look not in [PRECISION.get(name) for name in runs]]
    curves = {}
    for name, run in runs.items():
        records = _records(run)
        curve = curves[name] = _series(records, quantity)
        look = PRECISION.get(name) or free.pop(0)
        _line(axes, _along(records, x, curve), curve.values(), label=name, **look)
    _label_axes(axes, quantity, curves.values(), x)
    return _finish(figure, title, _compared(curves, quantity))


@course_style()
def prediction(pairs: dict, unit: str = "", title: str | None = None) -> Picture:
    """Draw {"what": (predicted, measured), ...} as open and filled dots, the difference beside."""
    if not isinstance(pairs, dict) or not pairs:
        raise TypeError('prediction() draws {"what": (predicted, measured), ...}.')
    figure, (axes,) = _canvas(1, 1.5 + 0.55 * len(pairs))
    told = _draw_pairs(axes, pairs, unit)
    names = max(label.get_window_extent().width for label in axes.get_yticklabels())
    figure.subplots_adjust(left=(names + 20) / figure.bbox.width)
    return _finish(figure, title, told, "Dot chart")


# ---- panels: each draws into one Axes and returns sentences, the first of them fit for a title


def _draw_loss(axes, records, ranks=True) -> list[str]:
    mean, own = _series(records, "loss"), {}
    if ranks and any(record.get("local_loss") is not None for record in records):
        numbers = sorted({record.get("rank", 0) for record in records})
        own = {rank: _series(records, "local_loss", rank) for rank in numbers}
    if len(own) == 1:  # one rank alone: its loss is the mean
        own = {rank: curve for rank, curve in own.items() if curve != mean}
    for rank, curve in own.items():
        _line(axes, curve, curve.values(), label=f"rank {rank}", **rank_style(rank))
    _line(axes, mean, mean.values(), label="mean" if own else None, **MEAN)
    bad = [step for step, value in mean.items() if not math.isfinite(value)]
    _cross(axes, bad, [0.06] * len(bad), "not finite", axes.get_xaxis_transform())
    _label_axes(axes, "loss", [mean, *own.values()])
    told = [_trend("loss", mean)]
    last = [values[-1] for curve in own.values() if (values := _finite([curve]))]
    if last:
        told.append(f"The ranks' own losses end at {_say(min(last))} to {_say(max(last))}")
    return told


def _draw_loss_scale(axes, records, growth_interval=None) -> list[str]:
    scale, skips = _series(records, "loss_scale"), _series(records, "skipped")
    skipped = [step for step in scale if skips.get(step)]
    _line(axes, scale, scale.values(), drawstyle="steps-post", **MEAN)
    words = f"{len(skipped):,} skipped" if len(skipped) > 1 else "skipped"
    _cross(axes, skipped, [scale[step] for step in skipped], words, axes.transData)
    _label_axes(axes, "loss_scale", [scale])
    exponents = [math.log2(value) for value in _finite([scale]) if value > 0] or [0]
    pad = 0.7 + 0.12 * (max(exponents) - min(exponents))
    low = 3 * pad if growth_interval else pad
    axes.set_ylim(2 ** (min(exponents) - low), 2 ** (max(exponents) + 1.3 * pad))
    if growth_interval:
        _mark_growth(axes, scale, growth_interval)
    if len(skipped) == len(scale) > 1:
        return [f"All {len(scale):,} steps were skipped: nothing was learned"]
    return [f"{_trend('loss scale', scale)}; {_skips(skipped)}"]


def _mark_growth(axes, scale, interval) -> None:
    """Draw an arrow as long as the growth interval, up to the step where the scale first grew."""
    grown = next((b for a, b in itertools.pairwise(scale) if scale[b] > scale[a]), None)
    note = f"growth interval: {interval:,} steps"
    if grown is None:
        note += ", not reached in this run"
        axes.text(0.5, 0.05, note, transform=axes.transAxes, ha="center", color=DIM)
        return
    y = scale[grown] / 2 ** 1.6
    ends = {"xy": (grown, y), "xytext": (grown - interval, y)}
    axes.annotate("", **ends, arrowprops={"arrowstyle": "<->", "color": DIM, "shrinkA": 0, "shrinkB": 0})
    axes.annotate(note, (grown - interval, y), (2, -4), textcoords="offset points", va="top", color=DIM)


def _draw_throughput(axes, records, warmup=None) -> list[str]:
    speed = _series(records, "samples_per_s")
    steps, values = list(speed), list(speed.values())
    if warmup is None:
        warmup = max(1, len(steps) // 10) if len(steps) > 1 else 0
    if not isinstance(warmup, int) or not 0 <= warmup < len(steps):
        raise ValueError(f"warmup={warmup!r} must be a number of steps from 0 to {len(steps) - 1}.")
    counted = [value for value in values[warmup:] if math.isfinite(value)]
    median = statistics.median(counted) if counted else math.nan
    if warmup:
        axes.axvspan(steps[0] - 0.5, (steps[warmup - 1] + steps[warmup]) / 2, color=PALE, zorder=0)
        axes.annotate(
            "warm-up", (steps[0], 1), (2, -4), axes.get_xaxis_transform(), "offset points", va="top", color=DIM
        )
        _line(axes, steps[: warmup + 1], values[: warmup + 1], color=DIM)
    _line(axes, steps[warmup:], values[warmup:], **{**MEAN, "linewidth": 1.3})
    _line(axes, [steps[warmup], steps[-1]], [median, median], label=f"median {_say(median)}", **MEAN)
    _label_axes(axes, "samples_per_s", [])
    axes.set_ylim(0, 1.25 * max(_finite([speed]), default=1))
    told = f"Median {_say(median)} samples/s over all ranks"
    return [f"{told}, without the first {_count(warmup, 'step')} (warm-up)" if warmup else told]


def _draw_pairs(axes, pairs, unit) -> list[str]:
    told, close = [], 0
    for row, (what, pair) in enumerate(pairs.items()):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{what}: give (predicted, measured), not {pair!r}.")
        predicted, measured = (_number(value, what) for value in pair)
        close += abs(predicted - measured) <= 0.1 * abs(measured)
        gap = _difference(predicted, measured, unit)
        axes.plot([predicted, measured], [row, row], color=DIM, linestyle="--", zorder=1)
        axes.plot(predicted, row, **PREDICTED, markeredgewidth=1.8, markersize=10, zorder=4)
        axes.plot(measured, row, **MEASURED, markersize=8, zorder=3, label=gap)
        numbers = f"predicted {_say(predicted, unit)}, measured {_say(measured, unit)}"
        told.append(f"{what}: {numbers} ({gap})")
    values = [value for pair in pairs.values() for value in pair]
    if _decades(values):
        axes.set_xscale("log")
    elif min(values) >= 0:
        axes.set_xlim(0, 1.08 * max(values))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_yticks(range(len(pairs)), [textwrap.fill(what, 24) for what in pairs])
    axes.set(ylim=(len(pairs) - 0.5, -0.8), xlabel=unit)
    axes.grid(axis="y", visible=False)
    first = sorted(zip(next(iter(pairs.values())), ("predicted", "measured"), strict=True))
    for (value, word), side, shift in zip(first, ("right", "left"), (5, -5), strict=True):
        axes.annotate(word, (value, 0), (shift, 9), textcoords="offset points", ha=side)
    if len(told) == 1:
        return told
    return [f"{close} of {len(pairs)} predictions came within 10 % of the measurement", *told]


# ---- records


def _records(run_or_records) -> list[dict]:
    records = getattr(run_or_records, "records", run_or_records)
    if not isinstance(records, list | tuple) or not all(isinstance(r, dict) for r in records):
        raise TypeError(f"plots draw a Run or a list of records (dicts), not {type(records).__name__}.")
    if not records:
        raise ValueError("There are no records: call report(step=step, loss=...) in the ranks.")
    return list(records)


def _series(records, key, rank=None) -> dict[int, float]:
    """Return {step: value}, in the order of steps: `rank`'s, or what all ranks agree on."""
    found, source = {}, {}
    for record in sorted(records, key=lambda record: -record.get("rank", 0)):
        step, value, by = record.get("step"), record.get(key), record.get("rank", 0)
        if step is None or value is None or rank not in (None, by):
            continue
        value = _number(value, f'"{key}" at step {step}')
        if source.get(step, by) != by and key not in _BY_CLOCK and not _same(value, found[step]):
            raise ValueError(
                f'"{key}" at step {step} is {_say(value)} on rank {by} but {_say(found[step])} on rank '
                f"{source[step]}: all-reduce it before report(), or report it as local_{key}."
            )
        found[step], source[step] = value, by
    if not found:
        who = "" if rank is None else f" of rank {rank}"
        raise ValueError(f'No record{who} has "step" and "{key}": report(step=step, {key}=...) in the ranks.')
    return dict(sorted(found.items()))


def _along(records, x, curve) -> list[float]:
    """Return where each step of the curve lies on the axis x."""
    if x == "step":
        return list(curve)
    values = _series(records, x)
    if x == "samples":
        values = dict(zip(values, itertools.accumulate(values.values()), strict=True))
    return [values.get(step, math.nan) for step in curve]


def _unscaled(records) -> bool:
    never_skipped = not any(_series(records, "skipped").values())
    return never_skipped and set(_series(records, "loss_scale").values()) == {1.0}


def _number(value, what) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be a number, not {value!r}.") from None


def _same(a, b) -> bool:
    return math.isclose(a, b, rel_tol=1e-4) or (math.isnan(a) and math.isnan(b))


def _finite(curves) -> list[float]:
    return [value for curve in curves for value in curve.values() if math.isfinite(value)]


def _decades(values) -> bool:
    """Say whether values are better seen on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


# ---- words


def _say(value, unit="") -> str:
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _count(number, noun) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _trend(name, curve) -> str:
    """Return a sentence such as "The loss fell from 2.31 to 0.12 in 120 steps"."""
    values = _finite([curve])
    span = _count(max(curve) - min(curve) + 1, "step")
    bad = [step for step, value in curve.items() if not math.isfinite(value)]
    if not values:
        return f"The {name} was never finite in {span}"
    first, last = values[0], values[-1]
    said = f"The {name} was {_say(first)}"
    if len(values) > 1 and abs(last - first) <= 0.005 * abs(first):
        said = f"The {name} stayed at {_say(first)}"
    elif len(values) > 1:
        said = f"The {name} {'fell' if last < first else 'rose'} from {_say(first)} to {_say(last)}"
    said += f" in {span}"
    return said + (f"; not finite at {len(bad):,} of them, first at step {bad[0]:,}" if bad else "")


def _skips(steps) -> str:
    if not steps:
        return "no step was skipped"
    named = ", ".join(f"{step:,}" for step in steps[:5]) + (", …" if len(steps) > 5 else "")
    return f"{_count(len(steps), 'step')} skipped ({named})"


def _compared(curves, quantity) -> list[str]:
    name = quantity.replace("_", " ")
    ends = [f"{run} {_say((_finite([curve]) or [math.nan])[-1])}" for run, curve in curves.items()]
    told = [f"{name.capitalize()} at the end: {', '.join(ends)}"]
    if len(curves) == 2:
        a, b = curves.values()
        gaps = [abs(a[step] - b[step]) for step in a if step in b and math.isfinite(a[step] - b[step])]
        told += [f"At the same step they differ by at most {_say(max(gaps))}"] if gaps else []
    return told


def _difference(predicted, measured, unit) -> str:
    if predicted <= 0 or measured <= 0:
        return f"{'+' if measured > predicted else ''}{_say(measured - predicted, unit)}"
    ratio = measured / predicted
    if 0.5 <= ratio <= 2:
        return f"{100 * (ratio - 1):+.0f} %".replace("-", "−")
    return f"× {_say(ratio)}" if ratio > 1 else f"÷ {_say(1 / ratio)}"


# ---- drawing

PLAIN = FuncFormatter(lambda value, _: f"{value:,.6g}")


def _canvas(panels, height) -> tuple[Picture, list]:
    figure = Picture(figsize=(rcParams["figure.figsize"][0], height))
    FigureCanvasAgg(figure)  # measures text
    ratios = {"height_ratios": [3] + [2] * (panels - 1), "hspace": 0.16}
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw=ratios)
    return figure, list(axes[:, 0])


def _line(axes, xs, ys, label=None, **look) -> None:
    """Draw a line with gaps where values are not finite, and few enough markers to see it."""
    xs, ys = list(xs), [value if math.isfinite(value) else math.nan for value in ys]
    stride = max(1, len(xs) // 10)
    if marker := look.get("marker"):
        look["markevery"] = (RANK_MARKERS.index(marker) * stride // 8, stride)
        look |= {"markeredgecolor": "#444444", "markeredgewidth": 0.6}
    else:  # a point without neighbours has no line
        gaps = [math.isnan(value) for value in (math.nan, *ys, math.nan)]
        lone = [i for i in range(len(ys)) if gaps[i] and not gaps[i + 1] and gaps[i + 2]]
        look |= {"marker": "o", "markersize": 5, "markevery": lone} if lone else {}
    axes.plot(xs, ys, label=label, **look)


def _cross(axes, xs, ys, words, transform) -> None:
    """Mark points with red crosses, and write the words at the first."""
    if not xs:
        return
    axes.plot(xs, ys, transform=transform, **FAILED)
    left, right = axes.get_xlim()
    side, shift = ("left", 9) if xs[0] < left + 0.75 * (right - left) else ("right", -9)
    axes.annotate(
        words, (xs[0], ys[0]), (shift, 6), transform, "offset points", color=FAILED["color"], ha=side
    )


def _label_axes(axes, quantity, curves, x="step") -> None:
    unit = LABELS.get(quantity, quantity.replace("_", " "))
    if quantity == "loss_scale":
        axes.set_yscale("log", base=2)
    elif _decades(_finite(curves)):
        axes.set_yscale("log")
        unit += ", log axis"
    if quantity != "loss_scale":
        axes.yaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.get_major_locator().set_params(integer=x == "step")
    axes.set(xlabel=LABELS[x], ylabel=unit)


def _finish(figure, title, told, kind="Line chart") -> Picture:
    """Write title, labels and alternative text, and make room for them."""
    height = figure.bbox.height
    text = textwrap.fill(title or told[0], 66)
    figure.suptitle(text, x=0.015, y=1 - 8 / height, ha="left", va="top")
    top = 22 + 23 * (text.count("\n") + 1)
    figure.subplots_adjust(top=1 - top / height, bottom=58 / height)
    for axes in figure.axes:
        axes.label_outer()
    figure.align_ylabels()
    _label_lines(figure)
    panels = [f"{axes.get_ylabel()}" for axes in figure.axes if axes.get_ylabel()]
    across = f"Across: {figure.axes[-1].get_xlabel()}."
    up = f" Up: {'; below: '.join(panels)}." if panels else ""
    told = [title, *told] if title else told
    figure.alternative_text = f"{kind}. {across}{up} " + " ".join(f"{line}." for line in told)
    return figure


def _label_lines(figure) -> None:
    """Write each line's label right of its end, moved apart where ends are close together."""
    labels = {}
    for axes in figure.axes:
        lines = [line for line in axes.lines if not line.get_label().startswith("_")]
        labels[axes] = [(line, axes.text(0, 0, textwrap.fill(line.get_label(), 18))) for line in lines]
    boxes = [text.get_window_extent() for pairs in labels.values() for _, text in pairs]
    room = max((box.width for box in boxes), default=-20)
    figure.subplots_adjust(right=1 - (room + 40) / figure.bbox.width)
    for axes, pairs in labels.items():
        to_axes = axes.transData - axes.transAxes
        ends = [to_axes.transform(_end(line)) for line, _ in pairs]
        tall = max((text.get_window_extent().height for _, text in pairs), default=0) + 3
        places = _spread([y for _, y in ends], tall / axes.bbox.height)
        for (line, text), end, y in zip(pairs, ends, places, strict=True):
            x = 1 + 18 / axes.bbox.width
            text.set(position=(1 + 28 / axes.bbox.width, y), va="center", transform=axes.transAxes)
            leader = {"color": line.get_color(), "linewidth": 1, "marker": line.get_marker()}
            look = {"markevery": [1], "transform": axes.transAxes, "clip_on": False}
            axes.add_artist(Line2D([end[0], x], [end[1], y], **leader, **look))


def _end(line) -> tuple[float, float]:
    """Return the last point of a line that can be seen."""
    points = zip(line.get_xdata(), line.get_ydata(), strict=True)
    seen = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return seen[-1] if seen else (line.axes.get_xlim()[1], sum(line.axes.get_ylim()) / 2)


def _spread(wanted, gap) -> list[float]:
    """Return places in 0..1 as near as possible to those wanted, at least `gap` apart.

    Least squares under p[i+1] >= p[i] + gap, by pooling neighbours that want the same room.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    gap = min(gap, 1 / max(1, len(order) - 1))
    pools = []
    for i, index in enumerate(order):
        pools.append([wanted[index] - i * gap])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    bases = [statistics.fmean(pool) for pool in pools for _ in pool]
    highest = 1 - gap * (len(order) - 1)
    places = [min(max(base, 0), highest) + i * gap for i, base in enumerate(bases)]
    return [place for _, place in sorted(zip(order, places, strict=True))]
