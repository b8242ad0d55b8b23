"""Figures: what they draw, say and look like, read back from matplotlib objects and PNG files."""

import html
import io
import itertools
import math
import random
import re
import struct
import subprocess
import sys
from types import SimpleNamespace

import matplotlib
import nbclient
import nbformat
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text
from PIL import Image

from ddp_course import plots
from ddp_course.plots import drawing

SKIPPED = [0, 1, 40]
RED = to_hex(drawing.SKIPPED["color"])


def records(ranks=2, steps=60, skipped=SKIPPED, scaled=True, spread=0.2, seed=0, **changes):
    """Records as `train.train` reports them; `changes` replaces curves: key=[value by step]."""
    noise, made, scale = random.Random(seed), [], 2.0**16
    for step in range(steps):
        local = [2 / (1 + step / 4) + spread * noise.random() for _ in range(ranks)]
        seconds = 1.0 if step == 0 else 0.1 + 0.01 * noise.random()
        skip = scaled and step in skipped
        shared = {
            "step": step,
            "loss": sum(local) / ranks,
            "loss_scale": scale if scaled else 1.0,
            "skipped": skip,
            "samples": 32 * ranks,
            "samples_per_s": 32 * ranks / seconds,
            **{key: values[step] for key, values in changes.items()},
        }
        scale /= 2 if skip else 1
        for rank in range(ranks):
            own = {"rank": rank, "time": step + rank / 10, "local_loss": local[rank]}
            made.append(own | shared)
    return made


def of_rank(made, rank, key):
    return [record[key] for record in made if record["rank"] == rank]


def curves(axes, color):
    """The lines of this colour that are drawn in the coordinates of the data."""
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    return [line for line in lines if to_hex(line.get_color()) == to_hex(color)]


def crosses(axes):
    """The points marked with a red cross, and the words written in red."""
    marked = [line for line in axes.lines if line.get_marker() == "X"]
    words = [text.get_text() for text in axes.texts if to_hex(text.get_color()) == RED]
    return [tuple(point) for line in marked for point in line.get_xydata()], words


def title(figure):
    return figure.get_suptitle().replace("\n", " ")


def texts(figure):
    figure.canvas.draw()
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


EVERY = {
    "loss": lambda: plots.loss(records(4)),
    "loss_scale": lambda: plots.loss_scale(records(), growth_interval=20),
    "loss_scale, fp32": lambda: plots.loss_scale(records(scaled=False)),
    "throughput": lambda: plots.throughput(records()),
    "summary": lambda: plots.summary(records(8)),
    "summary, fp32": lambda: plots.summary(records(scaled=False)),
    "compare": lambda: plots.compare({"one rank": records(1), "two ranks": records(2)}),
    "prediction": lambda: plots.prediction({"step": (20, 31), "all-reduce": (0.5, 4)}, unit="ms"),
}


@pytest.fixture(params=EVERY)
def figure(request):
    return EVERY[request.param]()


# ---- what every figure has


def test_every_figure_says_its_kind_its_axes_and_its_title(figure):
    alt = figure.alternative_text
    assert re.match(r"(Line chart|Dot chart|\d line charts, one below the other)\. Across: ", alt)
    assert title(figure) in alt
    for axes in figure.axes:
        assert axes.get_ylabel() in alt
    assert figure.axes[-1].get_xlabel() in alt


def test_every_axis_has_a_label_with_its_unit(figure):
    assert figure.axes[-1].get_xlabel() in ("optimizer step", "ms")
    labels = [axes.get_ylabel() for axes in figure.axes]
    units = ("(per sample)", "(factor)", "samples/s", "")
    assert all(any(unit in label for unit in units) for label in labels)
    if "Dot chart" not in figure.alternative_text:
        assert all(labels)


def test_every_figure_looks_as_the_style_file_says(figure):
    style = matplotlib.rc_params_from_file(drawing.STYLE, use_default_template=False)
    assert style["font.size"] >= 11
    assert figure.get_size_inches()[0] == style["figure.figsize"][0] <= 8
    assert figure.get_dpi() == style["figure.dpi"]
    assert figure.get_facecolor() == (1, 1, 1, 1)
    for text in texts(figure):
        if text.get_text() == figure.get_suptitle():
            assert text.get_fontsize() == style["figure.titlesize"]
        else:
            assert text.get_fontsize() == style["font.size"]
        assert text.get_fontfamily() == style["font.family"]


def test_nothing_is_cut_off_at_the_edge(figure):
    pixels = np.asarray(Image.open(io.BytesIO(figure.png())).convert("RGB"))
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert (edge == 255).all()


def test_a_title_can_be_given_and_the_numbers_stay_in_the_alternative_text():
    said = (
        "Without averaging, the ranks' weights drift apart, and more so the longer they train alone"
    )
    figure = plots.loss(records(), title=said)
    assert title(figure) == said and "\n" in figure.get_suptitle()
    test_nothing_is_cut_off_at_the_edge(figure)
    assert said in figure.alternative_text and "The loss fell from" in figure.alternative_text


@pytest.mark.parametrize("name", EVERY)
def test_the_same_records_give_the_same_bytes(name, monkeypatch):
    first = EVERY[name]().png()
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 30)  # of the student's notebook
    monkeypatch.setitem(matplotlib.rcParams, "figure.dpi", 50)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "yellow")
    figure = EVERY[name]()
    assert figure.png() == first
    assert Image.open(io.BytesIO(first)).size == tuple(int(size) for size in figure.bbox.size)


def test_the_png_holds_the_picture_and_nothing_else():
    content, at, chunks = plots.loss(records()).png(), 8, []
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        chunks.append(content[at + 4 : at + 8].decode())
        at += 12 + size
    assert set(chunks) == {"IHDR", "PLTE", "IDAT", "IEND"}  # no time, no version, no software
    assert len(content) < 50_000


def test_a_figure_is_saved_as_a_file(tmp_path):
    figure = plots.summary(records())
    figure.savefig(tmp_path / "run.png")
    figure.savefig(tmp_path / "run.svg")
    assert Image.open(tmp_path / "run.png").size == tuple(int(size) for size in figure.bbox.size)
    assert "<svg" in (tmp_path / "run.svg").read_text()


def test_pyplot_stays_unloaded():
    code = """if True:
        import sys
        from ddp_course import plots
        plots.loss([{"step": 0, "loss": 1.0}]).png()
        sys.exit("matplotlib.pyplot" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_notebook_stores_one_picture_with_alternative_text():
    made = [{"step": step, "loss": 1 / (step + 1)} for step in range(3)]
    cells = [
        f"%matplotlib inline\nfrom ddp_course import plots\nplots.loss({made}, title='a < \"b\"')",
        f"plots.show(plots.loss({made}))\nimport matplotlib.pyplot as plt\nplt.get_fignums()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    (last_value,) = notebook.cells[0].outputs
    shown, fignums = notebook.cells[1].outputs
    assert fignums.data["text/plain"] == "[]"
    for output in (last_value, shown):
        alt = output.metadata["image/png"]["alt"]
        assert alt == output.data["text/plain"] and "from 1 to 0.333 in 3 steps" in alt
        # what JupyterLab shows: it prefers HTML, and ignores the metadata of image/png
        tag = r'<img alt="([^"]*)" style="max-width: 100%" src="data:image/png;base64,(.*)">'
        picture = re.fullmatch(tag, output.data["text/html"])
        assert html.unescape(picture[1]) == alt
        assert picture[2] == output.data["image/png"].strip()


# ---- loss


def test_the_mean_is_the_reported_loss_black_and_thick():
    made = records(4)
    (axes,) = plots.loss(made).axes
    (mean,) = curves(axes, "black")
    assert list(mean.get_xdata()) == list(range(60))
    assert list(mean.get_ydata()) == of_rank(made, 0, "loss")
    (thin,) = curves(axes, plots.rank_style(0)["color"])
    assert mean.get_linewidth() > 1.5 * thin.get_linewidth()
    assert mean.get_zorder() > thin.get_zorder()


def test_each_rank_has_its_own_line_hue_marker_and_label():
    made = records(8)
    figure = plots.loss(made)
    (axes,) = figure.axes
    written = [text.get_text() for text in axes.texts]
    assert sorted(written) == ["mean", *[f"rank {rank}" for rank in range(8)]]
    looks = set()
    for rank in range(8):
        look = plots.rank_style(rank)
        (line,) = curves(axes, look["color"])
        assert list(line.get_ydata()) == of_rank(made, rank, "local_loss")
        assert line.get_marker() == look["marker"]
        looks |= {look["color"], look["marker"]}
    assert len(looks) == 16 and not axes.get_legend()
    last = [of_rank(made, rank, "local_loss")[-1] for rank in range(8)]
    assert f"end at {min(last):.3g} to {max(last):.3g}" in figure.alternative_text


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spread", [0, 1e-6, 0.2, 50])
def test_labels_at_the_lines_ends_do_not_overlap(ranks, spread):
    figure = plots.loss(records(ranks, spread=spread))
    (axes,) = figure.axes
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == ranks + 1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert all(box.x0 > axes.bbox.x1 for box in boxes)


def test_labels_stand_in_the_order_of_the_ends_and_beside_them_when_there_is_room():
    made = [{"rank": rank, "step": 0, "loss": 2.0, "local_loss": 1.0 + rank} for rank in range(3)]
    (axes,) = plots.loss(made).axes
    for text in axes.texts:
        value = {"rank 0": 1, "rank 1": 2, "rank 2": 3}.get(text.get_text())
        if value in (1, 3):  # rank 1 lies on the mean
            height = axes.transAxes.transform((0, text.get_position()[1]))[1]
            assert abs(height - axes.transData.transform((0, value))[1]) < 3


def test_the_lowest_rank_speaks_for_all_whatever_the_order_of_arrival():
    made = records(4)
    shuffled = random.Random(1).sample(made, len(made))
    assert plots.summary(shuffled).png() == plots.summary(made).png()
    only_first = [record for record in made if record["rank"] == 0]
    (mean,) = curves(plots.loss(shuffled).axes[0], "black")
    assert list(mean.get_ydata()) == of_rank(only_first, 0, "loss")


def test_a_run_is_as_good_as_its_records():
    made = records()
    assert plots.loss(SimpleNamespace(records=made)).png() == plots.loss(made).png()


def test_a_step_done_again_after_a_restart_counts_the_last_time():
    reported = [(0, 3.0), (1, 9.0), (1, 2.0), (2, 1.0)]
    made = [{"step": step, "loss": value} for step, value in reported]
    (mean,) = curves(plots.loss(made).axes[0], "black")
    assert list(mean.get_ydata()) == [3, 2, 1]


def test_one_rank_alone_is_one_line():
    (axes,) = plots.loss(records(1)).axes
    assert len(axes.lines) == 1 and not axes.texts


@pytest.mark.parametrize(
    "values, said",
    [
        ([2.0, 1.0, 0.5], "The loss fell from 2 to 0.5 in 3 steps"),
        ([0.5, 1.0, 1234.4], "The loss rose from 0.5 to 1,234 in 3 steps"),
        ([2.0, 3.0, 2.001], "The loss stayed at 2 in 3 steps"),
        ([2.0], "The loss at step 0 is 2"),
        ([2.0, math.nan, 1.0, math.inf], "in 4 steps; not finite at 2 of them, first at step 1"),
        ([math.nan, math.nan], "The loss was never finite in 2 steps"),
    ],
)
def test_the_title_says_what_the_loss_did(values, said):
    figure = plots.loss([{"step": step, "loss": value} for step, value in enumerate(values)])
    assert said in title(figure)


def test_losses_that_are_not_finite_are_gaps_with_red_crosses():
    values = [2.0, 1.0, math.nan, 0.5, math.inf, 0.2]
    figure = plots.loss([{"step": step, "loss": value} for step, value in enumerate(values)])
    (axes,) = figure.axes
    points, words = crosses(axes)
    assert [step for step, _ in points] == [2, 4] and words == ["not finite"]
    drawn = curves(axes, "black")[0].get_ydata()
    assert np.array_equal(np.isfinite(drawn), np.isfinite(values))
    assert axes.get_ylim()[1] < 3
    assert figure.png()


@pytest.mark.parametrize("lowest, scale", [(0.02, "linear"), (0.01, "log"), (0.0, "linear")])
def test_losses_over_decades_get_a_logarithmic_axis_that_says_so(lowest, scale):
    (axes,) = plots.loss([{"step": 0, "loss": 1.9}, {"step": 1, "loss": lowest}]).axes
    assert axes.get_yscale() == scale
    assert ("log axis" in axes.get_ylabel()) == (scale == "log")


def test_thousands_of_steps_are_drawn_as_means_of_blocks_that_are_named():
    made = records(2, steps=5000)
    figure = plots.loss(made)
    (axes,) = figure.axes
    (mean,) = curves(axes, "black")
    values = of_rank(made, 0, "loss")
    assert len(mean.get_ydata()) <= 400
    assert "mean of 13 steps" in axes.get_xlabel() and "mean of 13 steps" in figure.alternative_text
    assert mean.get_ydata()[0] == pytest.approx(sum(values[:13]) / 13)
    assert mean.get_xdata()[0] == 6  # the middle of steps 0 to 12
    assert title(figure).startswith(f"The loss fell from {values[0]:.3g} to {values[-1]:.3g}")
    line = curves(axes, plots.rank_style(0)["color"])[0]
    start, stride = line.get_markevery()
    assert len(line.get_ydata()[start::stride]) <= 12  # markers


def test_a_single_step_is_seen():
    figure = plots.loss([{"step": 7, "loss": 2.0}])
    (axes,) = figure.axes
    assert curves(axes, "black")[0].get_marker() == "o"
    assert [tick for tick in axes.get_xticks() if tick in range(6, 9)] == [7]


# ---- loss scale


def test_red_crosses_lie_on_the_skipped_steps():
    made = records()
    figure = plots.loss_scale(made)
    points, words = crosses(figure.axes[0])
    assert points == [(0, 2.0**16), (1, 2.0**15), (40, 2.0**14)]
    assert words == ["3 skipped"]
    assert "3 steps skipped" in title(figure)
    assert "Skipped steps: 0, 1, 40." in figure.alternative_text
    assert "from 65,536 to 8,192" in figure.alternative_text


def test_one_skipped_step_has_the_word_and_none_has_no_cross():
    assert crosses(plots.loss_scale(records(skipped=[5])).axes[0])[1] == ["skipped"]
    figure = plots.loss_scale(records(skipped=[]))
    assert crosses(figure.axes[0]) == ([], []) and "no steps skipped" in title(figure)


def test_the_scale_is_drawn_in_steps_of_powers_of_two_above_the_loss_on_the_same_steps():
    made = records()
    scale, below = plots.loss_scale(made).axes
    (line,) = curves(scale, "black")
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_ydata()) == of_rank(made, 0, "loss_scale")
    scale.figure.canvas.draw()
    assert "2^16" in [label.get_text() for label in scale.get_yticklabels()]
    assert list(curves(below, "black")[0].get_ydata()) == of_rank(made, 0, "loss")
    assert scale.get_xlim() == below.get_xlim()


def test_long_runs_keep_every_change_of_the_scale():
    made = records(1, steps=2000)
    (line,) = curves(plots.loss_scale(made).axes[0], "black")
    assert list(line.get_ydata()) == of_rank(made, 0, "loss_scale")


def test_the_growth_interval_is_an_arrow_up_to_the_step_where_the_scale_grew():
    scale = [2048.0] * 3 + [1024.0] * 25 + [2048.0] * 10
    made = records(steps=38, skipped=[2], loss_scale=scale)
    axes = plots.loss_scale(made, growth_interval=25).axes[0]
    (arrow,) = [text for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert (arrow.xy[0], arrow.xyann[0]) == (3, 28)
    assert "growth interval: 25 steps" in [text.get_text() for text in axes.texts]


def test_a_growth_interval_longer_than_the_run_says_so():
    written = [text.get_text() for text in plots.loss_scale(records(), 2000).axes[0].texts]
    assert "growth interval: 2,000 steps, not reached in this run" in written


def test_without_loss_scaling_the_title_says_so_and_the_loss_is_drawn():
    made = records(scaled=False)
    figure = plots.loss_scale(made)
    (axes,) = figure.axes
    assert title(figure) == "The loss scale stayed at 1: fp32 and bf16 need no loss scaling"
    assert list(curves(axes, "black")[0].get_ydata()) == of_rank(made, 0, "loss")
    assert "The loss fell from" in figure.alternative_text


def test_a_run_that_skips_every_step_is_called_lost():
    figure = plots.loss_scale(records(steps=30, skipped=range(30)))
    assert title(figure) == "All 30 steps were skipped: nothing was learned"
    assert figure.png()


def test_a_scale_that_collapsed_to_zero_is_drawn():
    made = records(1, steps=3, skipped=range(3), loss_scale=[1e-30, 1e-40, 0.0])
    assert plots.loss_scale(made).png() and plots.summary(made).png()


# ---- throughput, summary


def test_the_median_leaves_out_the_warm_up_and_the_axis_starts_at_zero():
    speed = [10.0] * 5 + [100.0, 300.0, 200.0]
    made = records(2, steps=8, samples_per_s=speed)
    figure = plots.throughput(made, warmup=5)
    (axes,) = figure.axes
    assert title(figure) == "Median 200 samples/s over all ranks, after 5 steps of warm-up"
    assert [text.get_text() for text in axes.texts] == ["warm-up", "median 200"]
    (median,) = curves(axes, "black")
    assert list(median.get_xdata()) == [5, 7] and set(median.get_ydata()) == {200}
    assert list(curves(axes, drawing.DIM)[0].get_ydata()) == speed
    (grey,) = axes.patches
    assert (grey.get_x(), grey.get_x() + grey.get_width()) == (-0.5, 4.5)
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 300
    assert "Median 10 samples" in title(plots.throughput(made, warmup=0))


@pytest.mark.parametrize("steps, warmup", [(1, 0), (3, 1), (9, 1), (60, 6)])
def test_a_tenth_of_the_steps_is_warm_up_by_default(steps, warmup):
    said = title(plots.throughput(records(steps=steps)))
    assert said.endswith(f"after {warmup} step{'s' * (warmup != 1)} of warm-up") == (warmup > 0)


def test_summary_shows_loss_scale_and_throughput_on_the_same_steps():
    made = records(4)
    figure = plots.summary(made)
    loss, scale, speed = figure.axes
    assert list(curves(loss, "black")[0].get_ydata()) == of_rank(made, 0, "loss")
    assert [step for step, _ in crosses(scale)[0]] == SKIPPED
    assert list(curves(speed, drawing.DIM)[0].get_ydata()) == of_rank(made, 0, "samples_per_s")
    assert loss.get_xlim() == scale.get_xlim() == speed.get_xlim()
    for said in ("The loss fell from", "3 steps skipped", "Median"):
        assert said in figure.alternative_text


def test_summary_without_loss_scaling_has_two_panels_and_says_so():
    figure = plots.summary(records(scaled=False))
    assert len(figure.axes) == 2
    assert title(figure).endswith("without loss scaling")


# ---- compare


def test_compare_draws_every_run_under_its_name():
    one, two = records(1, seed=1), records(2, steps=40, seed=2)
    figure = plots.compare({"one rank": one, "two ranks": two})
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    drawn = {name: list(lines[name].get_ydata()) for name in ("one rank", "two ranks")}
    assert drawn == {"one rank": of_rank(one, 0, "loss"), "two ranks": of_rank(two, 0, "loss")}
    assert sorted(text.get_text() for text in axes.texts) == ["one rank", "two ranks"]
    gap = max(abs(a - b) for a, b in zip(drawn["one rank"], drawn["two ranks"], strict=False))
    assert f"at most {gap:.3g} apart at the same step" in title(figure)
    assert (
        f"{drawn['one rank'][-1]:.3g} (one rank), {drawn['two ranks'][-1]:.3g} (two ranks)"
        in title(figure)
    )


def test_equal_runs_are_both_seen():
    (axes,) = plots.compare({"a": records(), "b": records()}).axes
    first, second = (line for line in axes.lines if line.get_label() in ("a", "b"))
    assert first.get_linewidth() > 2 * second.get_linewidth()
    assert first.get_zorder() <= second.get_zorder()  # and it was drawn first
    assert first.get_color() != second.get_color()


def test_compare_by_samples_counts_the_samples_of_all_ranks():
    (axes,) = plots.compare({"one": records(1), "two": records(2)}, x="samples").axes
    seen = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert seen["one"] == [32 * (step + 1) for step in range(60)]
    assert seen["two"] == [64 * (step + 1) for step in range(60)]
    assert axes.get_xlabel() == "samples seen, all ranks"


def test_compare_by_time_uses_the_seconds_since_launch():
    (axes,) = plots.compare({"two": records(2)}, x="time").axes
    assert list(axes.lines[0].get_xdata()) == list(range(60))
    assert axes.get_xlabel() == "seconds since launch"


def test_compare_of_throughput_gives_medians_from_zero():
    slow = records(1, steps=3, samples_per_s=[1.0, 100.0, 102.0])
    fast = records(2, steps=3, samples_per_s=[1.0, 200.0, 900.0])
    figure = plots.compare({"slow": slow, "fast": fast}, quantity="samples_per_s")
    assert title(figure) == "Samples/s, median: 100 (slow), 200 (fast)"
    assert figure.axes[0].get_ylim()[0] == 0


def test_compare_of_loss_scales_is_in_steps_of_powers_of_two():
    (axes,) = plots.compare({"a": records(), "b": records(1)}, quantity="loss_scale").axes
    drawn = [line for line in axes.lines if line.get_label() in ("a", "b")]
    assert [line.get_drawstyle() for line in drawn] == ["steps-post"] * 2
    assert axes.get_yscale() == "log" and "loss scale" in axes.get_ylabel()


def test_a_precision_has_the_same_line_in_any_company():
    def looks(*names):
        (axes,) = plots.compare({name: records(seed=len(name)) for name in names}).axes
        lines = {line.get_label(): line for line in axes.lines}
        return {name: (lines[name].get_linestyle(), lines[name].get_linewidth()) for name in names}

    all_three = looks("fp32", "bf16", "fp16")
    assert len(set(all_three.values())) == 3
    assert looks("fp16")["fp16"] == looks("other", "fp16")["fp16"] == all_three["fp16"]
    assert len(set(looks("other", "fp32", "another", "bf16").values())) == 4


# ---- prediction


def test_predictions_are_open_measurements_filled_and_the_difference_is_beside():
    figure = plots.prediction({"step": (20, 31), "wait": (8, 2), "sync": (1, 4.0)}, unit="ms")
    (axes,) = figure.axes
    dots = {}
    for line in axes.lines:
        if line.get_marker() == "o":
            (point,) = line.get_xydata().tolist()
            dots.setdefault(to_hex(line.get_markerfacecolor()), []).append(point)
    assert dots["#ffffff"] == [[20, 0], [8, 1], [1, 2]]
    assert dots["#000000"] == [[31, 0], [2, 1], [4, 2]]
    written = {text.get_text() for text in axes.texts}
    values = {"20", "31", "8", "2", "1", "4"}
    said = ("55 % above the prediction", "25 % of the prediction", "4 times the prediction")
    assert {text.replace("\n", " ") for text in written} == {
        "predicted",
        "measured",
        *values,
        *said,
    }
    bold = [text.get_text() for text in axes.texts if text.get_fontweight() == "bold"]
    assert bold == ["31", "2", "4"]  # what was measured
    assert axes.get_xlim()[0] <= 0 and axes.get_xlabel() == "ms"
    assert "step: predicted 20 ms, measured 31 ms (55 % above the prediction)." in (
        figure.alternative_text
    )
    assert title(figure) == "0 of 3 predictions came within 10 % of the measurement"


@pytest.mark.parametrize(
    "predicted, measured, difference",
    [
        (2, 2, "as predicted"),
        (100, 91, "9 % below the prediction"),
        (1000, 1001, "less than 1 % above the prediction"),
        (0, 3, "3 above the prediction"),
        (3, 0, "3 below the prediction"),
        (1, 4000, "4,000 times the prediction"),
        (1, 3.27, "3.27 times the prediction"),
        (8, 2, "25 % of the prediction"),
        (-1, -3, "2 below the prediction"),
    ],
)
def test_the_difference_is_said_in_words_and_each_value_stands_at_its_dot(
    predicted, measured, difference
):
    figure = plots.prediction({"what": (predicted, measured)})
    assert title(figure).endswith(f"({difference})")
    at = {text.get_text(): text.xy[0] for text in figure.axes[0].texts if hasattr(text, "xy")}
    assert at[drawing.say(predicted)] == predicted and at[drawing.say(measured)] == measured
    test_nothing_is_cut_off_at_the_edge(figure)


# ---- what goes wrong is said in one line


@pytest.mark.parametrize(
    "draw, missing",
    [
        (plots.loss, "loss"),
        (plots.loss_scale, "loss_scale"),
        (plots.loss_scale, "skipped"),
        (plots.throughput, "samples_per_s"),
        (plots.summary, "loss"),
        (lambda made: plots.compare({"a": made}, quantity="accuracy"), "accuracy"),
        (lambda made: plots.compare({"a": made}, x="samples"), "samples"),
    ],
)
def test_a_missing_key_is_named_with_the_way_to_report_it(draw, missing):
    made = [{k: v for k, v in record.items() if k != missing} for record in records()]
    with pytest.raises(ValueError) as error:
        draw(made)
    assert f'"{missing}": call report(step=step, {missing}=...)' in str(error.value)
    assert "\n" not in str(error.value)


def test_records_without_a_step_are_told_so():
    with pytest.raises(ValueError, match='no record has "step" and "loss"'):
        plots.loss([{"rank": 0, "loss": 1.0}])


def test_other_records_in_between_do_no_harm():
    made = records()
    mixed = [{"rank": 0, "accuracy": 0.9}, *made, {"rank": 1, "step": 60, "accuracy": 0.9}]
    assert plots.summary(mixed).png() == plots.summary(made).png()


def test_a_local_loss_reported_as_the_loss_is_caught():
    made = [{"rank": rank, "step": 3, "loss": 1.0 + rank / 4} for rank in (1, 0)]
    said = r'"loss" at step 3 is 1 on rank 0 but 1\.25 on rank 1: all-reduce it .* local_loss'
    with pytest.raises(ValueError, match=said):
        plots.loss(made)


@pytest.mark.parametrize(
    "draw, error, said",
    [
        (lambda: plots.loss([]), ValueError, "no records: call report"),
        (lambda: plots.loss("run"), TypeError, "a Run or a list of records"),
        (lambda: plots.loss([1, 2]), TypeError, "a Run or a list of records"),
        (lambda: plots.loss([{"step": 0, "loss": "low"}]), ValueError, '"loss" at step 0 must be'),
        (lambda: plots.throughput(records(steps=3), warmup=3), ValueError, "from 0 to 2"),
        (lambda: plots.throughput(records(), warmup=-1), ValueError, "from 0 to 59"),
        (lambda: plots.loss_scale(records(), growth_interval=0), ValueError, "growth_interval"),
        (lambda: plots.compare([records()]), TypeError, '{"name": run'),
        (lambda: plots.compare({n: records() for n in "abcde"}), TypeError, "one to 4 runs"),
        (lambda: plots.compare({"a": records()}, x="epoch"), ValueError, "x must be"),
        (lambda: plots.prediction({}), TypeError, "predicted, measured"),
        (lambda: plots.prediction({"a": 3}), TypeError, "a: give"),
        (lambda: plots.prediction({"a": (None, 3)}), ValueError, "a: predicted must be a number"),
        (lambda: plots.prediction({"a": (1, math.nan)}), ValueError, "a: measured must be finite"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(draw, error, said):
    with pytest.raises(error, match=re.escape(said)) as caught:
        draw()
    assert "\n" not in str(caught.value)


# ---- colours

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB
BLIND = {
    "nobody": np.eye(3),
    "protan": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deutan": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritan": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def seen_as(color, matrix):
    """CIELAB coordinates of a colour as these eyes see it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.412, 0.358, 0.180], [0.213, 0.715, 0.072], [0.019, 0.119, 0.950]])
    xyz = to_xyz @ np.clip(np.array(matrix) @ linear, 0, 1) / to_xyz.sum(axis=1)
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eyes", BLIND)
def test_hues_stay_apart_for_colour_blind_eyes(eyes):
    ranks = [plots.rank_style(rank)["color"] for rank in range(8)]
    timeline = [*drawing.COMPUTE.values(), drawing.COMMUNICATION]
    for colors in ([*ranks, "black", "white"], timeline, drawing.MEMORY.values()):
        for a, b in itertools.combinations(colors, 2):
            apart = np.linalg.norm(seen_as(a, BLIND[eyes]) - seen_as(b, BLIND[eyes]))
            assert apart > 12, (a, b, apart)


def test_no_rank_has_the_colour_of_another_meaning():
    ranks = {plots.rank_style(rank)["color"] for rank in range(8)}
    others = {drawing.COMMUNICATION, drawing.SKIPPED["color"], "black"}
    assert not ranks & (others | set(drawing.COMPUTE.values()) | set(drawing.MEMORY.values()))
