"""Heat maps, the ring in steps, time against bytes: read back from what was drawn."""

import io
import re

import pytest
import torch
import torch.distributed as dist
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch, Rectangle, Wedge
from matplotlib.text import Text
from PIL import Image

from ddp_course import collectives, launch, plots, report
from ddp_course.plots import drawing, grids
from ddp_course.plots import ring as ring_function

WARM = to_hex(drawing.COMMUNICATION)


@pytest.fixture(scope="module")
def run():
    def worker():
        x = torch.full((dist.get_world_size(),), 10.0 ** dist.get_rank())
        report(step=0, chunks=x)
        for step in collectives.ring_steps(x):
            report(step=step.number, chunks=x, sent=step.sent, received=step.received)

    return launch(worker, nproc=3)


def title(figure):
    return figure.get_suptitle().replace("\n", " ")


def cells(axes):
    """{(row, column): (fill, number)} of the cells, and the corners of the frames."""
    boxes = [p for p in axes.patches if isinstance(p, Rectangle)]
    fills = {(p.get_y(), p.get_x()): to_hex(p.get_facecolor()) for p in boxes if p.get_fill()}
    words = {t.get_position()[::-1]: t.get_text() for t in axes.texts}
    found = {(y, x): (fill, words[y + 0.5, x + 0.5]) for (y, x), fill in fills.items()}
    frames = {
        (round(p.get_y() - 0.06, 6), round(p.get_x() - 0.04, 6))
        for p in boxes
        if not p.get_fill() and to_hex(p.get_edgecolor()) == WARM
    }
    return found, frames


# ---- before and after


def test_numbers_stand_in_their_cells_and_the_changed_ones_are_framed():
    before = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    after = [torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])]
    (axes,) = plots.before_after(before, after).axes
    found, frames = cells(axes)
    numbers = {at: word for at, (_, word) in found.items()}
    assert numbers == {
        (0, 0): "1", (0, 1): "2", (1, 0): "3", (1, 1): "4",
        (0, 3.7): "1", (0, 4.7): "2", (1, 3.7): "1", (1, 4.7): "4",
    }  # fmt: skip
    assert frames == {(1, 3.7)}


def test_a_larger_number_is_darker_and_equal_numbers_look_the_same():
    (axes,) = plots.before_after([[1, 5, 1000]], [[5, 1000, 1]]).axes
    found, _ = cells(axes)
    fills = {}
    for fill, word in found.values():
        assert fills.setdefault(word, fill) == fill
    light = [int(fills[word][1:3], 16) for word in ("1", "5", "1000")]
    assert light == sorted(light, reverse=True) and len(set(light)) == 3


def test_numbers_can_be_read_on_their_shade():
    (axes,) = plots.before_after([list(range(6))], [list(range(6, 12))]).axes
    found, _ = cells(axes)
    inks = {t.get_text(): t.get_color() for t in axes.texts}
    assert len(found) == 12
    for fill, word in found.values():
        light = (int(fill[1:3], 16) / 255) ** 2.2 + 0.05
        assert (1.05 / light if inks[word] == "white" else light / 0.05) > 4.5, (fill, word)


def test_a_rank_that_holds_nothing_is_told_from_one_with_a_zero():
    figure = plots.before_after([[0], [7]], [[torch.zeros(1), torch.tensor([7])], None])
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.texts].count("–") == 1
    assert "After: rank 0: 0, 7; rank 1: nothing." in figure.alternative_text
    assert title(figure) == "Afterwards only rank 0 holds a result"


def test_the_title_is_the_callers_or_made_from_the_numbers():
    assert title(plots.before_after([1, 2], [3, 3])) == "Afterwards all ranks hold the same"
    own = plots.before_after([1, 2], [2, 1])
    assert title(own) == "Afterwards each rank holds something of its own"
    assert title(plots.before_after([1, 2], [3, 3], title="A sum")) == "A sum"


def test_nan_and_infinity_and_fractions_are_written():
    figure = plots.before_after([[float("nan"), 0.5]], [[float("inf"), -2]])
    words = {t.get_text() for t in figure.axes[0].texts}
    assert {"nan", "0.5", "inf", "−2"} <= words and figure.png()


@pytest.mark.parametrize(
    "before, after, error, said",
    [
        ([1], [1, 2], ValueError, "1 rank(s) before, but 2 after"),
        (torch.ones(2), [1], TypeError, "before: give a list"),
        ([1], [], TypeError, "after: give a list"),
        ([list(range(7))], [1], ValueError, "before: 7 elements on a rank; 6 can be drawn"),
        (["x"], [1], TypeError, "not 'x'"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(before, after, error, said):
    with pytest.raises(error, match=re.escape(said)):
        plots.before_after(before, after)


# ---- when each worker ran

TURNS = {"thread 0": [(5.0, 5.1), (5.2, 5.3)], "thread 1": [(5.1, 5.2)]}
TOGETHER = {"rank 0": [(9.0, 9.4)], "rank 1": [(9.0, 9.1), (9.3, 9.4)]}


def test_lanes_are_drawn_from_zero_in_ms_under_their_names():
    figure = plots.turns({"threads": TURNS, "ranks": TOGETHER})
    upper, lower = figure.axes
    assert [t.get_text() for t in upper.get_yticklabels()] == list(TURNS)
    assert [t.get_text() for t in lower.get_yticklabels()] == list(TOGETHER)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["threads", "ranks"]
    blue = to_hex(drawing.COMPUTE["optimizer step"])
    bars = [c for c in upper.collections if to_hex(c.get_facecolor()[0]) == blue]
    spans = [[tuple(path.get_extents().intervalx) for path in c.get_paths()] for c in bars]
    assert [pytest.approx(span) for span in spans[0]] == [(0, 100), (200, 300)]
    assert [pytest.approx(span) for span in spans[1]] == [(100, 200)]
    assert "threads: 0% of the time" in figure.alternative_text
    assert "ranks: 50% of the time" in figure.alternative_text


@pytest.mark.parametrize(
    "lanes, share",
    [
        ([[(0, 1)], [(0, 1)]], 1),
        ([[(0, 1)], [(1, 2)]], 0),
        ([[(0, 2)], [(1, 3)]], 1 / 3),
        ([[(0, 4)], [(0, 1), (2, 3)], [(2, 4)]], 3 / 4),
        ([[(0, 1)]], 0),
    ],
)
def test_the_overlap_is_the_share_of_the_time_in_which_two_ran(lanes, share):
    assert grids.overlap(lanes) == pytest.approx(share)


def test_lanes_that_are_none_are_told_in_one_line():
    with pytest.raises(TypeError, match="1 or 2 groups"):
        plots.turns([[(0, 1)]])
    with pytest.raises(ValueError, match="a worker has no spans"):
        plots.turns({"threads": {"thread 0": []}})


# ---- the ring


def test_each_step_shows_the_chunks_of_every_rank_and_what_was_sent(run):
    by_step = {}
    for record in run.records:
        by_step.setdefault(record["step"], {})[record["rank"]] = record
    for step, ranks in by_step.items():
        figure = plots.ring(run, step)
        (axes,) = figure.axes
        words = [t.get_text() for t in axes.texts]
        for rank, record in ranks.items():
            assert f"rank {rank}" in words
            numbers = [f"{value:.0f}" for value in record["chunks"].tolist()]
            assert f"rank {rank}: {', '.join(numbers)}" in figure.alternative_text
            assert all(words.count(n) >= 1 for n in numbers)
        arcs = [p for p in axes.patches if isinstance(p, Wedge)]
        framed = [p for p in arcs if to_hex(p.get_edgecolor()) == WARM]
        arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
        assert len(arcs) == 9 and len(framed) == len(arrows) == (3 if step else 0)
        sent = [word for word in words if word.startswith("chunk")]  # drawn rank by rank
        assert sent == [f"chunk {ranks[rank]['sent']}" for rank in range(3) if step]
    assert "every rank holds the whole sum" in title(figure)


def test_the_frame_is_around_the_chunk_that_arrived(run):
    record = next(r for r in run.records if r["step"] == 1 and r["rank"] == 0)
    (axes,) = plots.ring(run, 1).axes
    arcs = [p for p in axes.patches if isinstance(p, Wedge)][:3]  # those of rank 0
    framed = [i for i, p in enumerate(arcs) if to_hex(p.get_edgecolor()) == WARM]
    assert framed == [record["received"]]


def test_the_strip_shows_all_steps(run):
    figure = plots.ring_strip(run)
    words = [t.get_text() for t in figure.axes[0].texts]
    for step in range(1, 5):
        assert f"step {step}" in words
    assert words.count("111") == 3 + 6 + 9  # finished chunks after steps 2, 3 and 4
    assert title(figure) == "3 ranks have the whole sum after 2 × (3 − 1) = 4 steps"


def test_without_a_notebook_the_slider_is_the_strip(run, monkeypatch):
    shown = []
    monkeypatch.setitem(plots.ring_slider.__globals__, "show", shown.append)
    plots.ring_slider(run)
    assert [picture.alternative_text for picture in shown] == [
        plots.ring_strip(run).alternative_text
    ]


def test_the_slider_has_a_name_a_number_and_a_picture_for_each_step(run, monkeypatch):
    shown = []
    monkeypatch.setitem(plots.ring_slider.__globals__, "interactive", lambda: True)
    monkeypatch.setitem(plots.ring_slider.__globals__, "place", lambda key, box: shown.append(box))
    plots.ring_slider(run)
    slider, image = shown[0].children
    assert slider.description and slider.readout and (slider.min, slider.max) == (0, 4)
    seen = [image.value]
    for step in range(1, 5):
        slider.value = step
        seen.append(image.value)
        assert f'alt="{plots.ring(run, step).alternative_text[:40]}' in image.value
    assert len(set(seen)) == 5
    slider.value = 0
    assert image.value == seen[0]


def without(records, key, step):
    return [{k: v for k, v in r.items() if (k, r["step"]) != (key, step)} for r in records]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda records: [{"rank": 0, "step": 0}], "no record has chunks"),
        (lambda records: records[:1], "1 rank(s): a ring can be drawn of 2 to 4"),
        (lambda records: without(records, "sent", 2), "step 2, rank 0: report sent and received"),
        (lambda records: without(records, "chunks", 3), "step 3, rank 0: report 3 chunks"),
    ],
)
def test_records_of_no_ring_are_told_in_one_line(run, change, said):
    ordered = sorted(run.records, key=lambda r: (r["step"], r["rank"]))
    with pytest.raises(ValueError, match=re.escape(said)):
        plots.ring_strip(change(ordered))


def test_a_step_that_was_not_is_refused(run):
    with pytest.raises(ValueError, match="no step 5: these records have 0 to 4"):
        plots.ring(run, 5)


# ---- time against bytes


def test_points_line_and_both_regimes_are_drawn():
    points = [(4.0**k, 3e-4 + 7e-10 * 4.0**k) for k in range(4, 13)]
    cost = collectives.fit(points)
    figure = plots.time_against_bytes(points[::-1], cost)
    (axes,) = figure.axes
    assert axes.get_xscale() == axes.get_yscale() == "log"
    dots = next(drawn for drawn in axes.lines if drawn.get_marker() == "o")
    assert dots.get_xydata().tolist() == [[n, pytest.approx(1e3 * t)] for n, t in points]
    fitted = next(drawn for drawn in axes.lines if "fitted" in drawn.get_label())
    for size, ms in fitted.get_xydata():
        assert ms == pytest.approx(1e3 * cost.seconds(size))
    words = " ".join(t.get_text() for t in axes.texts)
    assert "latency: α = 300 µs" in words and "1/β = 1.43 GB/s" in words
    assert title(figure) == "Up to about 429 kB latency rules, beyond it bandwidth"
    assert "ms" in axes.get_ylabel()


@pytest.mark.parametrize("cost", [(0.0, 1e-9), (1e-3, 0.0), (1e-3, 1e-13), (1e-9, 1e-9)])
def test_a_fit_with_one_regime_names_that_one_alone(cost):
    points = [(1e3, 1e-3), (1e6, 2e-3)]
    figure = plots.time_against_bytes(points, collectives.Cost(*cost))
    words = " ".join(t.get_text() for t in figure.axes[0].texts)
    assert ("latency" in words) != ("bandwidth" in words)
    assert figure.png()


def test_points_that_have_no_logarithm_are_refused():
    with pytest.raises(ValueError, match="two or more"):
        plots.time_against_bytes([(0, 1e-3), (8, 1e-3)], collectives.Cost(1, 1))


# ---- what every figure has


@pytest.fixture(params=["heat map", "ring", "strip", "cost", "turns"])
def figure(request, run):
    points = [(4.0**k, 3e-4 + 7e-10 * 4.0**k) for k in range(4, 13)]
    return {
        "heat map": lambda: plots.before_after([[1, 2]] * 4, [[1, 2, 3, 4]] * 4),
        "ring": lambda: ring_function(run, 2),
        "strip": lambda: plots.ring_strip(run),
        "cost": lambda: plots.time_against_bytes(points, collectives.fit(points)),
        "turns": lambda: plots.turns({"threads": TURNS, "ranks": TOGETHER}),
    }[request.param]()


def test_every_figure_fits_a_page_and_nothing_is_cut_off_or_small(figure):
    image = Image.open(io.BytesIO(figure.png()))
    assert image.width == 800
    assert all(text.get_fontsize() >= 11 for text in figure.findobj(Text))
    parts = [t for axes in figure.axes for t in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    for text in (*parts, figure._suptitle):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= image.width, text.get_text()
        assert box.y0 >= 0 and box.y1 <= image.height, text.get_text()


def test_every_figure_says_its_title_in_its_alternative_text(figure):
    assert title(figure) in figure.alternative_text
    assert re.match(
        r"(Heat map|Ring of ranks|Heat maps|Line chart|2 time lines, .*)\. ",
        figure.alternative_text,
    )
