"""Watch a run in the cell that started it: a drawing that moves, then a picture that stays.

    with live.view() as view:
        run = launch(train.run, settings, on_record=view)

While ranks run, the drawing is a small SVG text: it takes a millisecond or two, where a matplotlib
figure takes a few hundred. At the end `plots.summary` replaces it, and the notebook is saved with
that.
"""

import math
import sys
import time
from collections.abc import Callable

from tqdm.auto import tqdm

from . import plots
from .plots import drawing

LEAST_INTERVAL = 0.2  # seconds between two drawings
SHARE = 0.02  # of one core may go into drawing
POINTS = 240  # of a curve; more would not be seen
WIDTH, HEIGHT, MARGIN = 205, 100, 6  # pixels of a panel


class Pace:
    """Says when to draw: at most five times a second, and for at most 2 % of one core's time."""

    def __init__(self):
        self._next = 0.0

    def draw(self, drawing: Callable) -> None:
        """Call `drawing` if it is time to."""
        began = time.monotonic()
        if began >= self._next:
            drawing()
            took = time.monotonic() - began
            self._next = began + took + max(LEAST_INTERVAL, took / SHARE)


class View:
    """Draws the records it is called with; as a context manager leaves the final picture there.

    Outside a notebook it moves a progress bar instead.
    """

    def __init__(self):
        self.records = []
        self._pace, self._id, self._bar = Pace(), None, None
        if _in_notebook():
            from IPython.display import display

            self._id = display(_html("waiting for the ranks …"), display_id=True).display_id

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        self.end(error)

    def end(self, error=None) -> None:
        """Replace the drawing by the final picture, unless the run failed: its error says more."""
        if self._bar is not None:
            self._move_bar()
            self._bar.close()
        if error is not None or self._id is None:
            return
        if not self.records:
            self._show(_html("no rank reported anything"))
            return
        full = {"loss_scale", "skipped", "samples_per_s"} <= self.records[0].keys()
        picture = (plots.summary if full else plots.loss)(self.records)
        drawing.show(picture, display_id=self._id, update=True)

    def __call__(self, record: dict) -> None:
        """Take one record, with at least step and loss, and draw, if it is time to."""
        if not {"step", "loss"} <= record.keys():
            raise ValueError("a live view draws records with step and loss: report(step=…, loss=…)")
        self.records.append(record)
        if record["rank"] == 0:
            draw = self._move_bar if self._id is None else self._draw
            self._pace.draw(draw)

    def _draw(self) -> None:
        self._show(_html(panels(self.records)))

    def _show(self, content) -> None:
        from IPython.display import display

        display(content, display_id=self._id, update=True)

    def _move_bar(self) -> None:
        last = self.records[-1]
        if self._bar is None:
            self._bar = tqdm(total=last.get("steps"), unit="step", leave=True)
        self._bar.set_postfix_str(f"loss {last['loss']:.3f}", refresh=False)
        self._bar.update(last["step"] + 1 - self._bar.n)


def view() -> View:
    """Return a new view for one run, to be passed as `on_record`."""
    return View()


def _in_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def _html(content: str):
    from IPython.display import HTML

    return HTML(
        f'<div style="font: 14px sans-serif; color: #222; background: white">{content}</div>'
    )


def panels(records: list[dict]) -> str:
    """Return progress, loss, loss scale and throughput so far as HTML."""
    by_rank = {}
    for record in records:
        by_rank.setdefault(record["rank"], []).append(record)
    first = by_rank[min(by_rank)]
    content = _progress(first) + _loss(by_rank, first)
    if any(record.get("loss_scale", 1) != 1 for record in first):  # fp32 and bf16 have none
        content += _loss_scale(first)
    if "samples_per_s" in first[0]:
        content += _throughput(first)
    if "communication" in first[-1]:
        content += _communication(by_rank)
    return content


def _progress(first: list[dict]) -> str:
    done, steps = first[-1]["step"] + 1, first[-1].get("steps")
    if not steps:
        return f"step {done}<br>"
    seconds = first[-1]["time"] - first[0]["time"]
    left = ""
    if 1 < done < steps:
        left = f", {tqdm.format_interval(seconds / (done - 1) * (steps - done))} left"
    bar = f'<progress value="{done}" max="{steps}" style="width: 360px"></progress>'
    return f"{bar} step {done} of {steps}{left}<br>"


def _loss(by_rank: dict, first: list[dict]) -> str:
    curves = [
        (
            [record["local_loss"] for record in mine if "local_loss" in record],
            drawing.rank_style(rank)["color"],
            1,
        )
        for rank, mine in sorted(by_rank.items())
    ]
    curves.append(([record["loss"] for record in first], "black", 2.5))
    return _panel(f"loss {first[-1]['loss']:.3f}", curves)


def _loss_scale(first: list[dict]) -> str:
    powers = [
        math.log2(record["loss_scale"]) if record["loss_scale"] > 0 else -math.inf
        for record in first
    ]
    skipped = [index for index, record in enumerate(first) if record.get("skipped")]
    title = f"loss scale 2^{powers[-1]:.0f}" + (f", {len(skipped)} skipped ✕" if skipped else "")
    return _panel(title, [(powers, "black", 1.5)], skipped)


def _throughput(first: list[dict]) -> str:
    speeds = [record["samples_per_s"] for record in first]
    return _panel(f"{speeds[-1]:,.0f} samples/s", [(speeds, "black", 1.5)], from_zero=True)


def _communication(by_rank: dict) -> str:
    shares = [
        ([r.get("communication", math.nan) for r in mine], drawing.rank_style(rank)["color"], 1.5)
        for rank, mine in sorted(by_rank.items())
    ]
    mean = sum(values[-1] for values, _, _ in shares) / len(shares)
    return _panel(f"communication {mean:.0%} of a step", shares, from_zero=True)


def _panel(title: str, curves: list[tuple], crosses=(), from_zero=False) -> str:
    """Return a titled box with curves (values, color, width), ✕ at places of the first one."""
    finite = [value for values, _, _ in curves for value in values if math.isfinite(value)]
    low, high = min([0, *finite] if from_zero else finite, default=0), max(finite, default=1)
    spread = high - low or 1

    def place(index, values):
        value = min(max(values[index], low), high) if values[index] == values[index] else high
        x = MARGIN + index / max(1, len(values) - 1) * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - MARGIN - (value - low) / spread * (HEIGHT - 2 * MARGIN)

    shapes = ""
    for values, color, width in curves:
        picked = range(0, len(values), max(1, len(values) // POINTS))
        points = " ".join("{:.1f},{:.1f}".format(*place(index, values)) for index in picked)
        shapes += (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}"/>'
        )
    for index in crosses:
        x, y = place(index, curves[0][0])
        color = drawing.SKIPPED["color"]
        shapes += (
            f'<path d="M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8" stroke="{color}" stroke-width="2"/>'
        )
    figure = '<figure style="display: inline-block; margin: 4px 8px 4px 0">'
    size = f'width="{WIDTH}" height="{HEIGHT}" style="border: 1px solid #bbb"'
    box = f'<svg {size} role="img" aria-label="{title}">{shapes}</svg>'
    return f"{figure}<figcaption>{title}</figcaption>{box}</figure>"
