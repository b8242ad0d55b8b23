"""Who sees which sample: the indices of a data set as cells, in the colours of the ranks."""

from matplotlib.patches import Rectangle

from .drawing import DIM, PALE, RANK_COLORS, Picture, canvas, course_style, finish, wrap
from .records import count

MOST = 32  # samples in a grid; the numbers of more could not be read
DARK = ("#009E73", "#0072B2", "#332288", "#5C2E0B")  # hues that need white letters


@course_style()
def index_grid(rows: dict, samples: int, title: str | None = None) -> Picture:
    """Draw which rank gets which of the samples 0 … samples - 1, one row for each deal.

    `rows`: {"epoch 0": [indices of rank 0, indices of rank 1, …], …}. A cell is a sample, with the
    number of its rank; it is outlined, with all its ranks, where the sample is dealt more than
    once, and crossed out where nobody gets it. Raises TypeError or ValueError for other rows.
    """
    owners = {name: _owners(name, ranks, samples) for name, ranks in _checked(rows, samples)}
    figure, (axes,) = canvas(1, 1.8 + 0.5 * len(owners))
    for row, cells in enumerate(owners.values()):
        for index, ranks in enumerate(cells):
            _draw_cell(axes, index, row, ranks)
    axes.set(xlim=(-0.8, samples - 0.2), ylim=(len(owners) - 0.4, -0.6))
    axes.set(xlabel="index of the sample (the number in a cell is the rank that gets it)")
    axes.set_xticks(range(0, samples, 1 if samples <= 16 else 2))
    axes.set_yticks(range(len(owners)), [wrap(name, 24) for name in owners])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    names = max(label.get_window_extent().width for label in axes.get_yticklabels())
    finish(figure, title, _told(owners), "grid")
    figure.subplots_adjust(left=(names + 28) / figure.bbox.width, right=0.985)
    return figure


def _checked(rows, samples):
    if not isinstance(rows, dict) or not rows:
        raise TypeError('index_grid() draws {"epoch 0": [indices of rank 0, …], …}.')
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST:
        raise ValueError(f"samples={samples!r}: from 1 to {MOST} can be drawn.")
    return rows.items()


def _owners(name, ranks, samples) -> list[list[int]]:
    """Return for each sample the ranks that get it, one twice if it gets the sample twice."""
    cells = [[] for _ in range(samples)]
    for rank, indices in enumerate(ranks):
        for index in map(int, indices):
            if not 0 <= index < samples:
                raise ValueError(f"{name}: rank {rank} gets sample {index} of {samples}.")
            cells[index].append(rank)
    return cells


def _draw_cell(axes, x, y, ranks) -> None:
    wide, high = len(ranks) if len(ranks) > 2 else 1, len(ranks) if len(ranks) == 2 else 1
    width, height = 0.92 / wide, 0.84 / high
    for part, rank in enumerate(ranks):
        left, top = x - 0.46 + part % wide * width, y - 0.42 + part % high * height
        color = RANK_COLORS[rank % 8]
        axes.add_patch(Rectangle((left, top), width, height, facecolor=color))
        ink = {"color": "white" if color in DARK else "black", "ha": "center", "va": "center"}
        axes.text(left + width / 2, top + height / 2, str(rank), **ink)
    if not ranks:
        axes.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, facecolor=PALE, edgecolor=DIM))
        axes.text(x, y, "–", color=DIM, ha="center", va="center")
    if len(ranks) > 1:
        outline = {"fill": False, "edgecolor": "black", "linewidth": 2.6, "zorder": 3}
        axes.add_patch(Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, **outline))


def _told(owners) -> list[str]:
    twice = {name: [i for i, ranks in enumerate(c) if len(ranks) > 1] for name, c in owners.items()}
    never = {name: [i for i, ranks in enumerate(c) if not ranks] for name, c in owners.items()}
    rows = [tuple(map(tuple, cells)) for cells in owners.values()]
    if len(rows) > 1 and len(set(rows)) == 1:
        first = "Every row is the same: each rank gets the same samples every time"
    elif any(twice.values()):
        first = f"{count(sum(map(len, twice.values())), 'sample')} dealt more than once (outlined)"
    else:
        first = "Each sample goes to one rank" if not any(never.values()) else "Some are left out"
    told = [first]
    for name, cells in owners.items():
        ranks = sorted({rank for cell in cells for rank in cell})
        dealt = (
            f"rank {r}: {', '.join(str(i) for i, c in enumerate(cells) if r in c)}" for r in ranks
        )
        extra = f"; more than once: {', '.join(map(str, twice[name]))}" * bool(twice[name])
        left = f"; nobody: {', '.join(map(str, never[name]))}" * bool(never[name])
        told.append(f"{name}: {'; '.join(dealt)}{extra}{left}")
    return told
