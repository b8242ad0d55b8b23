"""Cases as a picture: how many times as good this course is as each contender."""

from ..plots.drawing import DIM, PALE, PLAIN, canvas, course_style, finish, rank_style
from .cases import COURSE, Case
from .table import number

ROW, LINE = 0.5, 0.27  # inches: of a case, of a line of the legend
COLUMNS = 3


def compared(cases: list[Case]) -> dict[str, dict[str, float]]:
    """Return for each case that compares this course with others: {contender: factor}."""
    found = {case.name: _factors(case) for case in cases if case.ours == COURSE}
    return {name: factors for name, factors in found.items() if factors}


@course_style()
def chart(cases: list[Case], title: str | None = None):
    """Draw a row a case and a mark a contender on a log axis; left of 1, this course is behind.

    Raises ValueError if there is nothing to compare with.
    """
    rows = compared(cases)
    if not rows:
        raise ValueError("no case has another contender: there is nothing to draw.")
    names = sorted({contender for factors in rows.values() for contender in factors})
    below = 0.75 + LINE * -(-len(names) // COLUMNS)
    height = 0.6 + ROW * len(rows) + below
    figure, (axes,) = canvas(1, height)
    axes.axvline(1, color=DIM, linewidth=1.4)
    for y, (row, factors) in enumerate(rows.items()):
        axes.axhspan(y - 0.5, y + 0.5, color=PALE if y % 2 == 0 else "white", zorder=0)
        axes.text(0.005, y - 0.23, row, transform=axes.get_yaxis_transform(), va="center", size=9)
        for contender, factor in factors.items():
            look = rank_style(names.index(contender))
            axes.plot(factor, y + 0.18, linestyle="none", markersize=8, mec="#444444", **look)
    for index, contender in enumerate(names):
        look = rank_style(index)
        axes.plot([], [], linestyle="none", markersize=8, mec="#444444", label=contender, **look)
    axes.set(xscale="log", ylim=(len(rows) - 0.5, -0.5), yticks=[])
    axes.set_xlabel("this course is so many times as good as …  (log scale)")
    left, right = axes.get_xlim()
    axes.set_xlim(min(left / 1.1, 0.5), max(right * 1.1, 2))
    axes.xaxis.set_major_formatter(PLAIN)
    axes.xaxis.set_minor_formatter(PLAIN if right < 10 else "")
    told = [f"{len(rows)} comparisons on this machine: right of the line this course is ahead"]
    told += [
        f"{name}: " + ", ".join(f"{other} × {number(value)}" for other, value in factors.items())
        for name, factors in rows.items()
    ]
    finish(figure, title, told, "dot plot")
    figure.subplots_adjust(left=0.03, right=0.97, top=1 - 0.5 / height, bottom=below / height)
    figure.legend(loc="lower left", bbox_to_anchor=(0.02, 0), ncols=COLUMNS)
    return figure


def _factors(case: Case) -> dict[str, float]:
    found = {other: case.times(other) for other in case.samples if other != case.ours}
    return {other: factor for other, factor in found.items() if factor}
