"""The visual language of the course: what colours, shapes and lines mean, how a figure is made.

The only file with colours; fonts, sizes, grid and resolution are in course.mplstyle. A figure is
begun by `canvas`, gets lines from `line` and crosses from `cross`, and is closed by `finish`, all
inside `course_style()`. pyplot is never touched: nothing is global, no figure stays open.
"""

import base64
import contextlib
import html
import io
import math
import statistics
import textwrap
import threading
from pathlib import Path

from matplotlib import rcParams, style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from PIL import Image

STYLE = Path(__file__).with_name("course.mplstyle")
_one_at_a_time = threading.RLock()  # a style is global in matplotlib, and live views have threads


@contextlib.contextmanager
def course_style():
    """The course's style inside of `with course_style():` or of a function `@course_style()`."""
    with _one_at_a_time, style.context(["default", STYLE]):
        yield


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
SKIPPED = {"color": "#D00000", "marker": "X", "linestyle": "none", "zorder": 5}  # or failed
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
    {"color": "black", "linewidth": 1.1, "linestyle": "-"},
    {"color": "#707070", "linewidth": 2.4, "linestyle": ":"},
)
PRECISION = {"fp32": RUNS[0], "bf16": RUNS[1], "fp16": RUNS[2]}
PALE, DIM = "#F1F1F1", "#6A6A6A"  # grounds and notes that stand back

MOST_POINTS = 400  # of a line; beyond that it would be a blot
PLAIN = FuncFormatter(lambda value, _: f"{value:,.6g}")
# An exponent as big as the other text, and none between powers.
POWER_OF_2 = FuncFormatter(
    lambda value, _: f"2^{math.log2(value):.0f}" if math.log2(value).is_integer() else ""
)


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

    @course_style()
    def png(self) -> bytes:
        """Return the content of a PNG file, the same bytes for the same figure."""
        self.canvas.draw()
        size, pixels = self.canvas.get_width_height(), self.canvas.buffer_rgba()
        image = Image.frombytes("RGBA", size, pixels).convert("RGB")
        image = image.quantize(256, dither=Image.Dither.NONE)  # looks the same, a third of the size
        file = io.BytesIO()
        image.save(file, "png", optimize=True)
        return file.getvalue()

    def html(self) -> str:
        """Return the picture as an HTML img element with its alternative text."""
        return _tag(base64.b64encode(self.png()).decode(), self.alternative_text)

    def _ipython_display_(self):
        # Not _repr_mimebundle_: the writer that "%matplotlib inline" has for Figures would win.
        show(self)


def _tag(png: str, alt: str) -> str:
    source = f"data:image/png;base64,{png}"
    return f'<img alt="{html.escape(alt)}" style="max-width: 100%" src="{source}">'


def show(figure: Picture, **how) -> None:
    """Display a picture from the middle of a cell; `how` is passed to IPython's display."""
    from IPython.display import display

    png, alt = base64.b64encode(figure.png()).decode(), figure.alternative_text
    # JupyterLab (4.6) ignores "alt" in the metadata of image/png, but it prefers text/html to it.
    data = {"text/html": _tag(png, alt), "image/png": png, "text/plain": alt}
    display(data, metadata={"image/png": {"alt": alt}}, raw=True, **how)


def canvas(panels: int, height: float) -> tuple[Picture, list]:
    """Return a picture `height` inches high and its panels, one below the other on the same x."""
    figure = Picture(figsize=(rcParams["figure.figsize"][0], height))
    FigureCanvasAgg(figure)  # measures text
    ratios = {"height_ratios": [5] + [4] * (panels - 1), "hspace": 0.16}
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw=ratios)
    for panel in axes[:, 0]:
        panel.xaxis.set_major_formatter(PLAIN)
        panel.yaxis.set_major_formatter(PLAIN)
    return figure, list(axes[:, 0])


def line(axes, xs, ys, label=None, **look) -> None:
    """Draw a line with gaps where values are not finite; `finish` writes the label at its end.

    Of more than MOST_POINTS points it draws the means of equal blocks, and `finish` says so.
    """
    xs, ys = list(xs), [value if math.isfinite(value) else math.nan for value in ys]
    block = 1 if "drawstyle" in look else math.ceil(len(xs) / MOST_POINTS)
    if block > 1:
        starts = range(0, len(xs), block)
        xs, ys = ([statistics.fmean(part[i : i + block]) for i in starts] for part in (xs, ys))
        look["gid"] = str(block)
    if marker := look.get("marker"):
        stride = max(1, len(xs) // 10)
        look["markevery"] = (RANK_MARKERS.index(marker) * stride // 8, stride)
        look |= {"markeredgecolor": "#444444", "markeredgewidth": 0.6}
    else:  # a point without neighbours has no line to be seen
        gaps = [math.isnan(value) for value in (math.nan, *ys, math.nan)]
        lone = [i for i in range(len(ys)) if gaps[i] and not gaps[i + 1] and gaps[i + 2]]
        look |= {"marker": "o", "markersize": 5, "markevery": lone} if lone else {}
    axes.plot(xs, ys, label=label, **look)


def cross(axes, xs, ys, words, shift=(9, 6), transform=None) -> None:
    """Mark points with red crosses and write the words, shifted by points, at the first."""
    if not xs:
        return
    transform = transform or axes.transData
    size = {"markersize": 10, "markeredgecolor": "white"} if len(xs) <= 40 else {"markersize": 5}
    axes.plot(xs, ys, transform=transform, **size, **SKIPPED)
    left, right = axes.get_xlim()
    side, x = ("left", shift[0]) if xs[0] < left + 0.75 * (right - left) else ("right", -shift[0])
    at = {"xytext": (x, shift[1]), "textcoords": "offset points", "ha": side}
    axes.annotate(words, (xs[0], ys[0]), xycoords=transform, color=SKIPPED["color"], **at)


def say(value: float, unit: str = "") -> str:
    """Return a number as it is written in a figure: three digits, or whole from 1,000 on."""
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"
    return f"{text} {unit}".strip().replace("-", "−")


def decades(values: list[float]) -> bool:
    """Say whether values are better seen on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


def finish(figure, title: str | None, told: list[str], kind: str = "line chart") -> Picture:
    """Write title, line labels and alternative text, and make room for them; return the figure.

    `told`: sentences with what is to be seen and its numbers; the first is the default title.
    """
    last, panels = figure.axes[-1], len(figure.axes)
    blocks = {drawn.get_gid() for axes in figure.axes for drawn in axes.lines} - {None}
    if blocks:
        many = " or ".join(sorted(blocks, key=int))
        last.set_xlabel(f"{last.get_xlabel()} (a point: mean of {many} steps)")
    for axes in figure.axes:
        axes.label_outer()
    figure.align_ylabels()
    _write_title(figure, title or told[0])
    _label_lines(figure)
    kinds = f"{panels} {kind}s, one below the other" if panels > 1 else kind
    up = "; ".join(axes.get_ylabel() for axes in figure.axes if axes.get_ylabel())
    said = [kinds.capitalize(), f"Across: {last.get_xlabel()}", *[f"Up: {up}"] * bool(up)]
    said += [title] * bool(title) + told
    figure.alternative_text = " ".join(f"{sentence.rstrip('.')}." for sentence in said)
    return figure


def _write_title(figure, title) -> None:
    height = figure.bbox.height
    heading = figure.suptitle("", x=0.015, y=1 - 8 / height, ha="left", va="top")
    for width in range(84, 40, -4):
        heading.set_text(wrap(title, width))
        box = heading.get_window_extent()
        if box.x1 < figure.bbox.width - 10:
            break
    figure.subplots_adjust(top=1 - (30 + box.height) / height, bottom=58 / height)


def wrap(text: str, width: int) -> str:
    """Return text broken into lines of at most `width` characters, between words."""
    return textwrap.fill(text, width, break_on_hyphens=False)


def _label_lines(figure) -> None:
    """Write each line's label right of its end, moved apart where ends are close together."""
    labels = {}
    for axes in figure.axes:
        axes.autoscale_view()  # the ends of lines move when the axes do
        named = [drawn for drawn in axes.lines if drawn.get_label()[:1] != "_" and _seen(drawn)]
        labels[axes] = [(drawn, axes.text(0, 0, wrap(drawn.get_label(), 20))) for drawn in named]
    sizes = [text.get_window_extent() for pairs in labels.values() for _, text in pairs]
    room = max((size.width for size in sizes), default=-10) + 54
    figure.subplots_adjust(right=1 - room / figure.bbox.width)
    for axes, pairs in labels.items():
        shares = axes.transData - axes.transAxes  # of the axes' width and height
        ends = [shares.transform(_seen(drawn)[-1]) for drawn, _ in pairs]
        tall = max((text.get_window_extent().height for _, text in pairs), default=0) + 3
        places = spread([y for _, y in ends], tall / axes.bbox.height)
        near, far, words = (1 + pixels / axes.bbox.width for pixels in (10, 36, 44))
        free = {"transform": axes.transAxes, "clip_on": False}
        for (drawn, text), (x, y), place in zip(pairs, ends, places, strict=True):
            axes.add_artist(Line2D([x, near], [y, place], color=drawn.get_color(), lw=0.8, **free))
            sample = Line2D([near, far], [place, place])
            sample.update_from(drawn)
            axes.add_artist(sample)
            sample.set(markevery=[1], drawstyle="default", label="", gid=None, **free)
            text.set(position=(words, place), va="center", transform=axes.transAxes)


def _seen(drawn) -> list:
    """Return the points of a line that can be seen."""
    return [point for point in drawn.get_xydata() if math.isfinite(point.sum())]


def spread(wanted: list[float], gap: float) -> list[float]:
    """Return places in 0..1 as near as possible to those wanted, at least `gap` apart.

    Least squares under p[i + 1] >= p[i] + gap, by pooling neighbours that want the same room.
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
