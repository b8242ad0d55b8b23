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

from . import plots
from .plots import drawing

LEAST_INTERVAL = 0.2  # seconds between two drawings
SHARE = 0.02  # of one core may go into drawing
POINTS = 240  # of a curve; more would not be seen
WIDTH, HEIGHT, MARGIN = 205, 100, 6  # pixels of a panel


class View:
    """Draws the records it is called with; as a context manager leaves the final picture there.

    Outside a notebook it prints a line now and then instead.
    """

    def __init__(self):
        self.records = []
        self._next = 0.0
        self._id = None
        if _in_notebook():
            from IPython.display import display

            self._id = display(_html("waiting for the ranks …"), display_id=True).display_id

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if error is not None:  # which says more than a picture, and may come of what is drawn
            return
        if self._id and not self.records:
            from IPython.display import display

            display(_html("no rank reported anything"), display_id=self._id, update=True)
        elif self._id:
            full = {"loss_scale", "skipped", "samples_per_s"} <= self.records[0].keys()
            picture = (plots.summary if full else plots.loss)(self.records)
            drawing.show(picture, display_id=self._id, update=True)

    def __call__(self, record: dict) -> None:
        """Take one record, with at least step and loss, and draw, if it is time to."""
        if not {"step", "loss"} <= record.keys():
            raise ValueError("a live view draws records with step and loss: report(step=…, loss=…)")
        self.records.append(record)
        began = time.monotonic()
        if began < self._next or record["rank"] != 0:
            return
        if self._id:
            from IPython.display import display

            display(_html(panels(self.records)), display_id=self._id, update=True)
            pause = max(LEAST_INTERVAL, (time.monotonic() - began) / SHARE)
        else:
            print(
                f"step {record['step'] + 1} of {record.get('steps', '?')}, "
                f"loss {record['loss']:.3f}"
            )
            pause = 2
        self._next = time.monotonic() + pause


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
    return content


def _progress(first: list[dict]) -> str:
    done, steps = first[-1]["step"] + 1, first[-1].get("steps")
    if not steps:
        return f"step {done}<br>"
    seconds = first[-1]["time"] - first[0]["time"]
    left = f", about {seconds / (done - 1) * (steps - done):.0f} s left" if 1 < done < steps else ""
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
