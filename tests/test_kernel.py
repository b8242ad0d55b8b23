"""`launch` from a live Jupyter kernel: cells, the stop button, a killed kernel."""

import os
import signal
import sys

import psutil
import pytest
from kernels import CellError, Kernel, gone

SETUP = """
import os, torch, torch.distributed as dist
from ddp_course import launch, report, RankError, HangError
"""
BLOCKED = """
def worker():
    print("up", flush=True)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        pass
launch(worker)
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture
def kernel():
    kernel = Kernel()
    kernel.run(SETUP)
    yield kernel
    kernel.close()


def test_functions_and_globals_of_cells_reach_the_ranks(kernel):
    kernel.run("scale = 10\ndef helper(x):\n    return x * scale")
    kernel.run("class Pair:\n    def __init__(self, a):\n        self.a = a")
    kernel.run("def worker():\n    print('hello')\n    return Pair(helper(dist.get_rank()))")
    printed = kernel.run("run = launch(worker, timeout=60)\nprint([v.a for v in run.values])")
    assert "[rank 0] hello\n" in printed and "[rank 1] hello\n" in printed
    assert "[0, 10]" in printed
    assert kernel.run("print(all(type(v) is Pair for v in run.values))") == "True\n"


def test_an_error_names_the_cell_and_shows_its_line(kernel):
    kernel.run("def worker():\n    x = 1\n    raise ValueError('bad luck')")
    with pytest.raises(CellError) as caught:
        kernel.run("launch(worker, timeout=60)")
    shown = caught.value.shown
    assert "Cell In[2], line 3, in worker" in shown and "raise ValueError('bad luck')" in shown
    assert "_Supervisor" not in shown and len(shown.splitlines()) < 10


def test_a_kernel_that_has_trained_launches_as_well(kernel):
    """A fork of this kernel would hang: its thread pools are in use."""
    kernel.run("a = torch.randn(600, 600, requires_grad=True)\n(a @ a).tanh().sum().backward()")
    kernel.run("def worker():\n    a = torch.ones(600, 600)\n    return float((a @ a).sum())")
    assert "[216000000.0, 216000000.0]" in kernel.run("print(launch(worker, timeout=60).values)")


def test_a_kernel_with_a_process_group_of_its_own_launches_as_well(kernel):
    kernel.run("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)")
    assert "[2, 2]" in kernel.run("print(launch(dist.get_world_size, timeout=60).values)")


@pytest.mark.parametrize("to", ["group", "kernel"])
def test_the_stop_button_stops_the_ranks_and_the_kernel_goes_on(kernel, to):
    request = kernel.start(BLOCKED)
    kernel.wait_for("[rank 1] up")
    server, *ranks = kernel.descendants()
    assert len(ranks) >= 3  # a guardian and two ranks
    if to == "group":
        kernel.manager.interrupt_kernel()
    else:
        os.kill(kernel.pid, signal.SIGINT)
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        kernel.finish(request)
    assert gone(ranks, timeout=0.5)  # they were gone when the cell was
    assert "[0, 1]" in kernel.run("print(launch(dist.get_rank, timeout=60).values)")


@pytest.mark.parametrize("how", ["killed", "shut down", "restarted"])
def test_no_process_outlives_the_kernel(kernel, how):
    kernel.start(BLOCKED)
    kernel.wait_for("[rank 1] up")
    family = kernel.descendants()
    if how == "killed":
        psutil.Process(kernel.pid).kill()
    elif how == "shut down":
        kernel.manager.shutdown_kernel()
    else:
        kernel.manager.restart_kernel()
    assert gone(family)


def test_a_rank_that_holds_the_interpreter_lock_ends_with_the_kernel(kernel):
    """No thread of its own can run in such a rank: only another process can end it."""
    kernel.start(
        "import ctypes\n"
        "def worker():\n"
        "    print('up', flush=True)\n"
        "    ctypes.PyDLL(None).sleep(1000)\n"  # PyDLL keeps the lock
        "launch(worker)"
    )
    kernel.wait_for("up")
    family = kernel.descendants()
    psutil.Process(kernel.pid).kill()
    assert gone(family)


def test_the_server_is_up_before_the_first_launch():
    kernel = Kernel()
    try:
        kernel.run("import ddp_course")
        assert any("fork_server" in " ".join(child.cmdline()) for child in kernel.descendants())
    finally:
        kernel.close()
