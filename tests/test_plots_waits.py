"""Who waits where: read back from what was drawn of a real hang."""

import pytest
import torch
import torch.distributed as dist
from matplotlib.patches import Rectangle

from ddp_course import HangError, launch, plots


def hang_of(worker) -> HangError:
    with pytest.raises(HangError) as caught:
        launch(worker, nproc=3, timeout=60)
    return caught.value


def boxes(figure):
    """{(rank, column): (name, waits)} and the ranks with a cross."""
    (axes,) = figure.axes
    drawn = {(p.get_y() + 0.42, p.get_x() + p.get_width() / 2): p for p in axes.patches
             if isinstance(p, Rectangle)}  # fmt: skip
    found = {}
    for (y, x), box in drawn.items():
        name = next(
            t.get_text() for t in axes.texts
            if abs(t.get_position()[1] - y) < 0.1 and abs(t.get_position()[0] - x) < 0.2
        )  # fmt: skip
        found[round(y - 0.5), round((x - 1.6) / 3.2)] = (name, box.get_hatch() is not None)
    crosses = [round(line.get_ydata()[0] - 0.5) for line in axes.lines
               if line.get_marker() == "X"]  # fmt: skip
    return found, crosses


def test_the_rank_that_never_came_has_a_cross_and_the_others_wait():
    def worker():
        for _ in range(2 if dist.get_rank() == 1 else 3):
            dist.all_reduce(torch.ones(4))

    found, crosses = boxes(plots.waits(hang_of(worker)))
    done = {(rank, column): ("all_reduce", False) for rank in range(3) for column in (0, 1)}
    assert found == done | {(rank, 2): ("all_reduce", True) for rank in (0, 2)}
    assert crosses == [1]


def test_of_many_collectives_the_last_are_shown_and_what_differs_has_its_own_name():
    def worker():
        for _ in range(5):
            dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 2:
            dist.barrier()
        dist.broadcast(torch.ones(4), src=0)
        dist.barrier()

    figure = plots.waits(hang_of(worker), "A title")
    found, crosses = boxes(figure)
    names = [
        found[rank, column][0] for rank in (0, 2) for column in (2, 3) if (rank, column) in found
    ]
    assert "broadcast" in names and "barrier" in names
    assert max(column for _, column in found) == 3
    assert figure.get_suptitle() == "A title"


def test_its_text_says_who_waits_and_who_never_came():
    def worker():
        if dist.get_rank() != 0:
            dist.all_reduce(torch.ones(4))

    told = plots.waits(hang_of(worker), "Rank 0 is away").alternative_text
    assert "rank 0 has finished 0 of those shown and never called number 1" in told
    assert "rank 2 has finished 0 of those shown and waits in all_reduce(float32[4])" in told


def test_what_is_no_error_of_a_run_is_refused():
    with pytest.raises(TypeError, match="draws a HangError or a RankError"):
        plots.waits(ValueError("x"))
