"""The ring all-reduce, step by step, as ranks on a circle or as a strip of small grids.

The steps are drawn from what ranks reported after each step of `collectives.ring_steps`:

    report(step=0, chunks=x)                       # before the first step
    report(step=step.number, chunks=x, sent=step.sent, received=step.received)

with `chunks` one number for each of the chunks, as many as there are ranks.
"""

import base64
import html
import math

from matplotlib.patches import Circle, FancyArrowPatch, Wedge

from ..widgets import interactive, place
from .drawing import (
    COMMUNICATION,
    Picture,
    canvas,
    course_style,
    rank_style,
    show,
)
from .grids import draw_row, finish_grid, grid_canvas, key, name_rank, shades_of, values_of, written
from .records import records_of

RANKS = (2, 4)  # fewer are no ring; of more the numbers could not be read


@course_style()
def ring(run_or_records, step: int, title: str | None = None) -> Picture:
    """Draw the ranks on a circle after one step of a ring all-reduce, with what was sent.

    Step 0 is the start. Raises ValueError for records without such a step, or not 2 to 4 ranks.
    """
    steps = _steps(run_or_records)
    if step not in steps:
        raise ValueError(f"there is no step {step!r}: these records have 0 to {max(steps)}.")
    now, ranks = steps[step], len(steps[0])
    shades = shades_of([part["chunks"] for records in steps.values() for part in records])
    figure, (axes,) = canvas(1, 6.4)
    axes.set(xlim=(-367, 367), ylim=(-272, 272), xticks=[], yticks=[], aspect="equal")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure.subplots_adjust(left=0.01)
    half = math.sin(math.pi / ranks)
    radius = min(100, (262 * half - 36) / (1 + half))  # 72 pixels between neighbours, for arrows
    centers = [_around(rank / ranks, 262 - radius) for rank in range(ranks)]
    for rank, part in enumerate(now):
        _draw_rank(axes, rank, centers[rank], radius, part, shades)
        if step:
            _draw_sending(axes, centers[rank], centers[(rank + 1) % ranks], radius, part["sent"])
    axes.set_xlabel("on each rank: chunks 0, 1, … clockwise from the top (framed: just arrived)")
    return finish_grid(figure, title, _told(now, step, ranks), "ring of ranks")


@course_style()
def ring_strip(run_or_records, title: str | None = None) -> Picture:
    """Draw all steps of a ring all-reduce as small grids: ranks as rows, chunks as columns."""
    steps = _steps(run_or_records)
    ranks = len(steps[0])
    shades = shades_of([part["chunks"] for records in steps.values() for part in records])
    wide = 3  # grids beside each other
    rows = math.ceil(len(steps) / wide)
    figure, axes = grid_canvas(rows * (ranks + 1.2) - 1.2, max(12, wide * (ranks + 0.6)) - 0.6)
    for number, now in steps.items():
        x, y = number % wide * (ranks + 0.6), number // wide * (ranks + 1.2)
        word = f"step {number}" if number else "start"
        axes.text(x + ranks / 2, y - 0.15, word, ha="center", va="bottom", weight="bold")
        for rank, part in enumerate(now):
            framed = [part["received"]] if number else ()
            draw_row(axes, x, y + rank, part["chunks"], shades, framed)
            if not number % wide:
                name_rank(axes, rank, y + rank)
    axes.set_xlabel("chunk (framed: it has just arrived)")
    told = f"{ranks} ranks have the whole sum after 2 × ({ranks} − 1) = {2 * ranks - 2} steps"
    ends = [f"{word}: {_in_words(steps[n])}" for word, n in (("Start", 0), ("End", max(steps)))]
    return finish_grid(figure, title, [told, *ends], "heat maps")


def ring_slider(run_or_records) -> None:
    """Show the steps with a slider; where there is nobody to move it, show the strip of all."""
    steps = _steps(run_or_records)
    if not interactive():
        show(ring_strip(run_or_records))
        return
    import ipywidgets

    drawn = {}

    def picture(step):
        if step not in drawn:
            drawn[step] = _tag(ring(run_or_records, step))
        return drawn[step]

    slider = ipywidgets.IntSlider(0, min=0, max=max(steps), description="Step", readout=True)
    image = ipywidgets.HTML(picture(0))
    slider.observe(lambda change: setattr(image, "value", picture(change["new"])), "value")
    place("ring", ipywidgets.VBox([slider, image]))


# ---- parts


def _steps(run_or_records) -> dict[int, list[dict]]:
    """Return {step: [record of rank 0, of rank 1, …]} with chunks as plain numbers."""
    steps = {}
    for record in records_of(run_or_records):
        if "chunks" in record and "step" in record:
            part = record | {"chunks": values_of(record["chunks"])}
            steps.setdefault(record["step"], {})[record.get("rank", 0)] = part
    if not steps:
        raise ValueError("no record has chunks: call report(step=0, chunks=x) in the ranks.")
    ranks = max(map(len, steps.values()))
    if not RANKS[0] <= ranks <= RANKS[1]:
        raise ValueError(f"{ranks} rank(s): a ring can be drawn of {RANKS[0]} to {RANKS[1]}.")
    for number in range(2 * ranks - 1):
        parts = steps.get(number, {})
        for rank in range(ranks):
            if len(parts.get(rank, {}).get("chunks", ())) != ranks:
                raise ValueError(
                    f"step {number}, rank {rank}: report {ranks} chunks, one number each."
                )
            if number and not {"sent", "received"} <= parts[rank].keys():
                raise ValueError(f"step {number}, rank {rank}: report sent and received as well.")
    return {
        number: [steps[number][rank] for rank in range(ranks)] for number in range(2 * ranks - 1)
    }


def _around(share: float, radius: float) -> tuple[float, float]:
    """Return the point at a share of the way round, clockwise from the top."""
    return radius * math.sin(2 * math.pi * share), radius * math.cos(2 * math.pi * share)


def _draw_rank(axes, rank, center, radius, part, shades) -> None:
    chunks, arrived = part["chunks"], part.get("received")
    look = rank_style(rank)
    axes.add_patch(Circle(center, radius + 4, fill=False, linewidth=4, edgecolor=look["color"]))
    for index, value in enumerate(chunks):
        ends = [90 - 360 * (index + way) / len(chunks) for way in (1, 0)]
        fill, ink = shades[key(value)]
        new = {"edgecolor": COMMUNICATION, "linewidth": 3, "zorder": 3}
        old = {"edgecolor": "white", "linewidth": 1.5, "zorder": 2}
        arc = {"width": 0.62 * radius, "facecolor": fill} | (new if index == arrived else old)
        axes.add_patch(Wedge(center, radius, *ends, **arc))
        dx, dy = _around((index + 0.5) / len(chunks), 0.69 * radius)
        at = {"ha": "center", "va": "center", "zorder": 4}
        axes.text(center[0] + dx, center[1] + dy, written(value), color=ink, **at)
    x, y = center  # the name where the hole is widest
    axes.plot(x, y + 15, markersize=8, markeredgecolor="#444444", markeredgewidth=0.6, **look)
    axes.text(x, y - 4, f"rank {rank}", ha="center", va="center")


def _draw_sending(axes, start, end, radius, chunk) -> None:
    """Draw an arrow between two neighbours' edges, and the chunk's number outside of it."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = math.hypot(dx, dy)
    along, across = (dx / length, dy / length), (-dy / length, dx / length)  # left of the way
    ends = [
        [p[i] + sign * (radius + 9) * along[i] + 14 * across[i] for i in (0, 1)]
        for p, sign in ((start, 1), (end, -1))
    ]
    look = {"arrowstyle": "-|>", "mutation_scale": 22, "color": COMMUNICATION, "linewidth": 3}
    axes.add_patch(FancyArrowPatch(*ends, shrinkA=0, shrinkB=0, **look))
    middle = [(ends[0][i] + ends[1][i]) / 2 + 12 * across[i] for i in (0, 1)]
    side = "left" if across[0] > 0.3 else "right" if across[0] < -0.3 else "center"
    axes.text(*middle, f"chunk {chunk}", ha=side, va="bottom" if across[1] > 0 else "top")


def _tag(picture: Picture) -> str:
    png = base64.b64encode(picture.png()).decode()
    alt = html.escape(picture.alternative_text)
    return f'<img alt="{alt}" src="data:image/png;base64,{png}">'


def _told(now, step, ranks) -> list[str]:
    if not step:
        told = "At the start each rank has only numbers of its own"
    elif step == 2 * ranks - 2:
        told = f"Step {step} of {step}: every rank holds the whole sum"
    elif step < ranks - 1:
        told = f"Step {step}, reduce-scatter: each rank adds the chunk that arrives to its own"
    elif step == ranks - 1:
        told = f"Step {step}, reduce-scatter is done: each rank holds one finished chunk"
    else:
        told = f"Step {step}, all-gather: each rank passes a finished chunk on"
    sent = [f"rank {rank} sent chunk {part['sent']}" for rank, part in enumerate(now) if step]
    return [told, *sent, _in_words(now)]


def _in_words(now) -> str:
    rows = (f"rank {r}: {', '.join(map(written, part['chunks']))}" for r, part in enumerate(now))
    return "; ".join(rows)
