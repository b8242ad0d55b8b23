"""DistributedDataParallel made by hand in lesson 04, and torch's."""

import copy

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import data, models
from ..ddp import BucketedDDP
from ..launch import launch
from ..train import summed_loss
from .cases import COURSE, Case, Goal, seconds_on_ranks

TORCH = "torch's DDP"
MODELS = {"MLP": ("mlp", {"width": 1024}, 64), "GPT": ("gpt", {}, 8)}  # sizes, micro-batch


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each model."""
    cases = []
    for model in MODELS:
        say(f"{model}: by hand and torch's")
        samples = launch(contest, model, rounds, nproc=2, timeout=600).values[0]
        case = Case(f"DDP by hand, {model}", "samples/s", samples, more_is_better=True)
        case.goals.append(Goal(0.9, TORCH))
        cases.append(case)
    return cases


def contest(name: str, rounds: int) -> dict[str, list[float]]:
    """Return samples per second for each contender. Every rank must call it."""
    torch.set_num_threads(1)
    kind, sizes, micro_batch = MODELS[name]
    dataset = (data.digits() if kind == "mlp" else data.characters())[0]
    if kind == "gpt":
        sizes = {"vocabulary": len(dataset.vocabulary)}
    torch.manual_seed(0)
    model = models.build(kind, **sizes)
    x, y = next(iter(data.shard(dataset, micro_batch)))
    contenders = {
        COURSE: _steps(BucketedDDP(copy.deepcopy(model)), x, y),
        TORCH: _steps(DistributedDataParallel(copy.deepcopy(model)), x, y),
    }
    seconds = seconds_on_ranks(contenders, rounds)
    return {name: [2 * micro_batch / took for took in seconds[name]] for name in seconds}


def _steps(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    finish = getattr(model, "finish", lambda: None)

    def step():
        (summed_loss(model(x), y) / y.numel()).backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return step
