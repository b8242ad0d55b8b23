"""The slow link: right averages, no bucket before its time, one after another."""

import functools
import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, this_rank
from ddp_course.ddp import MB, BucketedDDP
from ddp_course.models import MLP, parameters_of
from ddp_course.network import (
    SlowLink,
    bf16_compress_hook,
    bf16_compress_wrapper,
    gbit,
    mbit,
    power_sgd,
)

on_cpu = functools.partial(launch, backend="gloo", timeout=60)


def gradients(hook=None, state=None, wrap=DistributedDataParallel, steps=1):
    """The averaged gradients of one batch a rank, after so many backwards of it."""
    torch.manual_seed(0)
    if wrap is DistributedDataParallel:
        model = wrap(MLP(width=32), bucket_cap_mb=0.01)
        if hook is not None:
            model.register_comm_hook(state, hook)
    else:
        model = wrap(MLP(width=32), bucket_cap_mb=0.01, hook=hook, state=state)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x), torch.arange(8)).backward()
        if wrap is BucketedDDP:
            model.finish()
    return [parameter.grad for parameter in model.parameters()]


def averages_over(link):
    state = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}
    return {
        "plain": gradients(),
        "link": gradients(link),
        "by hand": gradients(link, wrap=BucketedDDP),
        "fp16": gradients(fp16_compress_hook),
        "fp16 on the link": gradients(fp16_compress_wrapper(link)),
        "bf16": gradients(bf16_compress_hook),
        "bf16 on the link": gradients(bf16_compress_wrapper(link)),
        "PowerSGD": gradients(power_sgd(link), PowerSGDState(None, **state), steps=5),
    }


def distance(ours, theirs):
    """Relative, over all parameters together."""
    ours, theirs = (torch.cat([g.flatten() for g in gradients]) for gradients in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("nproc", [2, 3])
def test_gradients_are_the_averages_that_ddp_computes(nproc):
    ranks = on_cpu(averages_over, SlowLink(gbit(10), 1e-5), nproc=nproc).values
    for found in ranks:
        assert distance(found["link"], found["plain"]) < 1e-6  # · 1/3 is not / 3 in the last bit
        assert distance(found["by hand"], found["plain"]) < 1e-6
        assert distance(found["fp16 on the link"], found["fp16"]) == 0
        assert 0 < distance(found["fp16"], found["plain"]) < 2**-9
        assert distance(found["bf16 on the link"], found["bf16"]) == 0
        assert distance(found["fp16"], found["plain"]) < distance(found["bf16"], found["plain"])
        assert distance(found["bf16"], found["plain"]) < 2**-6
        assert 1e-3 < distance(found["PowerSGD"], found["plain"]) < 1  # of low rank
        for name, mine in found.items():
            assert distance(mine, ranks[0][name]) == 0, name  # the same on all ranks


def backward_seconds(link, hooks, dtype, device="cpu"):
    """How long a backward takes, for each of these hooks, after two to warm up."""
    taken, device = [], this_rank().device if device == "cuda" else device
    for make in hooks:
        model = DistributedDataParallel(MLP(width=128).to(device, dtype), bucket_cap_mb=0.05)
        model.register_comm_hook(None, make(link))
        x, y = torch.randn(8, 64).to(device, dtype), torch.arange(8, device=device)
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            model.module[0].weight.grad.sum().item()  # waits for a GPU
        taken.append(time.perf_counter() - start)
    return taken, parameters_of(model)


def itself(link):
    return link


def test_no_step_is_quicker_than_its_bytes_at_this_bandwidth():
    """A sleep never ends early, so these bounds hold on every machine."""
    link = SlowLink(1e6)  # 1 MB/s: 26 thousand float32 numbers take 0.1 s
    hooks = [itself, fp16_compress_wrapper, bf16_compress_wrapper]
    for dtype, size in ((torch.float32, 4), (torch.float64, 8)):
        for taken, numbers in on_cpu(backward_seconds, link, hooks, dtype).values:
            plain, fp16, bf16 = taken
            assert plain >= size * numbers / 1e6
            assert min(fp16, bf16) >= 2 * numbers / 1e6
            assert min(fp16, bf16) < plain  # half or a quarter of the bytes: generous


@pytest.mark.gpu(2)
def test_on_gpus_too_no_step_is_quicker_than_its_bytes():
    run = launch(backward_seconds, SlowLink(1e6), [itself], torch.float32, "cuda", timeout=60)
    for taken, numbers in run.values:
        assert taken[0] >= 4 * numbers / 1e6


def messages(link):
    """When three messages that are ready at once arrive, on this rank's clock; and a later one."""
    start, arrived = time.perf_counter(), []
    done = torch.futures.Future()
    done.set_result(torch.ones(1))
    futures = [link.deliver(done, 0.05) for _ in range(3)]
    before = [future.done() for future in futures]
    for future in futures:
        future.wait()
        arrived.append(time.perf_counter() - start)
    time.sleep(0.05)  # the link is idle: no credit is saved up
    again = time.perf_counter()
    link.deliver(done, 0.05).wait()
    return before, arrived, time.perf_counter() - again


def test_messages_queue_for_the_link_and_the_caller_goes_on():
    before, arrived, later = on_cpu(messages, SlowLink(1), nproc=1).values[0]
    assert before == [False] * 3  # it did not wait for them
    assert [arrived[k] >= 0.05 * (k + 1) for k in range(3)] == [True] * 3
    assert later >= 0.05


def dialled(link):
    model = DistributedDataParallel(MLP(width=64))
    model.register_comm_hook(None, link)
    taken, nbytes = [], 4 * parameters_of(model)
    for bandwidth, latency in ((math.inf, 0), (nbytes / 0.3, 0), (math.inf, 0.15)):
        link.bandwidth, link.latency = bandwidth, latency
        dist.barrier()
        start = time.perf_counter()
        F.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
        taken.append(time.perf_counter() - start)
    return taken


def test_bandwidth_and_latency_can_be_changed_while_it_trains():
    for _, narrow, far in on_cpu(dialled, SlowLink(math.inf)).values:
        assert narrow >= 0.3
        assert far >= 2 * 0.15  # two messages between two ranks


def failing(link):
    """An all-reduce that fails, and one after it."""
    broken, fine = torch.futures.Future(), torch.futures.Future()
    broken.set_exception(ValueError("the cable is cut"))
    fine.set_result(torch.ones(1))
    first, second = link.deliver(broken, 0), link.deliver(fine, 0)
    try:
        first.wait()
        said = ""
    except Exception as error:
        said = str(error)
    return said, second.wait().item()


def test_an_error_arrives_too_and_the_link_goes_on():
    said, value = on_cpu(failing, SlowLink(1), nproc=1).values[0]
    assert "the cable is cut" in said
    assert value == 1


def test_the_time_is_that_of_a_ring():
    link = SlowLink(1000, latency=0.5)
    assert link.seconds(3000, 2) == pytest.approx(2 * 0.5 + 3)
    assert link.seconds(3000, 4) == pytest.approx(6 * 0.5 + 1.5 * 3)
    assert link.seconds(3000, 1) == 0
    assert gbit(1) == 1000 * mbit(1) == 125e6
    assert MB == 2**20


@pytest.mark.parametrize("bandwidth", [0, -1, math.nan, "1", None, True])
def test_a_bad_bandwidth_is_refused(bandwidth):
    with pytest.raises(ValueError, match="bandwidth is in bytes per second and above 0, not"):
        SlowLink(bandwidth)


@pytest.mark.parametrize("latency", [-1, math.inf, math.nan, "1", None])
def test_a_bad_latency_is_refused(latency):
    link = SlowLink(1)
    with pytest.raises(ValueError, match="latency is in seconds and at least 0, not"):
        link.latency = latency
    assert link.latency == 0


class Noting(SlowLink):
    """Notes for how long each message was on the link."""

    def deliver(self, future, seconds, device=None):
        self.noted.append(seconds)
        return super().deliver(future, seconds, device)


def compressed(rank):
    link = Noting(1e6)
    link.noted = []
    model = DistributedDataParallel(MLP(width=32))
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    model.register_comm_hook(state, power_sgd(link))
    by_step = []
    for _ in range(4):
        link.noted.clear()
        F.cross_entropy(model(torch.randn(8, 64)), torch.arange(8)).backward()
        by_step.append(sum(link.noted))
    return by_step, [tuple(parameter.shape) for parameter in model.parameters()]


def test_power_sgd_pays_for_what_it_sends():
    for by_step, shapes in on_cpu(compressed, 2).values:
        whole = sum(math.prod(shape) for shape in shapes)
        factors = sum(2 * sum(shape) if len(shape) == 2 else shape[0] for shape in shapes)
        assert by_step[0] == pytest.approx(4 * whole / 1e6)  # it does not compress yet
        assert by_step[-1] == pytest.approx(4 * factors / 1e6)
        assert factors < whole / 4


def wrong_state():
    try:
        gradients(power_sgd(SlowLink(1e9)))
    except Exception as error:
        return str(error)


def test_power_sgd_says_which_state_it_needs():
    assert all("PowerSGDState" in said for said in on_cpu(wrong_state).values)
