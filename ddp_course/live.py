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
from .plots.sketch import chart

LEAST_INTERVAL = 0.2  # seconds between two drawings
SHARE = 0.02  # of one core may go into drawing


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
        for name in ("step", "steps", "loss", "local_loss", "loss_scale", "samples_per_s"):
            value = record.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"a live view draws numbers: {name} is {value!r}.")
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


def panels(records: list[dict], size: int = 14) -> str:
    """Return progress, loss, loss scale and throughput so far as HTML; `size` is in pixels."""
    by_rank = {}
    for record in records:
        by_rank.setdefault(record["rank"], []).append(record)
    first = by_rank[min(by_rank)]
    box = {"size": size, "width": 205 * size // 14, "height": 100 * size // 14}
    content = _progress(first) + _loss(by_rank, first, box)
    if any(record.get("loss_scale", 1) != 1 for record in first):  # fp32 and bf16 have none
        content += loss_scale(first, **box)
    if "samples_per_s" in first[0]:
        speeds = [record["samples_per_s"] for record in first if "samples_per_s" in record]
        title = f"{speeds[-1]:,.0f} samples/s"
        content += chart(title, [(speeds, "black", 1.5)], from_zero=True, **box)
    if "communication" in first[-1]:
        content += _communication(by_rank, box)
    return content


def of_ranks(by_rank: dict, quantity: str, thickness: float = 1) -> list[tuple]:
    """Return a curve of each rank's own quantity, in the rank's colour and with its name."""
    return [
        (values, drawing.rank_style(rank)["color"], thickness, f"rank {rank}")
        for rank, mine in sorted(by_rank.items())
        if (values := [record[quantity] for record in mine if quantity in record])
    ]


def loss_scale(first: list[dict], **box) -> str:
    """Return the chart of one rank's loss scale, as powers of 2, with its skipped steps."""
    scales = [record["loss_scale"] for record in first]
    powers = [math.log2(scale) if scale > 0 else -math.inf for scale in scales]
    skipped = [index for index, record in enumerate(first) if record.get("skipped")]
    title = f"loss scale 2^{powers[-1]:.0f}" if scales[-1] > 0 else "loss scale 0: it never returns"
    title += f", {len(skipped)} skipped ✕" if skipped else ""
    return chart(title, [(powers, "black", 1.5)], crosses=skipped, **box)


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


def _loss(by_rank: dict, first: list[dict], box: dict) -> str:
    curves = of_ranks(by_rank, "local_loss")
    mean = ([record["loss"] for record in first], "black", 2.5, *(["mean"] if curves else []))
    return chart(f"loss {first[-1]['loss']:.3f}", [*curves, mean], **box)


def _communication(by_rank: dict, box: dict) -> str:
    shares = of_ranks(by_rank, "communication")
    mean = sum(values[-1] for values, *_ in shares) / len(shares)
    return chart(f"communication {mean:.0%} of a step", shares, from_zero=True, **box)
