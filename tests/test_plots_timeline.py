"""Time lines, drift, accumulation and placements of no_sync: what they draw, say and refuse."""

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from ddp_course import plots
from ddp_course.plots import drawing
from ddp_course.plots.timeline import HIDDEN

WARM = to_hex(drawing.COMMUNICATION)


def span(name, start, end, rank=0, **more):
    return {"rank": rank, "name": name, "start": start, "end": end, **more}


def step(rank=0, hidden=0.010, zero=5.0):
    """A step of 102 ms: an all-reduce of 40 ms, `hidden` seconds of it under backward."""
    backward = zero + 0.060
    return [
        span("forward", zero, zero + 0.020, rank),
        span("backward", zero + 0.020, backward, rank),
        span("all-reduce", backward - hidden, backward - hidden + 0.040, rank, bucket=0, bytes=8),
        span("waiting", backward, zero + 0.100, rank),
        span("optimizer step", zero + 0.100, zero + 0.102, rank),
    ]


def distances(values, ranks=2):
    return [
        {"rank": rank, "step": k, "distance": value}
        for k, value in enumerate(values)
        for rank in range(ranks)
    ]


EVERY = {
    "timeline": lambda: plots.timeline(step()),
    "two runs": lambda: plots.timeline({"with": step() + step(1), "without": step(0, 0)}),
    "four ranks": lambda: plots.timeline([step(rank) for rank in range(4)]),
    "drift": lambda: plots.drift({"apart": distances([0, 1, 2]), "averaged": distances([0] * 3)}),
    "accumulated": lambda: plots.accumulated({"right": [1e-16, 0], "wrong": [0.1, 3]}, 1e-12),
    "placements": lambda: plots.placements({"none": step(), "right": step()}),
}


@pytest.fixture(params=EVERY)
def figure(request):
    return EVERY[request.param]()


def texts(figure):
    figure.canvas.draw()
    unseen = set()  # matplotlib keeps a label for a tick just outside of the axis
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            unseen |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    found = figure.findobj(Text)
    return [t for t in found if t.get_visible() and t.get_text().strip() and t not in unseen]


def bars(axes, color):
    """(start, width) of the bars of this colour."""
    found = []
    for collection in axes.collections:
        if to_hex(collection.get_facecolor()[0]) == color:
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round(box.x0, 6), round(box.width, 6)))
    return found


def test_every_figure_has_its_kind_axes_and_numbers_in_words(figure):
    alt = figure.alternative_text
    assert "ime line" in alt or "ine chart" in alt
    assert "Across: " in alt and figure.axes[-1].get_xlabel() in alt
    assert any(character.isdigit() for character in alt)
    assert figure.get_suptitle()


def test_nothing_is_clipped_or_too_small(figure):
    assert figure.get_size_inches()[0] <= 8
    for text in texts(figure):
        box = text.get_window_extent()
        assert text.get_fontsize() >= 11, text
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width, text
        assert box.y0 >= 0 and box.y1 <= figure.bbox.height, text


def test_a_step_is_drawn_in_milliseconds_from_its_beginning():
    (axes,) = plots.timeline(step()).axes
    assert bars(axes, to_hex(drawing.COMPUTE["forward"])) == [(0, 20)]
    assert bars(axes, to_hex(drawing.COMPUTE["backward"])) == [(20, 40)]
    assert bars(axes, WARM) == [(50, 40)]
    assert axes.get_xlabel() == "time (ms)"
    hatched = [c for c in axes.collections if c.get_hatch()]
    assert len(hatched) == 1


def test_overlap_is_shaded_and_its_share_written():
    figure = plots.timeline({"with": step(), "without": step(0, 0)})
    shaded = [bars(axes, to_hex(HIDDEN["facecolor"])) for axes in figure.axes]
    assert shaded == [[(50, 10)], []]
    heads = [axes.get_title(loc="left") for axes in figure.axes]
    assert heads == [
        "with: 25% of the communication runs under compute; 102 ms",
        "without: 0% of the communication runs under compute; 102 ms",
    ]
    assert "with: 25% of the communication" in figure.alternative_text


def test_two_runs_have_one_time_axis_on_which_all_is_seen():
    long = [span("forward", 0, 0.3)]
    for runs in ({"a": step(), "b": long}, {"a": long, "b": step()}):
        limits = [axes.get_xlim() for axes in plots.timeline(runs).axes]
        assert limits == [(0, 300)] * 2


def test_each_rank_has_a_lane_of_compute_and_one_of_communication():
    (axes,) = plots.timeline([step(0), step(1)]).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["rank 0", "all-reduce", "rank 1", "all-reduce"]
    assert len(bars(axes, WARM)) == 2


def test_without_communication_it_says_so():
    figure = plots.timeline([span("forward", 0, 0.1)])
    assert "nothing is all-reduced" in figure.alternative_text


@pytest.mark.parametrize(
    "runs, error, said",
    [
        ([], ValueError, "there are no spans: wrap the parts"),
        (3, TypeError, "needs spans: return trace.spans"),
        ([[1]], TypeError, "needs spans"),
        ([{"rank": 0, "name": "forward"}], ValueError, "a span has no end, start"),
        ({"a": step(), "b": step(), "c": step()}, ValueError, "one or two runs"),
        ({}, ValueError, "one or two runs"),
    ],
)
def test_what_is_no_span_is_refused(runs, error, said):
    with pytest.raises(error, match=said):
        plots.timeline(runs)


def test_drift_has_the_thick_line_where_the_distance_is_zero_throughout():
    runs = {"apart": distances([0, 1, 2.5]), "averaged": distances([0, 0, 0])}
    figure = plots.drift(runs)
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert list(lines["apart"].get_ydata()) == [0, 1, 2.5]
    assert list(lines["averaged"].get_ydata()) == [0, 0, 0]
    assert lines["averaged"].get_linewidth() == drawing.MEAN["linewidth"]
    assert lines["apart"].get_linewidth() < drawing.MEAN["linewidth"]
    assert "averaged: exactly 0 at every step" in figure.alternative_text
    nearly = plots.drift({"nearly": distances([0, 1e-9])})
    assert "exactly" not in nearly.alternative_text
    with pytest.raises(ValueError, match='no record has "step" and "distance"'):
        plots.drift({"a": [{"rank": 0, "step": 1, "loss": 2}]})


def test_accumulated_draws_every_way_and_shades_rounding():
    figure = plots.accumulated({"right": [1e-16, 0], "wrong": [0.1, 3]}, rounding=1e-12)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["wrong"] == [0.1, 3]
    assert lines["right"][0] == 1e-16
    low, high = axes.get_ylim()
    assert low <= min(lines["right"]) and high > 3  # an exact 0 is drawn at the axis
    assert "right: at most 1e−16; wrong: at most 3" in figure.alternative_text
    with pytest.raises(ValueError, match="differences are at least 0"):
        plots.accumulated({"right": [-1]}, rounding=1)
    with pytest.raises(ValueError, match="differences are at least 0"):
        plots.accumulated({"right": []}, rounding=1)
    with pytest.raises(TypeError, match="up to five"):
        plots.accumulated([1, 2], rounding=1)


def test_placements_draw_a_dot_for_each_all_reduce_and_write_number_and_time():
    two = step() + [span("all-reduce", 5.08, 5.09)]
    figure = plots.placements({"two": two, "none": [span("forward", 0, 0.05)]})
    (axes,) = figure.axes
    dots = [[round(x, 6) for x in line.get_xdata()] for line in axes.lines]
    assert dots[:2] == [[50, 80], []]
    written = [text.get_text() for text in texts(figure)]
    assert "2 all-reduces\n102 ms" in written and "no all-reduces\n50 ms" in written
    with pytest.raises(TypeError, match="placements"):
        plots.placements({})
