"""ZeRO-1 by hand: the weights of plain Adam, the state shared out, what crosses between ranks."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp_course import flight, launch, zero
from ddp_course.models import GPT, MLP, parameters_of

on_cpu = functools.partial(launch, backend="gloo", timeout=60)
STEPS, SAMPLES = 5, 12  # the samples of a step are shared out over 1, 2 or 3 ranks
# A large eps and decay: Adam all but ignores a gradient's scale, and would hide a wrong one.
ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 0.01, "weight_decay": 0.1}


def make_model(name):
    torch.manual_seed(3)
    if name == "gpt":  # tied weights
        return GPT(11, context=8, width=16, layers=1, heads=2).double()
    model = MLP(width=9).double()
    if name == "frozen":
        model[0].requires_grad_(False)
    return model


def make_batch(name, step):
    draw = torch.Generator().manual_seed(step)
    if name == "gpt":
        text = torch.randint(11, (SAMPLES, 9), generator=draw)
        return text[:, :-1], text[:, 1:]
    x = torch.randn(SAMPLES, 64, generator=draw, dtype=torch.float64)
    return x, torch.randint(10, (SAMPLES,), generator=draw)


def train(name, sharded):
    """Return weights, bytes of optimizer state and collectives of the last step."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    model = make_model(name)
    make = zero.ShardedAdam if sharded else torch.optim.Adam
    optimizer, calls = make(model.parameters(), **ADAM), []
    for step in range(STEPS):
        x, y = (part.tensor_split(world_size)[rank] for part in make_batch(name, step))
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        before = len(flight.log())
        optimizer.step()
        calls = flight.log()[before:]
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, zero.state_bytes(getattr(optimizer, "adam", optimizer)), calls


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "frozen", "gpt"])
def test_weights_are_those_of_plain_adam_on_the_whole_batch(name, world_size):
    wanted, whole, _ = train(name, sharded=False)
    for weights, held, _ in on_cpu(train, name, True, nproc=world_size).values:
        torch.testing.assert_close(weights, wanted, rtol=1e-12, atol=1e-12)
        assert held == 2 * 8 * math.ceil(whole / 16 / world_size)


def test_gradients_and_weights_cross_once_each():
    parameters = parameters_of(make_model("mlp"))
    for _, _, calls in on_cpu(train, "mlp", True, nproc=3).values:
        sizes = [(call.name, int(call.tensors[8:-1])) for call in calls]
        share = math.ceil(parameters / 3)
        assert sizes == [("all_reduce", share)] * 3 + [("all_gather", share)]


def unused_and_loaded():
    """A parameter that rank 1 does not use, and weights that are replaced between two steps."""
    model = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
    optimizer = zero.ShardedAdam(model, lr=1.0)
    (model[0].sum() if dist.get_rank() else (model[0].sum() + model[1].sum())).backward()
    optimizer.step()
    first = [p.detach().clone() for p in model]
    optimizer.zero_grad()
    with torch.no_grad():
        model[0].fill_(5.0)
    optimizer.step()
    return first, model[0].detach().clone(), [p.grad for p in model]


def test_none_counts_as_zeros_and_loaded_weights_are_kept():
    for first, loaded, gradients in on_cpu(unused_and_loaded, nproc=2).values:
        torch.testing.assert_close(torch.cat(first), -torch.ones(5))  # Adam's first step: ± lr
        assert (loaded < 5).all() and (loaded > 4).all()
        assert gradients == [None, None]


def mixed(kinds):
    return zero.ShardedAdam([nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds])


@pytest.mark.parametrize("kinds", [(), (torch.float32, torch.float64)])
def test_a_wrong_set_of_parameters_gets_one_clear_line(kinds):
    with pytest.raises(ValueError, match="of one type and device"):
        mixed(kinds)


def test_shares_are_averaged_and_gathered_in_the_order_of_the_ranks():
    for rank, (share, whole) in enumerate(on_cpu(shares, nproc=3).values):
        assert share.tolist() == [2.0 * rank + 1, 2.0 * rank + 2]
        assert whole.tolist() == [1, 2, 3, 4, 5, 6]


def shares():
    share = zero.reduce_scatter_mean(torch.arange(6.0) + dist.get_rank())
    return share, zero.all_gather(share)
