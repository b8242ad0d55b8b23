"""Curves of what ranks reported, by step.

    plots.summary(run)                                      # as a cell's last value it shows itself
    plots.compare({"one rank": first, "two ranks": second})

Each function takes a `Run` or a list of records (see `records`) and returns a `Picture`, which is a
matplotlib Figure with alternative text. `title` replaces the sentence made from the numbers. What
colours, shapes and lines mean is in `drawing`, and can be had from here: `plots.rank_style(0)`.
"""

import itertools
import math
import statistics

from matplotlib.ticker import MaxNLocator

from .drawing import (
    DIM,
    MEAN,
    PALE,
    PLAIN,
    POWER_OF_2,
    PRECISION,
    RUNS,
    Picture,
    canvas,
    course_style,
    cross,
    decades,
    finish,
    line,
    rank_style,
    say,
)
from .records import along, count, finite, ranks_of, records_of, series, trend

LABELS = {  # of axes, with units
    "loss": "loss (per sample)",
    "local_loss": "loss (per sample)",
    "loss_scale": "loss scale (factor)",
    "samples_per_s": "samples/s, all ranks",
    "grad_norm": "gradient norm (L2)",
    "accuracy": "accuracy (share right)",
    "seconds": "seconds per step",
    "step": "optimizer step",
    "samples": "samples seen, all ranks",
    "time": "seconds since launch",
}


@course_style()
def loss(run_or_records, title: str | None = None) -> Picture:
    """Draw the loss by step: the mean over ranks, and each rank's own if `local_loss` is there."""
    figure, (axes,) = canvas(1, 4.2)
    return finish(figure, title, _draw_loss(axes, records_of(run_or_records)))


@course_style()
def loss_scale(
    run_or_records, growth_interval: int | None = None, title: str | None = None
) -> Picture:
    """Draw the loss scale each step was taken with, ✕ at skipped steps, and the loss below.

    Without loss scaling (fp32, bf16) only the loss is drawn, and the title says so.
    `growth_interval`: steps without overflow until the scale doubles, marked when given.
    """
    records = records_of(run_or_records)
    if _unscaled(records):
        figure, (axes,) = canvas(1, 4.2)
        told = ["The loss scale stayed at 1: fp32 and bf16 need no loss scaling"]
        return finish(figure, title, told + _draw_loss(axes, records, ranks=False))
    figure, (upper, lower) = canvas(2, 5.8)
    told = _draw_loss_scale(upper, records, growth_interval)
    return finish(figure, title, told + _draw_loss(lower, records, ranks=False))


@course_style()
def throughput(run_or_records, warmup: int | None = None, title: str | None = None) -> Picture:
    """Draw samples/s over all ranks by step; the first `warmup` steps are not in the median.

    `warmup` defaults to a tenth of the steps, at least one. Raises ValueError if no step is left.
    """
    figure, (axes,) = canvas(1, 3.8)
    return finish(figure, title, _draw_throughput(axes, records_of(run_or_records), warmup))


@course_style()
def summary(run_or_records, title: str | None = None) -> Picture:
    """Draw a run's loss, loss scale (if there was one) and throughput over the same steps."""
    records = records_of(run_or_records)
    unscaled = _unscaled(records)
    figure, panels = canvas(2, 5.8) if unscaled else canvas(3, 7.4)
    told = _draw_loss(panels[0], records)
    if unscaled:
        told[0] += ", without loss scaling"
    else:
        told += _draw_loss_scale(panels[1], records)
    return finish(figure, title, told + _draw_throughput(panels[-1], records))


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
    figure, (axes,) = canvas(1, 4.2)
    free = [look for look in RUNS if look not in [PRECISION.get(name) for name in runs]]
    steps = {"drawstyle": "steps-post"} if quantity == "loss_scale" else {}
    curves = {}
    for name, run in runs.items():
        records = records_of(run)
        curves[name] = curve = series(records, quantity)
        look = PRECISION.get(name) or free.pop(0)
        line(axes, along(records, x, curve), curve.values(), label=name, **look, **steps)
    _label_axes(axes, quantity, *curves.values(), x=x)
    return finish(figure, title, [_compared(curves, quantity)])


# ---- panels: each draws into one Axes and returns sentences, the first of them fit for a title


def _draw_loss(axes, records, ranks=True) -> list[str]:
    mean, own = series(records, "loss"), {}
    if ranks:
        numbers = ranks_of([record for record in records if record.get("local_loss") is not None])
        own = {rank: series(records, "local_loss", rank) for rank in numbers}
    if list(own.values()) == [mean]:  # one rank alone: its loss is the mean
        own = {}
    for rank, curve in own.items():
        line(axes, curve, curve.values(), label=f"rank {rank}", **rank_style(rank))
    line(axes, mean, mean.values(), label="mean" if own else None, **MEAN)
    lost = [step for step, value in mean.items() if not math.isfinite(value)]
    cross(axes, lost, [0.95] * len(lost), "not finite", (9, -18), axes.get_xaxis_transform())
    _label_axes(axes, "loss", mean, *own.values())
    last = [values[-1] for curve in own.values() if (values := finite(curve))]
    told = [trend("loss", mean)]
    if last:
        told.append(f"The ranks' own losses end at {say(min(last))} to {say(max(last))}")
    return told


def _draw_loss_scale(axes, records, growth_interval=None) -> list[str]:
    scale, skips = series(records, "loss_scale"), series(records, "skipped")
    skipped = [step for step in scale if skips.get(step)]
    width = MEAN["linewidth"] if len(scale) <= 400 else 1
    line(axes, scale, scale.values(), drawstyle="steps-post", **MEAN | {"linewidth": width})
    words = f"{len(skipped):,} skipped" if len(skipped) > 1 else "skipped"
    cross(axes, skipped, [scale[step] for step in skipped], words)
    _label_axes(axes, "loss_scale", scale)
    powers = [math.log2(value) for value in finite(scale) if value > 0] or [0]
    room = 0.7 + 0.12 * (max(powers) - min(powers))
    bottom = min(powers) - room * (2.5 if growth_interval else 1)
    axes.set_ylim(2**bottom, 2 ** (max(powers) + 1.3 * room))
    if growth_interval is not None:
        _mark_growth(axes, scale, growth_interval, 2 ** (min(powers) - room))
    if len(skipped) == len(scale) > 1:
        return [f"All {len(scale):,} steps were skipped: nothing was learned"]
    told = [f"{trend('loss scale', scale)}; {count(len(skipped), 'step')} skipped"]
    named = ", ".join(f"{step:,}" for step in skipped[:10]) + ", …" * (len(skipped) > 10)
    return told + [f"Skipped steps: {named}"] * bool(skipped)


def _mark_growth(axes, scale, interval, y) -> None:
    """Draw an arrow as long as the growth interval, up to the step where the scale first grew."""
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"growth_interval must be a number of steps, not {interval!r}.")
    grown = next((b for a, b in itertools.pairwise(scale) if scale[b] > scale[a]), None)
    note = f"growth interval: {interval:,} steps"
    if grown is None:
        note += ", not reached in this run"
        axes.text(0.5, 0.05, note, transform=axes.transAxes, ha="center", color=DIM)
        return
    start, look = grown - interval, {"arrowstyle": "<->", "color": DIM, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (start, y), (grown, y), arrowprops=look)
    axes.vlines([start, grown], y, scale[grown] / 2, color=DIM, linestyle=":", linewidth=1)
    axes.annotate(note, (start, y), (0, -4), textcoords="offset points", va="top", color=DIM)


def _draw_throughput(axes, records, warmup=None) -> list[str]:
    speed = series(records, "samples_per_s")
    steps, values = list(speed), list(speed.values())
    if warmup is None:
        warmup = max(1, len(steps) // 10) if len(steps) > 1 else 0
    if not isinstance(warmup, int) or not 0 <= warmup < len(steps):
        raise ValueError(f"warmup={warmup!r} must be a number of steps from 0 to {len(steps) - 1}.")
    counted = [value for value in values[warmup:] if math.isfinite(value)] or [math.nan]
    median = statistics.median(counted)
    if warmup:
        axes.axvspan(steps[0] - 0.5, (steps[warmup - 1] + steps[warmup]) / 2, color=PALE, zorder=0)
        at = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "top"}
        axes.annotate("warm-up", (steps[0], 1), (2, -2), color=DIM, **at)
    line(axes, steps, values, color=DIM)
    ends = [steps[warmup], steps[-1]]
    line(axes, ends, [median, median], label=f"median {say(median)}", **MEAN)
    _label_axes(axes, "samples_per_s", speed)
    after = f", after {count(warmup, 'step')} of warm-up" if warmup else ""
    return [f"Median {say(median)} samples/s over all ranks{after}"]


def _label_axes(axes, quantity, *curves, x="step") -> None:
    label, values = LABELS.get(quantity, quantity.replace("_", " ")), finite(*curves)
    if quantity == "loss_scale":
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(POWER_OF_2)
    elif quantity in ("samples_per_s", "seconds"):
        axes.set_ylim(0, 1.25 * max(values, default=1))
    elif decades(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(PLAIN)
        label += ", log axis"
    if x == "step":
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
        first, last = min(map(min, curves)), max(map(max, curves))
        if first == last:
            axes.set(xlim=(first - 1, last + 1), xticks=[first])
    if not values:
        axes.set_yticks([])
    axes.set(xlabel=LABELS[x], ylabel=label)


def _unscaled(records) -> bool:
    scales, skips = series(records, "loss_scale"), series(records, "skipped")
    return set(scales.values()) == {1.0} and not any(skips.values())


def _compared(curves, quantity) -> str:
    """Return how runs ended, or their medians for what differs from step to step."""
    noisy = quantity in ("samples_per_s", "seconds")
    ends = []
    for name, curve in curves.items():
        values = finite(curve) or [math.nan]
        ends.append(f"{say(statistics.median(values) if noisy else values[-1])} ({name})")
    what = LABELS.get(quantity, quantity.replace("_", " ")).partition(" (")[0].partition(",")[0]
    told = f"{what[0].upper()}{what[1:]}, {'median' if noisy else 'at the end'}: {', '.join(ends)}"
    if len(curves) == 2 and quantity == "loss":
        a, b = curves.values()
        gaps = finite({step: abs(a[step] - b[step]) for step in a if step in b})
        if gaps:
            told += f"; at most {say(max(gaps))} apart at the same step"
    return told
