"""`process_group` and `this_rank`, in `launch`, under torchrun and in a plain script."""

import importlib
import os
import re
import subprocess
import sys
import uuid

import pytest
import torch.distributed as dist
from kernels import MARK, gone, marked

from ddp_course import RankError, launch, process_group, this_rank

# by its full name: `ddp_course.process_group` is the function
module = importlib.import_module("ddp_course.process_group")

SCRIPT = """
import torch, torch.distributed as dist
from ddp_course import process_group
with process_group() as me:
    total = torch.tensor(float(me.rank + 1), device=me.device)
    dist.all_reduce(total)
    place = f"{me.rank} {me.local_rank} {me.world_size}"
    print(f"{place} {me.device.type} sum {total.item():g}", flush=True)
    try:
        with process_group():
            pass
    except RuntimeError as error:
        print(f"{me.rank} again: {error}", flush=True)
print(f"{me.rank} up afterwards: {dist.is_initialized()}", flush=True)
"""


def run(*command, tmp_path, **environment):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command, str(script)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_under_torchrun(tmp_path):
    out = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path=tmp_path
    )
    for rank in (0, 1):
        assert f"{rank} {rank} 2 " in out
        assert f"{rank} again: the process group is already up" in out
        assert f"{rank} up afterwards: False" in out
    assert out.count("sum 3") == 2


FAULTY = """
import torch, torch.distributed as dist
from ddp_course import process_group
with process_group() as me:
    dist.barrier()
    if me.rank == {bad}:
        raise ValueError("bad luck")
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize("bad", [0, 1])
def test_torchrun_tells_the_rank_that_failed_first(tmp_path, bad):
    script = tmp_path / "script.py"
    script.write_text(FAULTY.format(bad=bad))
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script],
        capture_output=True, text=True, timeout=120, env={**os.environ, MARK: mark},
    )  # fmt: skip
    cause = done.stderr.partition("Root Cause")[2]
    assert done.returncode != 0 and gone(marked(mark))
    assert re.search(rf"rank +: {bad} ", cause)
    assert f'File "{script}", line 7' in cause and "ValueError: bad luck" in cause


def test_a_plain_script_is_rank_0_of_1(tmp_path):
    out = run(tmp_path=tmp_path)
    assert "0 0 1 " in out and "sum 1" in out and "up afterwards: False" in out


def test_a_stray_rank_variable_does_not_confuse_a_plain_script(tmp_path):
    assert "0 0 1 " in run(tmp_path=tmp_path, RANK="7", WORLD_SIZE="9")


def test_inside_launch_it_is_up_already():
    def worker():
        with process_group():
            pass

    with pytest.raises(RankError, match="the process group is already up: `launch`"):
        launch(worker, nproc=1, timeout=60)


def test_it_is_torn_down_when_the_body_raises():
    with pytest.raises(ZeroDivisionError), process_group():
        assert dist.is_initialized()
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with process_group() as me:  # and can be set up again
        assert (me.rank, me.world_size) == (0, 1)


def test_the_body_may_tear_it_down_itself():
    with process_group():
        dist.destroy_process_group()


def test_this_rank_needs_no_process_group():
    me = this_rank()
    assert (me.rank, me.local_rank, me.world_size, me.local_world_size) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "backend"),
    [(0, 2, None, "gloo"), (2, 2, None, "nccl"), (1, 2, None, "gloo"), (4, 2, "gloo", "gloo")],
)
def test_the_backend_follows_the_gpus(monkeypatch, gpus, ranks, asked, backend):
    monkeypatch.setattr(module, "gpus", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    chosen, note = module.choose_backend(ranks, asked)
    assert chosen == backend
    assert bool(note) == (0 < gpus < ranks)  # sharing is said


def test_threads_follow_cores_and_the_users_wish(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [module.threads_per_rank(n) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert module.threads_per_rank(2) == 3


@pytest.mark.gpu(count=2)
def test_nccl_gives_each_rank_its_own_gpu():
    def worker():
        import torch

        total = torch.ones(1, device=this_rank().device)
        dist.all_reduce(total)
        return str(this_rank().device), dist.get_backend(), total.item()

    assert launch(worker, timeout=120).values == [("cuda:0", "nccl", 2.0), ("cuda:1", "nccl", 2.0)]


@pytest.mark.gpu(count=1)
def test_two_ranks_share_one_gpu_over_gloo(capsys):
    def worker():
        import torch

        total = torch.ones(1, device=this_rank().device)
        dist.all_reduce(total)
        return dist.get_backend(), total.item()

    import torch

    nproc = torch.cuda.device_count() + 1
    assert launch(worker, nproc=nproc, timeout=120).values == [("gloo", float(nproc))] * nproc
    assert f"{nproc} ranks share" in capsys.readouterr().out
