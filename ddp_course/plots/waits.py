"""Who waits where: the last collectives of each rank, and the one that somebody never called."""

from matplotlib.patches import Rectangle

from .drawing import COMMUNICATION, SKIPPED, WAITING, Picture, course_style
from .grids import finish_grid, grid_canvas, name_rank

MOST_COLUMNS = 4  # of the last collectives: more could not be read
WIDTH, GAP = 3.2, 0.12  # of a box, in rows


@course_style()
def waits(error, title: str | None = None) -> Picture:
    """Draw the last collectives of each rank, from a HangError or RankError, in lanes.

    Filled: done; hatched: the rank waits in it; a red cross: it never called it, others did. Raises
    TypeError for what has no `collectives`.
    """
    if not hasattr(error, "collectives"):
        raise TypeError(f"waits() draws a HangError or a RankError, not {error!r}.")
    lanes = [_by_place(log) for log in error.collectives]
    places = sorted({place for lane in lanes for place in lane}, key=lambda place: place[::-1])
    places = places[-MOST_COLUMNS:]
    figure, axes = grid_canvas(len(lanes), max(3, len(places)) * WIDTH)
    for column, (_, number) in enumerate(places):
        axes.text(column * WIDTH, -0.15, f"number {number}", va="bottom", weight="bold")
    for rank, lane in enumerate(lanes):
        name_rank(axes, rank, rank)
        for column, place in enumerate(places):
            _box(axes, column * WIDTH, rank, lane.get(place))
    axes.set_xlabel("collectives (filled: done; hatched: waits in it; ✕: never called it)")
    return finish_grid(figure, title, _told(lanes, places), "lanes of collectives")


def _by_place(log) -> dict:
    return {(collective.group, collective.number): collective for collective in log}


def _box(axes, x: float, y: float, collective) -> None:
    at = {"ha": "center", "va": "center", "zorder": 4}
    middle = x + WIDTH / 2, y + 0.5
    if collective is None:
        axes.plot([x + 0.5], [y + 0.5], markersize=9, markeredgecolor="white", **SKIPPED)
        axes.text(x + 0.85, y + 0.5, "never came", color=SKIPPED["color"], va="center")
        return
    look = WAITING | {"edgecolor": "#999999"}
    if collective.done:
        look = {"facecolor": COMMUNICATION, "alpha": 0.22}
    axes.add_patch(Rectangle((x, y + 0.08), WIDTH - GAP, 0.84, **look))
    ground = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(*middle, collective.name, bbox=None if collective.done else ground, **at)


def _told(lanes, places) -> list[str]:
    told = []
    for rank, lane in enumerate(lanes):
        done = sum(lane[place].done for place in places if place in lane)
        waiting = [str(lane[p]) for p in places if p in lane and not lane[p].done]
        missing = [number for group, number in places if (group, number) not in lane]
        words = f"rank {rank} has finished {done} of those shown"
        words += f" and waits in {waiting[0]}" if waiting else ""
        words += f" and never called number {missing[0]}" if missing else ""
        told.append(words)
    return told or ["no collectives are known"]
