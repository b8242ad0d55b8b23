"""What lesson 13 builds on: FSDP2, tensor and pipeline parallelism equal one process on real ranks.

Also what each rank holds and sends, and the failures that the lesson shows.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_course import RankError, flight, launch, zero
from ddp_course.models import GPT, parameters_of

on_cpu = functools.partial(launch, backend="gloo", timeout=100)
STEPS, SAMPLES, LETTERS, CONTEXT, WIDTH = 3, 12, 11, 8, 12


def make_model():
    torch.manual_seed(3)
    model = GPT(LETTERS, context=CONTEXT, width=WIDTH, layers=2, heads=2)
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())  # for two stages
    return model.double()


def make_batch(step):
    draw = torch.Generator().manual_seed(step)
    text = torch.randint(LETTERS, (SAMPLES, CONTEXT + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def adam(model):
    return torch.optim.Adam(model.parameters(), 0.01, eps=0.01)


def flat(model):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts])


def held(model, optimizer):
    """Numbers of weights, gradients and optimizer state on this rank."""
    weights = sum(zero.local(p).numel() for p in model.parameters())
    gradients = sum(zero.local(p.grad).numel() for p in model.parameters())
    return weights, gradients, zero.state_bytes(optimizer) // 8


def alone(model):
    return model, adam(model)


def ddp_zero(model):
    model = DistributedDataParallel(model)
    options = {"lr": 0.01, "eps": 0.01}
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **options)


def all_ranks():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def fsdp(model, reshard=True):
    how = {"mesh": all_ranks(), "reshard_after_forward": reshard}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model, adam(model)


def keeps_weights(model):
    return fsdp(model, reshard=False)


def tensor(model):
    plan = {"mlp_input": ColwiseParallel(), "mlp_output": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, all_ranks(), plan)
    return model, adam(model)


def recomputed(reentrant):
    class Recomputed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=reentrant)

    def way(model):
        model.blocks = nn.Sequential(*map(Recomputed, model.blocks))
        model = DistributedDataParallel(model, find_unused_parameters=True)
        return model, adam(model)

    return way


def optimizer_first(model):
    made_before = adam(model)
    fully_shard(model, mesh=all_ranks())
    return model, made_before


def train(way, split=True):
    """Return weights, what this rank holds, and the last step's collectives."""
    model, optimizer = way(make_model())
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if split else (0, 1)
    for step in range(STEPS):
        before = len(flight.log())
        x, y = (part[rank::world_size] for part in make_batch(step))
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    calls = [(call.name, call.tensors) for call in flight.log()[before:]]
    return flat(model), held(model, getattr(optimizer, "optim", optimizer)), calls


@pytest.fixture(scope="module")
def wanted():
    return train(alone, split=False)[:2]


WAYS = [
    (ddp_zero, 2, True), (fsdp, 2, True), (fsdp, 3, True), (keeps_weights, 2, True),
    (tensor, 2, False), (tensor, 3, False), (recomputed(False), 2, True),
]  # fmt: skip


@pytest.mark.parametrize(("way", "nproc", "split"), WAYS)
def test_weights_are_those_of_one_process_on_the_whole_batch(way, nproc, split, wanted):
    for weights, _, _ in on_cpu(train, way, split, nproc=nproc).values:
        torch.testing.assert_close(weights, wanted[0], rtol=1e-11, atol=1e-11)


def test_fsdp_holds_and_gathers_its_shares(wanted):
    whole = parameters_of(make_model())
    for reshard, gathers in ((fsdp, 6), (keeps_weights, 3)):
        values = on_cpu(train, reshard).values
        for rank in (0, 1):
            weights, gradients, state = values[rank][1]
            assert weights == gradients == state // 2
            assert abs(weights - whole / 2) <= WIDTH  # rows of odd counts are not cut
            assert [name for name, _ in values[rank][2]].count("all_gather") == gathers
        assert sum(value[1][0] for value in values) == whole


def test_tensor_parallel_sends_activations_and_shares_out_the_mlp():
    whole = parameters_of(make_model())
    split = 2 * (8 * WIDTH**2 + 4 * WIDTH)  # of both blocks; the second's bias is on both ranks
    for _, (weights, gradients, state), calls in on_cpu(train, tensor, False).values:
        assert weights == gradients == state // 2 == whole - split // 2
        assert calls == [("all_reduce", f"float64[{SAMPLES}, {CONTEXT}, {WIDTH}]")] * 4


def test_torch_zero_shares_out_the_state(wanted):
    kept = [value[1][2] for value in on_cpu(train, ddp_zero).values]
    assert sum(kept) == wanted[1][2] and max(kept) < 0.75 * sum(kept)


def test_the_wrong_data_parts_the_copies_of_tensor_parallel_ranks():
    first, second = (value[0] for value in on_cpu(train, tensor, True).values)
    assert (first - second).abs().max() > 1e-4


def moved():
    model, optimizer = optimizer_first(make_model())
    before, (x, y) = flat(model), make_batch(0)
    loss_of(model(x), y).backward()
    optimizer.step()
    return (flat(model) - before).norm().item()


def test_an_optimizer_made_before_fully_shard_moves_nothing():
    assert on_cpu(moved).values == [0.0, 0.0]


def test_reentrant_checkpointing_under_ddp_marks_ready_twice():
    with pytest.raises(RankError, match="marked as ready twice"):
        on_cpu(train, recomputed(True))


class First(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.token, self.position, self.block = gpt.token, gpt.position, gpt.blocks[0]

    def forward(self, numbers):
        return self.block(self.token(numbers) + self.position.weight)


def stage_of(gpt, rank):
    return First(gpt) if rank == 0 else nn.Sequential(gpt.blocks[1], gpt.norm, gpt.head)


def pipeline(kind, micro_batches):
    """Return this stage's weights, and the most micro-batches that waited for their backward."""
    rank, waiting = dist.get_rank(), [0]
    part = stage_of(make_model(), rank)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule, optimizer = kind(stage, micro_batches, loss_fn=loss_of), adam(part)

    def count(_, inputs, output):
        if output.requires_grad:
            waiting.append(waiting[-1] + 1)
            output.register_hook(lambda gradient: waiting.append(waiting[-1] - 1))

    for step in range(STEPS):
        x, y = make_batch(step)
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
        if step == 0:  # which has found out the shapes with a forward of its own
            part.register_forward_hook(count)
    return flat(part), max(waiting)


@pytest.mark.parametrize(("kind", "most"), [(ScheduleGPipe, [4, 4]), (Schedule1F1B, [2, 1])])
def test_a_pipeline_equals_one_process_and_1f1b_holds_less(kind, most, wanted):
    trained = make_model()
    nn.utils.vector_to_parameters(wanted[0], trained.parameters())
    values = on_cpu(pipeline, kind, 4).values
    for rank, (weights, _) in enumerate(values):
        right = flat(stage_of(trained, rank))
        torch.testing.assert_close(weights, right, rtol=1e-11, atol=1e-11)
    assert [waiting for _, waiting in values] == most
