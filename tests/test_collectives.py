"""The ring all-reduce by hand on real ranks, and the arithmetic of what a collective costs."""

import math
import random

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives, launch
from ddp_course.process_group import this_rank

SIZES = (0, 1, 2, 3, 5, 17, 1000)
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8)


def shares(size, dtype, ranks):
    """What each rank brings: whole numbers, so that every order of adding gives the same sum."""
    return [((torch.arange(size) * (rank + 3)) % 7 + rank).to(dtype) for rank in range(ranks)]


# ---- the ring


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_every_rank_gets_the_sum_for_any_size_and_type(nproc):
    def worker():
        rank, wrong = dist.get_rank(), []
        for size in SIZES:
            for dtype in TYPES:
                mine = shares(size, dtype, nproc)
                x = mine[rank].clone()
                assert collectives.ring_all_reduce(x) is None
                if not torch.equal(x, sum(mine[1:], mine[0])):
                    wrong.append((size, dtype))
        return wrong

    assert launch(worker, nproc=nproc).values == [[]] * nproc


def test_it_works_in_place_on_parameters_and_keeps_the_shape():
    def worker():
        weight = torch.nn.Parameter(torch.full((3, 5, 2), 1.0 + dist.get_rank()))
        before = weight.data_ptr()
        collectives.ring_all_reduce(weight)
        assert weight.data_ptr() == before and weight.requires_grad
        return weight.detach()

    for value in launch(worker, nproc=3).values:
        assert torch.equal(value, torch.full((3, 5, 2), 6.0))


def test_the_sum_is_the_same_on_all_ranks_bit_for_bit_and_the_right_one():
    def worker():
        torch.manual_seed(dist.get_rank())
        x = torch.randn(1003)
        y = x.clone()
        collectives.ring_all_reduce(x)
        dist.all_reduce(y)
        return x, (x - y).abs().max().item()

    (first, gap), *others = launch(worker, nproc=4).values
    assert gap < 1e-5  # float32 rounding of a sum of four numbers near 1
    assert all(torch.equal(first, x) for x, _ in others)


def test_each_rank_sends_what_the_formula_says():
    def worker(size):
        x = torch.ones(size)
        return list(collectives.ring_steps(x))

    for nproc in (2, 3, 4):
        size = 5 * 12  # every chunk as long as the others
        for rank, steps in enumerate(launch(worker, size, nproc=nproc).values):
            assert [step.number for step in steps] == list(range(1, 2 * nproc - 1))
            assert sum(step.sent_bytes for step in steps) == 2 * (nproc - 1) / nproc * 4 * size
            half = ["reduce-scatter"] * (nproc - 1) + ["all-gather"] * (nproc - 1)
            assert [step.phase for step in steps] == half
            assert all((step.sent - step.received) % nproc == 1 for step in steps)
            assert steps[0].sent == rank


def test_after_each_step_a_chunk_holds_what_the_ring_has_brought_so_far():
    def worker():
        x = torch.full((4,), 10.0 ** dist.get_rank())
        return [(step, x.tolist()) for step in collectives.ring_steps(x)]

    by_rank = launch(worker, nproc=4).values
    for rank, steps in enumerate(by_rank):
        for step, chunks in steps:
            if step.number < 4:  # this rank and the `number` ranks on its left
                added = {(rank - back) % 4 for back in range(step.number + 1)}
                assert chunks[step.received] == sum(10.0**r for r in added)
            else:
                assert chunks[step.received] == 1111
        assert chunks == [1111] * 4


@pytest.mark.parametrize(
    "wrong, error, said",
    [
        (lambda: [1.0, 2.0], TypeError, "adds up a tensor, not list"),
        (lambda: torch.ones(3, 4).t(), ValueError, "x.contiguous()"),
        (lambda: torch.ones(3, dtype=torch.bool), TypeError, "x.int()"),
    ],
)
def test_what_cannot_be_added_is_refused_before_anything_is_sent(wrong, error, said):
    with pytest.raises(error) as caught:
        collectives.ring_all_reduce(wrong())
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ---- measuring


def test_a_time_is_the_median_of_the_slowest_rank_and_equal_on_all():
    def worker():
        naps = iter([9.0, 9.0, 0.1, 0.3, 0.2] if dist.get_rank() else [9.0, 9.0, 0.0, 0.0, 0.25])
        clock = [0.0]
        collectives.time.perf_counter = lambda: clock[0]
        seen = []

        def collective(x):
            seen.append((x.nbytes, x.sum().item()))
            x.mul_(3)
            clock[0] += next(naps)

        return collectives.seconds_of(collective, 40, repeats=3, warmup=2), seen

    values = launch(worker).values
    assert [time for time, _ in values] == pytest.approx([0.25, 0.25])  # of 0.1, 0.3 and 0.25
    assert [seen for _, seen in values] == [[(40, 10.0)] * 5] * 2


@pytest.mark.parametrize("how", [{"nbytes": 3}, {"repeats": 0}, {"warmup": -1}])
def test_a_measurement_of_nothing_is_refused(how):
    with pytest.raises(ValueError, match="at least 4, 1 and 0"):
        collectives.seconds_of(print, **{"nbytes": 8} | how)


# ---- the model


def test_a_fit_finds_the_numbers_that_made_the_times():
    points = [(4.0**k, 3e-4 + 7e-10 * 4.0**k) for k in range(3, 14)]
    cost = collectives.fit(points)
    assert cost.alpha == pytest.approx(3e-4) and cost.beta == pytest.approx(7e-10)
    assert cost.crossover == pytest.approx(3e-4 / 7e-10)
    assert cost.seconds(1e6) == pytest.approx(3e-4 + 7e-4)


def test_small_sizes_count_as_much_as_large_ones():
    dice = random.Random(0)
    points = []
    for power in range(4, 14):
        seconds = 3e-4 + 7e-10 * 4.0**power
        points += [(4.0**power, seconds * (1 + 0.1 * dice.uniform(-1, 1))) for _ in range(5)]
    cost = collectives.fit(points)  # 10 % of the largest time is a hundred times α
    assert cost.alpha == pytest.approx(3e-4, rel=0.1) and cost.beta == pytest.approx(7e-10, rel=0.1)


def test_a_fit_has_no_negative_part():
    falling = collectives.fit([(1e3, 2e-3), (1e6, 1e-3)])
    assert falling.beta == 0 and falling.crossover == math.inf
    assert 1e-3 <= falling.alpha <= 2e-3
    steep = collectives.fit([(1e3, 1e-6), (1e6, 1e-2)])
    assert steep.alpha == 0 and steep.beta > 0


@pytest.mark.parametrize("points", [[(1, 1.0)], [(1, 1.0), (1, 2.0)], [(1, 0.0), (2, 1.0)]])
def test_a_fit_to_too_little_is_refused(points):
    with pytest.raises(ValueError, match="two sizes at least"):
        collectives.fit(points)


def test_bandwidths_are_those_of_nccl_tests():
    assert collectives.algorithm_bandwidth(1e9, 0.5) == 2e9
    assert collectives.bus_bandwidth(1e9, 0.5, 2) == 2e9
    assert collectives.bus_bandwidth(1e9, 0.5, 8) == 2e9 * 14 / 8
    assert collectives.bus_bandwidth(1e9, 0.5, 1) == 0


@pytest.mark.gpu(2)
def test_the_ring_runs_on_gpus_over_nccl():
    def worker():
        x = torch.full((1001,), float(dist.get_rank() + 1), device=this_rank().device)
        collectives.ring_all_reduce(x)
        return x

    run = launch(worker)
    assert run.backend == "nccl"
    assert all(torch.equal(x, torch.full((1001,), 3.0)) for x in run.values)
