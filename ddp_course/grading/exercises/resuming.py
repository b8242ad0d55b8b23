"""A run that can be stopped and resumed: its parts, its loop, what is looked at, the arithmetic."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..exercise import generator

SAMPLES, MICRO_BATCH = 48, 8
FIRST, SECOND, LAST = 5, 13, 22  # steps: a save, another in the middle of an epoch, the end


@dataclass
class Run:
    """What a checkpoint is made of, and the data."""

    model: nn.Module
    optimizer: Any
    schedule: Any
    scaler: Any
    x: torch.Tensor
    y: torch.Tensor
    seed: int
    progress: dict = field(default_factory=lambda: {"epoch": 0, "batches_done": 0})

    def parts(self) -> tuple:
        return self.model, self.optimizer, self.schedule, self.scaler, self.progress


def new_run(seed: int, rank: int, again: bool = False, wrapped: bool = True) -> Run:
    """Return a run at its beginning; `again`: the second start, with other random numbers.

    It leaves torch's generator where this rank's dropout begins.
    """
    draw = generator(seed)
    x, y = torch.randn(SAMPLES, 6, generator=draw), torch.randint(3, (SAMPLES,), generator=draw)
    torch.manual_seed(seed + 7 * again)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3))
    if wrapped:
        model = DistributedDataParallel(model)
        # DDP orders its buckets after the first backward, and so the order of its sums.
        model(x[:2]).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    optimizer.zero_grad()
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    # So high that the first steps overflow, and that it is never reached again.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=4)
    torch.manual_seed(seed + 1000 * again + rank + 1)
    return Run(model, optimizer, schedule, scaler, x, y, seed)


def batch(run: Run, rank: int, world_size: int):
    """Return this rank's next (x, y), by epoch and batches_done, and move on."""
    progress = run.progress
    order = torch.randperm(SAMPLES, generator=generator(run.seed, progress["epoch"]))
    first = MICRO_BATCH * progress["batches_done"]
    mine = order[rank::world_size][first : first + MICRO_BATCH]
    progress["batches_done"] += 1
    if progress["batches_done"] * MICRO_BATCH * world_size == SAMPLES:
        progress.update(epoch=progress["epoch"] + 1, batches_done=0)
    return run.x[mine], run.y[mine]


def scaled_loss(run: Run, x, y) -> torch.Tensor:
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(run.model(x), y)
    return run.scaler.scale(loss)


def step(run: Run) -> None:
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()
    if run.scaler.get_scale() >= scale:
        run.schedule.step()


def train(run: Run, steps: int, rank: int, world_size: int) -> None:
    """Take so many steps, from where the run stands."""
    for _ in range(steps):
        scaled_loss(run, *batch(run, rank, world_size)).backward()
        step(run)


def snapshot(run: Run) -> dict:
    """Return everything that decides how the run goes on, as plain data."""
    parameters, state = list(run.model.parameters()), run.optimizer.state
    momenta = [state[p].get("momentum_buffer") if p in state else None for p in parameters]
    pairs = zip(parameters, momenta, strict=True)
    momenta = [torch.zeros_like(p) if m is None else m for p, m in pairs]
    scaler = run.scaler.state_dict()
    return {
        "weights": torch.cat([p.detach().flatten() for p in parameters]),
        "momentum": torch.cat([m.flatten() for m in momenta]),
        "learning_rate": float(run.optimizer.param_groups[0]["lr"]),
        "schedule": int(run.schedule.last_epoch),
        "scale": float(scaler["scale"]),
        "good_steps": int(scaler["_growth_tracker"]),
        "epoch": int(run.progress.get("epoch", -1)),
        "batches_done": int(run.progress.get("batches_done", -1)),
        "random": torch.get_rng_state(),
    }


def reference(seed: int, world_size: int) -> torch.Tensor:
    """Return the weights at the end of a run that nobody stops: all ranks in one process."""
    with torch.random.fork_rng(devices=[]):
        run = new_run(seed, 0, wrapped=False)
        states = [torch.manual_seed(seed + rank + 1).get_state() for rank in range(world_size)]
        for _ in range(LAST):
            start, total = dict(run.progress), []
            for rank in range(world_size):
                run.progress.update(start)
                torch.set_rng_state(states[rank])
                scaled_loss(run, *batch(run, rank, world_size)).backward()
                states[rank] = torch.get_rng_state()
                total.append([p.grad / world_size for p in run.model.parameters()])
                run.optimizer.zero_grad()
            means = [sum(parts) for parts in zip(*total, strict=True)]
            for parameter, mean in zip(run.model.parameters(), means, strict=True):
                parameter.grad = mean
            step(run)
        return snapshot(run)["weights"]
