"""DDP by hand against torch's DDP and one process on the full batch; buckets, hooks, no_sync."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, this_rank
from ddp_course.accumulation import accumulate
from ddp_course.ddp import (
    MB,
    BucketedDDP,
    all_reduce_mean,
    average_gradients,
    average_gradients_flat,
    broadcast_model,
    make_buckets,
)
from ddp_course.models import GPT, MLP, parameters_of

on_cpu = functools.partial(launch, backend="gloo", timeout=60)


STEPS, SAMPLES = 4, 12  # the samples of a step are shared out over 2 or 3 ranks
SMALL = 300 / MB  # bytes, so that even these models have several buckets


def make_model(name):
    if name == "gpt":  # tied weights
        return GPT(11, context=8, width=16, layers=1, heads=2).double()
    model = MLP(width=8).double()
    if name == "frozen":
        model[0].requires_grad_(False)
    return model


def make_batch(name, step):
    generator = torch.Generator().manual_seed(step)
    if name == "gpt":
        text = torch.randint(11, (SAMPLES, 9), generator=generator)
        return text[:, :-1], text[:, 1:]
    x = torch.randn(SAMPLES, 64, generator=generator, dtype=torch.float64)
    return x, torch.randint(10, (SAMPLES,), generator=generator)


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def train(name, how, device="cpu"):
    """Weights after some steps, on this rank's part of each batch; ranks start apart."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if how != "alone" else (0, 1)
    torch.manual_seed(rank)
    inner = model = make_model(name).to(device)
    if how == "torch":
        model = DistributedDataParallel(inner, bucket_cap_mb=SMALL)
    elif how == "buckets":
        model = BucketedDDP(inner, bucket_cap_mb=SMALL)
        assert len(model.buckets) > 2
    elif how in ("average", "flat"):
        broadcast_model(inner)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = (part[rank::world_size].to(device) for part in make_batch(name, step))
        loss_of(model, x, y).backward()
        if how == "buckets":
            model.finish()
        elif how != "torch" and how != "alone":
            {"average": average_gradients, "flat": average_gradients_flat}[how](inner)
        optimizer.step()
        optimizer.zero_grad()
    return inner.state_dict()


def train_all(name):
    return {how: train(name, how) for how in ("torch", "average", "flat", "buckets")}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["mlp", "gpt", "frozen"])
def test_equal_to_torchs_ddp_and_to_one_process_on_the_full_batch(name, world_size):
    ranks = on_cpu(train_all, name, nproc=world_size).values
    alone = train(name, "alone")
    for by_hand in ranks:
        for how, weights in by_hand.items():
            for key, expected in alone.items():
                assert (weights[key] - expected).abs().max() < 1e-10, (how, key)
                assert torch.equal(weights[key], ranks[0][how][key]), (how, key)


def train_on_gpu(name):
    return {how: train(name, how, this_rank().device) for how in ("average", "flat", "buckets")}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["mlp", "gpt", "frozen"])
def test_equal_to_one_process_on_gpus_too(name):
    alone = train(name, "alone", "cuda")
    for by_hand in launch(train_on_gpu, name, timeout=60).values:
        for how, weights in by_hand.items():
            for key, expected in alone.items():
                assert (weights[key] - expected.cpu()).abs().max() < 1e-10, (how, key)


def after_broadcast(make):
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 4))  # each rank's own running statistics
    make(model)
    return model.state_dict()


@pytest.mark.parametrize("make", [broadcast_model, BucketedDDP])
def test_every_rank_begins_with_the_parameters_and_buffers_of_rank_0(make):
    first, second = on_cpu(after_broadcast, make).values
    assert all(torch.equal(first[key], second[key]) for key in first)
    torch.manual_seed(0)
    assert torch.equal(first["0.weight"], nn.Linear(4, 4).weight)


class Branches(nn.Module):
    """Which of its layers it uses is said at the call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(3))

    def forward(self, x, which):
        return sum(self.layers[k](x) for k in which)


def unused(how):
    torch.manual_seed(0)
    inner = model = Branches()
    if how == "torch":
        model = DistributedDataParallel(inner, find_unused_parameters=True)
    elif how == "buckets":
        model = BucketedDDP(inner, bucket_cap_mb=SMALL / 10)
    rank = dist.get_rank()
    x = torch.full((2, 3), 1.0 + rank, dtype=torch.float64)
    model(x, [[0, 1], [1, 2]][rank]).pow(2).sum().backward()
    if how == "buckets":
        model.finish()
    elif how != "torch":
        {"average": average_gradients, "flat": average_gradients_flat}[how](inner)
    return [layer.weight.grad for layer in inner.layers]


@pytest.mark.parametrize("how", ["average", "flat", "buckets"])
def test_parameters_that_some_ranks_do_not_use_count_as_zero_there(how):
    for gradients in on_cpu(unused, how).values:
        for gradient, expected in zip(gradients, on_cpu(unused, "torch").values[0], strict=True):
            assert (gradient - expected).abs().max() < 1e-12
            assert expected.abs().max() > 0


def accumulated(how):
    """Gradients after a window of three micro-batches; buckets sent in each backward."""
    torch.manual_seed(0)
    sent = []

    def counting(state, bucket):
        sent.append(bucket.index())
        return all_reduce_mean(state, bucket)

    inner = make_model("mlp")
    if how == "torch":
        model = DistributedDataParallel(inner)
    else:
        model = BucketedDDP(inner, bucket_cap_mb=SMALL, hook=counting)
    batches = [make_batch("mlp", 10 * dist.get_rank() + k) for k in range(3)]
    by_backward = []
    for x, y in accumulate(model, batches):
        loss_of(model, x, y).backward()
        if how != "torch":
            model.finish()
        by_backward.append(len(sent))
    return [p.grad for p in inner.parameters()], by_backward, getattr(model, "buckets", [])


def test_no_sync_accumulates_and_the_last_micro_batch_averages_the_sum():
    expected = on_cpu(accumulated, "torch").values[0][0]
    for gradients, by_backward, buckets in on_cpu(accumulated, "buckets").values:
        assert by_backward == [0, 0, len(buckets)]
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert (gradient - wanted).abs().max() < 1e-12


def sent_during_backward():
    """What happened in which order in a backward: gradients of layers, buckets sent."""
    events = []

    def note(state, bucket):
        events.append(f"bucket {bucket.index()}" + " last" * bucket.is_last())
        return all_reduce_mean(state, bucket)

    inner = MLP(width=8)
    for number, layer in enumerate(list(inner)[::2]):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: events.append(f"layer {number}")
        )
    model = BucketedDDP(inner, bucket_cap_mb=1 / MB, hook=note)  # one parameter a bucket
    loss_of(model, torch.randn(4, 64), torch.randint(10, (4,))).backward()
    before = list(events)
    model.finish()
    return before, events[len(before) :]


def test_buckets_are_sent_while_backward_is_running_last_layer_first():
    for before, in_finish in on_cpu(sent_during_backward).values:
        assert in_finish == []
        assert [event for event in before if "bucket" in event] == [
            *(f"bucket {number}" for number in range(5)),
            "bucket 5 last",
        ]
        assert before.index("bucket 1") < before.index("layer 0")


def test_buckets_follow_the_reverse_order_up_to_the_cap():
    parameters = list(MLP(width=8).parameters())  # 512 + 8, 64 + 8, 80 + 10 numbers
    buckets = make_buckets(parameters[::-1], 4 * 160)
    sizes = [[p.numel() for p in bucket.parameters()] for bucket in buckets]
    assert sizes == [[10, 80, 8], [64, 8], [512]]
    assert [bucket.is_last() for bucket in buckets] == [False, False, True]
    mixed = [nn.Parameter(torch.zeros(2, dtype=t)) for t in (torch.float32, torch.float64)]
    assert len(make_buckets(mixed, 1000)) == 2
    assert parameters_of(MLP(width=8)) * 4 < 25 * MB
    assert len(make_buckets(parameters, 25 * MB)) == 1


def with_compression(make):
    torch.manual_seed(0)
    model = make(make_model("mlp"))
    for step in range(2):
        model.zero_grad()
        loss_of(model, *make_batch("mlp", 10 * step + dist.get_rank())).backward()
        if hasattr(model, "finish"):
            model.finish()
    return [p.grad for p in model.parameters()]


def torch_compressed(model):
    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fp16_compress_wrapper(all_reduce_mean))
    return model


def hand_compressed(model):
    return BucketedDDP(model, hook=fp16_compress_wrapper(all_reduce_mean))


def test_torchs_compression_wrapper_works_on_these_buckets():
    ours = on_cpu(with_compression, hand_compressed).values
    theirs = on_cpu(with_compression, torch_compressed).values
    for mine, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    assert all(g.dtype == torch.float64 for g in ours[0])


def mistakes():
    said = []
    model = BucketedDDP(make_model("mlp"), bucket_cap_mb=SMALL)
    x, y = make_batch("mlp", 0)
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    for wrong in (lambda: model(x), loss.backward):
        try:
            wrong()
        except RuntimeError as error:
            said.append(str(error))
    model.finish()
    for frozen, cap in ((True, 25), (False, 0), (False, -1)):
        try:
            BucketedDDP(make_model("mlp").requires_grad_(not frozen), bucket_cap_mb=cap)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def test_what_cannot_work_says_so():
    for said in on_cpu(mistakes).values:
        assert "call finish() after backward" in said[0]
        assert "two backwards in a row" in said[1]
        assert "no parameter requires a gradient" in said[2]
        assert "bucket_cap_mb must be above 0, not 0" in said[3]
        assert len(said) == 5
