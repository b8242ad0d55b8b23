"""How many GPUs hold one copy of a model: as published, as chosen, and the memory it takes."""

from matplotlib.ticker import FuncFormatter, NullLocator

from ..memory import say
from .drawing import COMMUNICATION, MEASURED, PLAIN, PREDICTED, canvas, course_style, finish, wrap


@course_style()
def strategy_choice(runs, room: float, bytes_each: float, title: str | None = None):
    """Draw GPUs a copy (tensor × pipeline) against parameters, on log axes.

    `runs`: of `published`. The dashed line is `bytes_each` · parameters / `room` bytes of a GPU.
    """
    from ..strategy import choose

    if not runs:
        raise ValueError("strategy_choice() draws at least one run: see published.py.")
    sizes = [run.given["parameters"] for run in runs]
    published = [run.model_parallel for run in runs]
    chosen = [choose(**run.given).model_parallel for run in runs]
    figure, (axes,) = canvas(1, 4.6)
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="GPUs for one copy")
    ends = [min(sizes) / 1.5, max(sizes) * 1.5]
    needed = {"color": COMMUNICATION, "linestyle": "--", "linewidth": 1.4}
    axes.plot(ends, [bytes_each * n / room for n in ends], label="needed for memory", **needed)
    hollow = {"markersize": 11, "markeredgewidth": 1.6, "zorder": 2}
    axes.plot(sizes, published, label="published", **MEASURED | {"linestyle": "none", "zorder": 3})
    axes.plot(sizes, chosen, label="chosen", **PREDICTED | {"linestyle": "none"} | hollow)
    for run, theirs, ours in zip(runs, published, chosen, strict=True):
        if theirs != ours:
            words = f"{theirs} published, {ours} chosen"
            at = {"xytext": (-12, 4), "textcoords": "offset points", "ha": "right"}
            axes.annotate(wrap(words, 14), (run.given["parameters"], theirs), **at)
    axes.set(ylim=(0.7, 2 * max(published + chosen)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: say(value)))
    axes.set_yticks([2**k for k in range(11) if 2**k < 2 * max(published + chosen)])
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_locator(NullLocator())
    same = sum(a == b for a, b in zip(published, chosen, strict=True))
    told = [f"{same} of {len(runs)} are chosen as published; memory decides"]
    told += [
        f"{run.name}: {a} published, {b} chosen"
        for run, a, b in zip(runs, published, chosen, strict=True)
    ]
    return finish(figure, title, told, "scatter plot")
