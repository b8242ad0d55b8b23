"""Time lines: what each rank computes, and below it what is on the wire meanwhile."""

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .. import trace
from .drawing import (
    COMMUNICATION,
    COMPUTE,
    DIM,
    PALE,
    WAITING,
    Picture,
    canvas,
    course_style,
    finish,
    say,
)

PALER = tuple(1 - 0.35 * (1 - part) for part in to_rgb(COMMUNICATION))
HIDDEN = {"facecolor": PALER, "edgecolor": "none", "zorder": 0}  # communication under compute
DATA = {"facecolor": PALE, "edgecolor": DIM, "linewidth": 1}
NAMES = (*COMPUTE, "data", "all-reduce", "waiting")


@course_style()
def timeline(runs, title: str | None = None) -> Picture:
    """Draw spans of `trace`: per rank a lane of compute, below it a lane of communication.

    `runs`: the spans (a list of dicts, or `run.values`, a list of such lists by rank), or
    {"with overlap": spans, "without": spans}, at most two, on the same time axis. What of the
    communication runs under compute is shaded, and its share written. Raises TypeError or
    ValueError for what is no span.
    """
    runs = runs if isinstance(runs, dict) else {"": runs}
    if not 1 <= len(runs) <= 2:
        raise ValueError('timeline() draws spans, or {"name": spans, ...} with one or two runs.')
    runs = {name: from_zero(spans_of(spans)) for name, spans in runs.items()}
    ranks = max(len(_ranks(spans)) for spans in runs.values())
    figure, panels = canvas(len(runs), 1.5 + len(runs) * (0.5 + 0.85 * ranks))
    told = [
        _draw(axes, name, spans) for axes, (name, spans) in zip(panels, runs.items(), strict=True)
    ]
    end = max(span["end"] for spans in runs.values() for span in spans)
    panels[-1].set(xlabel="time (ms)", xlim=(0, end))
    kinds = [
        name for name in NAMES if any(s["name"] == name for spans in runs.values() for s in spans)
    ]
    finish(figure, title, told, "time line")
    inches = figure.get_figheight()
    panels[0].get_gridspec().set_height_ratios([1] * len(panels))
    figure.subplots_adjust(left=0.13, right=0.97, hspace=0.75 / (0.3 + 0.85 * ranks))
    figure.subplots_adjust(bottom=0.9 / inches, top=figure.subplotpars.top - 0.3 / inches)
    _explain(figure, kinds)
    return figure


def spans_of(runs) -> list[dict]:
    """Return one flat list of spans; TypeError or ValueError for what is none."""
    if isinstance(runs, list | tuple) and runs and all(isinstance(r, list | tuple) for r in runs):
        runs = [span for own in runs for span in own]
    if not isinstance(runs, list | tuple) or not all(isinstance(span, dict) for span in runs):
        raise TypeError("timeline() needs spans: return trace.spans() from the ranks.")
    if not runs:
        raise ValueError("there are no spans: wrap the parts of a step in trace.span(name).")
    if missing := {"rank", "name", "start", "end"} - set.intersection(*map(set, runs)):
        raise ValueError(f"a span has no {', '.join(sorted(missing))}: return trace.spans().")
    return list(runs)


def from_zero(spans):
    """The same spans in milliseconds since the first."""
    zero = min(span["start"] for span in spans)
    at = ({key: 1e3 * (span[key] - zero) for key in ("start", "end")} for span in spans)
    return [span | times for span, times in zip(spans, at, strict=True)]


def _ranks(spans) -> list[int]:
    return sorted({span["rank"] for span in spans})


def _draw(axes, name, spans) -> str:
    """Draw one run into its panel; return what is to be seen as a sentence."""
    ranks, ticks = _ranks(spans), {}
    for row, rank in enumerate(ranks):
        own = [span for span in spans if span["rank"] == rank]
        ticks[2 * row + 0.4] = f"rank {rank}"
        ticks[2 * row + 1.27] = "all-reduce"
        for start, end in trace.hidden_parts(own):
            axes.broken_barh([(start, end - start)], (2 * row, 1.72), **HIDDEN)
        for span in own:
            _bar(axes, span, row)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set(ylim=(2 * len(ranks) - 0.2, -0.2))
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    words, said = _numbers(spans)
    axes.set_title(f"{name}: {words}" if name else "", loc="left", fontsize=11)
    return f"{name}: {said}" if name else said


def _bar(axes, span, row) -> None:
    at, name = (span["start"], span["end"] - span["start"]), span["name"]
    if name == "all-reduce":
        axes.broken_barh([at], (2 * row + 1, 0.55), facecolor=COMMUNICATION, edgecolor="white")
    elif name == "waiting":
        axes.broken_barh([at], (2 * row, 0.75), **WAITING)
    else:
        look = {"facecolor": COMPUTE[name], "edgecolor": "white"} if name in COMPUTE else DATA
        axes.broken_barh([at], (2 * row, 0.75), **look)


def _numbers(spans) -> tuple[str, str]:
    """Return the panel's heading and a sentence for those who cannot see it."""
    end = say(max(span["end"] for span in spans), "ms")
    if not any(span["name"] == "all-reduce" for span in spans):
        return f"{end}, nothing on the wire", f"{end} in all, and nothing is all-reduced"
    share = trace.overlap(spans)
    words = f"{share:.0%} of the communication runs under compute; {end}"
    return words, f"{share:.0%} of the communication runs under compute, {end} in all"


def _explain(figure, kinds) -> None:
    """Write below the panels what each bar is."""
    looks = {"all-reduce": {"color": COMMUNICATION}, "waiting": WAITING, "data": DATA}
    looks |= {name: {"color": color} for name, color in COMPUTE.items()}
    boxes = [Patch(label=name, **looks[name]) for name in kinds]
    boxes.append(Patch(label="both at once", **HIDDEN))
    figure.legend(handles=boxes, loc="lower center", ncols=len(boxes), handlelength=1.2,
                  columnspacing=1.1, handletextpad=0.5)  # fmt: skip
