"""Honest times on real ranks, the arithmetic of scaling, and its figures."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, models, plots, scaling, trace
from ddp_course.collectives import Cost
from ddp_course.network import SlowLink, mbit

# ---- times


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_all_ranks_return_the_slowest_ranks_time_of_each_step_without_warm_up(nproc):
    def worker():
        rank, calls = dist.get_rank(), []

        def step():
            calls.append(1)
            slow = rank == len(calls) % dist.get_world_size()  # ranks take turns
            time.sleep(1.0 if len(calls) == 1 else 0.05 if slow else 0.0)

        return scaling.step_times(step, steps=4, warmup=1), len(calls)

    values = launch(worker, nproc=nproc).values
    assert len({str(times) for times, _ in values}) == 1
    times, calls = values[0]
    assert calls == 5 and len(times) == 4
    assert all(0.05 <= seconds < 1 for seconds in times)  # no rank was slow in all of them


def test_what_ranks_wait_for_one_another_before_a_step_is_not_timed():
    def worker():
        time.sleep(0.5 * dist.get_rank())  # late
        return scaling.step_times(dist.barrier, steps=1, warmup=0)[0]

    assert max(launch(worker).values) < 0.25


def test_without_a_process_group_it_times_this_process():
    assert len(scaling.step_times(lambda: None, steps=3)) == 3
    with pytest.raises(ValueError, match="steps=0"):
        scaling.step_times(lambda: None, steps=0)
    with pytest.raises(ValueError, match="warmup=-1"):
        scaling.step_times(lambda: None, warmup=-1)


# ---- arithmetic


def test_efficiency_is_1_at_best_for_both_kinds():
    assert scaling.efficiency(8.0, 2.0, 4, "strong") == 1  # a quarter of the time
    assert scaling.efficiency(8.0, 4.0, 4, "strong") == 0.5
    assert scaling.efficiency(8.0, 8.0, 4, "weak") == 1  # the same time for four times the work
    assert scaling.efficiency(8.0, 16.0, 4, "weak") == 0.5
    with pytest.raises(ValueError, match='"strong" .* or "weak"'):
        scaling.efficiency(1, 1, 2, "other")


def test_samples_of_all_ranks_count_once():
    assert scaling.samples_per_second([32, 32, 20], 0.5) == 168


def test_amdahls_law_and_its_inverse():
    assert scaling.amdahl(0, 64) == pytest.approx(64)
    assert scaling.amdahl(1, 64) == pytest.approx(1)
    assert scaling.amdahl(0.05, 10**9) == pytest.approx(20)
    for serial in (0.0, 0.05, 0.5, 1.0):
        for ranks in (2, 8, 100):
            speedup = scaling.amdahl(serial, ranks)
            assert scaling.serial_share(speedup, ranks) == pytest.approx(serial)
    with pytest.raises(ValueError, match="measure two or more"):
        scaling.serial_share(1, 1)


def test_a_predicted_step_by_hand():
    cost = Cost(alpha=0.001, beta=1e-9)
    one = scaling.predict(0.010, 0.020, [4_000_000], cost.seconds, rest=0.005)
    assert (one.wire, one.waiting) == pytest.approx((0.005, 0.005))
    assert one.seconds == pytest.approx(0.040) and one.share == pytest.approx(1 / 8)
    # Ready at 20 and 30 ms; each takes 3 ms: the first is hidden.
    two = scaling.predict(0.010, 0.020, [2_000_000] * 2, cost.seconds)
    assert two.waiting == pytest.approx(0.003) and two.wire == pytest.approx(0.006)
    assert two.share == pytest.approx(0.003 / 0.033)
    # A slow link: the second waits for the first, from 20 to 420 ms, then 820 ms.
    slow = scaling.predict(0.010, 0.020, [2_000_000] * 2, lambda nbytes: nbytes / 5e6)
    assert slow.seconds == pytest.approx(0.820)
    assert scaling.predict(0.01, 0.02, [8], lambda nbytes: 0.0).share == 0


def test_a_step_over_a_slow_link_takes_what_was_predicted():
    def worker():
        torch.set_num_threads(1)
        link = SlowLink(mbit(20), latency=0.02)
        model = DistributedDataParallel(models.MLP(width=128), bucket_cap_mb=0.03)
        model.register_comm_hook(None, trace.recorded(link))
        x, y = torch.randn(8, 64), torch.randint(10, (8,))

        def step():
            trace.clear()
            F.cross_entropy(model(x), y).backward()

        seconds = min(scaling.step_times(step, steps=3))
        sizes = [span["bytes"] for span in trace.spans() if span["name"] == "all-reduce"]
        return seconds, sizes, [link.seconds(size) for size in sizes]

    seconds, sizes, each = launch(worker).values[0]
    predicted = scaling.predict(0, 0, sizes, dict(zip(sizes, each, strict=True)).get)
    assert len(sizes) > 1 and predicted.wire == pytest.approx(sum(each))
    # No message arrives early, and all else takes a few milliseconds beside 0.1 s and more.
    assert 0.95 * predicted.seconds < seconds < 3 * predicted.seconds


# ---- figures

SPEEDS = [mbit(10_000), mbit(1000), mbit(100)]
FIGURES = {
    "speedup": lambda: plots.speedup({"MLP": {1: 1.0, 2: 0.5}}, {"predicted": {1: 1.0, 2: 1.5}}),
    "many ranks": lambda: plots.speedup({}, {"weak": {1: 1.0, 8: 7.5, 64: 50.0}}),
    "slow link": lambda: plots.slow_link(
        {"plain": dict(zip(SPEEDS, (0.01, 0.03, 0.2), strict=True))},
        {"predicted": dict(zip(SPEEDS, (0.01, 0.02, 0.19), strict=True))},
    ),
    "bucket sweep": lambda: plots.bucket_sweep({"measured": {1: 0.05, 6: 0.04, 13: 0.09}}),
}
TOLD = {
    "speedup": "MLP: 1 with 1, 0.5 with 2",
    "many ranks": "50 with 64",
    "slow link": "plain: 10 ms at 10 Gbit/s, 200 ms at 100 Mbit/s",
    "bucket sweep": "measured: 50 ms at 1, 90 ms at 13",
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_its_numbers_and_names_its_axes(name):
    figure = FIGURES[name]()
    assert TOLD[name] in figure.alternative_text
    (axes,) = figure.axes
    assert axes.get_xlabel() and axes.get_ylabel()
    assert figure.png()[:4] == b"\x89PNG"


def test_the_efficiency_stands_at_the_end_of_each_line():
    figure = plots.speedup({"MLP": {1: 1.0, 2: 0.5}})
    assert "25% efficient" in " ".join(text.get_text() for text in figure.axes[0].texts).replace(
        "\n", " "
    )


@pytest.mark.parametrize("scale, most", [("linear", 8), ("log", 16)])
def test_many_ranks_are_drawn_on_logarithmic_axes(scale, most):
    (axes,) = plots.speedup({"a": {1: 1.0, most: 3.0}}).axes
    assert axes.get_xscale() == axes.get_yscale() == scale


def test_the_slow_end_of_a_link_is_at_the_right():
    (axes,) = FIGURES["slow link"]().axes
    left, right = axes.get_xlim()
    assert left > right


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="ranks and speed-ups"):
        plots.speedup({})
    with pytest.raises(TypeError, match="ranks: speed-up"):
        plots.speedup({"a": [1, 2]})
    with pytest.raises(ValueError, match="above 0"):
        plots.speedup({"a": {1: 0.0}})
    for draw in (plots.slow_link, plots.bucket_sweep):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw({})
        with pytest.raises(TypeError, match="value: seconds"):
            draw({"a": [1]})
        with pytest.raises(ValueError, match="must be a number"):
            draw({"a": {1: "x"}})
