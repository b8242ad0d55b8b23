"""Runs in the background: the notebook stays free, and can stop, pause, slow and steer them."""

import itertools
import os
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import CellError, Kernel, gone

from ddp_course import RankError, dials, launch, report
from ddp_course.errors import Stopped


def steps(until=None):
    """Report the number of the step, and dials, for ever or `until` a step."""
    for step in itertools.count() if until is None else range(until):
        knobs = dials(learning_rate=0.5, loss_scale=8)
        dist.all_reduce(torch.ones(1))
        report(step=step, pid=os.getpid(), **vars(knobs))
    return step


class Reports:
    """An `on_record` that waits for a record."""

    def __init__(self):
        self.seen, self.changed = [], threading.Condition()

    def __call__(self, record):
        with self.changed:
            self.seen.append(record)
            self.changed.notify_all()

    def wait_for(self, condition, seconds=60):
        """Return the records after those seen before, up to the first that fits."""
        start = len(self.seen)
        with self.changed:
            assert self.changed.wait_for(
                lambda: any(condition(record) for record in self.seen[start:]), seconds
            )
            return self.seen[start:]


def begin(worker=steps, *args, **options):
    reports = Reports()
    run = launch(worker, *args, wait=False, on_record=reports, timeout=120, **options)
    return run, reports


def processes(reports, nproc=2):
    reports.wait_for(lambda record: record["rank"] == nproc - 1)
    reports.wait_for(lambda record: record["rank"] == 0)
    return [psutil.Process(pid) for pid in {record["pid"] for record in reports.seen}]


def test_it_returns_at_once_and_the_result_comes_later():
    run, reports = begin(steps, 30)
    assert run.running and "Background run of 2 rank(s)" in repr(run)
    done = run.wait()
    assert done.values == [29, 29] and len(done.records) == 60 == len(reports.seen)
    assert not run.running and run.state == "done"


def test_wait_gives_up_and_the_run_goes_on():
    run, reports = begin()
    with pytest.raises(TimeoutError, match="the run goes on"):
        run.wait(0.01)
    reports.wait_for(lambda record: record["step"] > 3)
    run.stop()


def test_stop_leaves_no_process():
    run, reports = begin()
    ranks = processes(reports)
    run.stop()
    assert gone(ranks, timeout=0.1) and run.state == "stopped"
    with pytest.raises(Stopped):
        run.wait()
    run.stop()  # what is over is left alone


def test_the_end_of_a_block_stops_it():
    with begin()[0] as run:
        assert run.running
    assert not run.running


def test_the_next_run_stops_the_one_before():
    first, reports = begin()
    ranks = processes(reports)
    second, _ = begin(steps, 3)
    assert first.state == "stopped" and gone(ranks, timeout=0.1)
    assert second.wait().values == [2, 2]


def test_paused_ranks_stand_still_and_go_on():
    run, reports = begin()
    ranks = processes(reports)
    run.pause()
    while {rank.status() for rank in ranks} != {psutil.STATUS_STOPPED}:
        pass
    while len(run.records) != len(reports.seen):
        pass
    used = [rank.cpu_times().user for rank in ranks]
    assert launch(dist.get_rank).values == [0, 1]  # the notebook is free
    assert [rank.cpu_times().user for rank in ranks] == used and run.running
    run.resume()
    reports.wait_for(lambda record: True)
    run.stop()


def test_dials_change_on_all_ranks_at_the_same_step():
    run, reports = begin()
    processes(reports)
    run.set(learning_rate=0.25)
    reports.wait_for(lambda r: r["learning_rate"] == 0.25 and r["rank"] == 0)
    run.pause()
    run.set(loss_scale=4.0)
    run.resume()
    reports.wait_for(lambda record: record["loss_scale"] == 4.0 and record["rank"] == 1)
    run.stop()
    by_step = {}
    for record in run.records:
        by_step.setdefault(record["step"], set()).add(
            (record["learning_rate"], record["loss_scale"])
        )
    assert all(len(values) == 1 for values in by_step.values())
    assert by_step[0] == {(0.5, 8.0)} and max(by_step.items())[1] == {(0.25, 4.0)}


def test_a_killed_rank_is_told():
    run, reports = begin()
    processes(reports)
    run.kill(1)
    with pytest.raises(RankError, match=r"rank 1 failed first[^$]*killed from outside") as caught:
        run.wait(60)
    assert caught.value.rank == 1 and run.state == "failed"


def alone():
    """Burn processor time and report it, without waiting for the other rank."""
    start, stop = time.monotonic(), time.process_time()
    while True:
        sum(range(1000))
        if time.process_time() - stop > 0.02:
            report(share=0.02 / (time.monotonic() - start))
            start, stop = time.monotonic(), time.process_time()


def test_a_slowed_rank_gets_less_time():
    run, reports = begin(alone, nproc=1)
    reports.wait_for(lambda record: True)
    run.slow(0, 8)
    for _ in range(30):
        reports.wait_for(lambda record: True)
    slowed = reports.seen[-10:]
    assert sum(record["share"] for record in slowed) / 10 < 1 / 4
    run.slow(0, 1)
    assert max(r["share"] for _ in range(30) for r in reports.wait_for(lambda _: True)) > 1 / 4
    run.stop()


def test_what_ranks_print_is_kept():
    run = launch(lambda: print("hello", dist.get_rank()), wait=False, timeout=60)
    run.wait()
    assert sorted(run.lines) == ["[rank 0] hello 0", "[rank 1] hello 1"]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda run: run.kill(2), "no rank 2: ranks are 0 to 1"),
        (lambda run: run.kill(True), "no rank True"),
        (lambda run: run.slow(-1, 2), "no rank -1"),
        (lambda run: run.slow(0, 0.5), "from 1 to 20: got 0.5"),
        (lambda run: run.slow(0, "2"), "from 1 to 20: got '2'"),
        (lambda run: run.set(learning_rate="high"), "learning_rate must be a number, not 'high'"),
    ],
)
def test_what_cannot_be_asked(ask, says):
    run, reports = begin()
    with pytest.raises((TypeError, ValueError), match=says):
        ask(run)
    reports.wait_for(lambda record: True)  # and the run goes on
    run.stop()


def test_a_wrong_argument_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="needs a function"):
        launch("worker", wait=False)


def test_dials_refuse_what_is_no_number():
    with pytest.raises(TypeError, match="rate must be a number"):
        dials(rate="high")
    assert dials(rate=2).rate == 2  # without ranks: what is given


WORKER = """
import os, itertools, torch, torch.distributed as dist
from ddp_course import launch, report
def worker():
    print('up', flush=True)
    for step in itertools.count():
        dist.all_reduce(torch.ones(1))
        report(step=step)
"""
BAD = """\
def bad():
    raise ValueError('bad luck')
launch(bad, wait=False)._thread.join()
"""


def test_in_a_kernel():
    kernel = Kernel()
    try:
        cell = "run = launch(worker, wait=False, timeout=None)\nwhile not run.records: pass"
        kernel.run(WORKER + cell)
        assert eval(kernel.run("x = 6 * 7\nprint([x, run.running])")) == [42, True]
        ranks = kernel.left()
        kernel.run(cell)  # the same cell again
        assert gone(ranks, timeout=1)
        told = kernel.run(BAD)
        assert "Cell In[4], line 2, in bad" in told and "ValueError: bad luck" in told
        kernel.run(cell)
        ranks = kernel.left()
        kernel.manager.restart_kernel(now=True)
        assert ranks and gone(ranks, timeout=5)
    finally:
        kernel.close()


def test_a_rank_can_be_killed_before_it_has_started():
    run, _ = begin()
    run.kill(1)
    with pytest.raises(RankError, match="rank 1 died of SIGKILL"):
        run.wait(60)


def test_a_run_can_be_paused_before_it_has_started():
    run, reports = begin()
    run.pause()
    while len(pids := run._supervisor.pids) < 2:
        pass
    ranks = [psutil.Process(pid) for pid in pids.values()]
    while {rank.status() for rank in ranks} != {psutil.STATUS_STOPPED}:
        assert run.running and run.paused
    run.resume()
    reports.wait_for(lambda record: record["rank"] == 1)
    run.stop()
    run.pause()
    assert not run.paused  # a run that is over


@pytest.fixture
def kernel():
    kernel = Kernel()
    yield kernel
    kernel.close()


def test_an_interrupted_wait_leaves_the_run_as_it_is(kernel):
    kernel.run("from ddp_course import launch\nimport time\n"
               "def worker():\n    while True: time.sleep(0.01)\n")  # fmt: skip
    request = kernel.start("run = launch(worker, wait=False)\nprint('up', flush=True)\nrun.wait()")
    kernel.wait_for("up")
    kernel.manager.interrupt_kernel()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        kernel.finish(request)
    assert "True" in kernel.run("print(run.running)")
    assert "False" in kernel.run("run.stop()\nprint(run.running)")
    assert gone(kernel.left())


@pytest.mark.parametrize("seconds", [-1, float("nan"), "long"])
def test_a_wait_needs_a_time(seconds):
    run, _ = begin()
    with pytest.raises(ValueError, match="wait for a number of seconds"):
        run.wait(seconds)
    run.stop()
