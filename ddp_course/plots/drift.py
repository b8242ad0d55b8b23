"""How far apart the weights of the ranks are, step by step."""

from matplotlib.ticker import MaxNLocator

from .drawing import MEAN, RUNS, Picture, canvas, course_style, finish, line, say
from .records import records_of, series

APART = RUNS[3]  # one who drifts; the one who does not is the thick line of what all ranks share


@course_style()
def drift(runs: dict, title: str | None = None) -> Picture:
    """Draw the distance between ranks' weights by step, of up to three runs.

    `runs`: {"without averaging": run or records, ...} with `step` and `distance` reported by the
    ranks. A run whose distance is 0 at every step has the thick line. Raises TypeError or
    ValueError for what is none.
    """
    if not isinstance(runs, dict) or not 1 <= len(runs) <= 3:
        raise TypeError('drift() draws {"name": run, ...}, one to three runs.')
    figure, (axes,) = canvas(1, 4)
    looks, ends = [RUNS[1], APART, RUNS[2]], []
    for name, run in runs.items():
        curve = series(records_of(run), "distance")
        together = not any(curve.values())
        line(axes, curve, curve.values(), label=name, **(MEAN if together else looks.pop(0)))
        end = list(curve.values())[-1]
        ends.append(
            f"{name}: {'exactly 0 at every step' if together else f'{say(end)} at the end'}"
        )
    axes.set(xlabel="optimizer step", ylabel="distance between ranks (L2)")
    axes.set_ylim(min(0, -0.03 * axes.get_ylim()[1]), None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return finish(figure, title, ["Distance between the ranks' weights, " + "; ".join(ends)])
