"""The training of 14_capstone: its plan, a small GPT, its data, and all of it in one process."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DistributedSampler

from ... import models
from ..exercise import generator

VOCABULARY, CONTEXT = 11, 8
TEXT_CONTEXT = 32  # of the real text
TRAIN, TEST = 23, 7  # sequences: neither divides by two or three


@dataclass(frozen=True)
class Plan:
    """What is to be trained, and how."""

    epochs: int = 4
    micro_batch: int = 5
    accumulation_steps: int = 2
    learning_rate: float = 0.01
    warmup_steps: int = 2
    max_norm: float = 0.6
    precision: str = "fp32"
    init_scale: float = 2.0**16
    seed: int = 0
    checkpoint: str = ""


def plan_of(seed: int, **other) -> Plan:
    return Plan(seed=seed % 1000 + 1, **other)


def model_of(seed: int, rank: int) -> models.GPT:
    torch.manual_seed(seed + rank)  # each rank brings weights of its own
    return models.GPT(VOCABULARY, context=CONTEXT, width=8, layers=1, heads=2)


class Crash(Exception):
    """The end of a machine."""


class Sequences(Dataset):
    """Random numbers with a pattern in them; counts what it is asked for.

    `crash_at`: raise Crash when asked for the item of this count. `pause`: seconds that each item
    takes, as reading it might; `times` is when each was asked for.
    """

    def __init__(self, seed: int, length: int, crash_at: int | None = None, pause: float = 0.0):
        start = torch.randint(VOCABULARY, (length, 1), generator=generator(seed, length))
        noise = torch.randint(2, (length, CONTEXT + 1), generator=generator(seed, length, 1))
        self.numbers = (start + 2 * torch.arange(CONTEXT + 1) + noise) % VOCABULARY
        self.crash_at, self.pause = crash_at, pause
        self.asked, self.times = 0, []

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        if self.asked == self.crash_at:
            raise Crash
        self.asked += 1
        self.times.append(time.perf_counter())
        if self.pause:
            time.sleep(self.pause)
        return self.numbers[index][:-1], self.numbers[index][1:]


def factor(step: int, warmup_steps: int, steps: int) -> float:
    """The learning rate's share of its peak: linear warm-up, then half a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


class Simulated:
    """The training in one process, with a model for each rank, as it should be or with a change."""

    def __init__(self, seed: int, world_size: int, plan: Plan, **change):
        self.plan, self.world_size, self.change = plan, world_size, change
        self.train_set, self.test_set = Sequences(seed, TRAIN), Sequences(seed + 1, TEST)
        own = change.get("own_start", False)
        self.models = [model_of(seed, rank if own else 0) for rank in range(world_size)]
        if plan.precision == "fp32":
            self.models = [model.double() for model in self.models]
        rate = plan.learning_rate * change.get("rate", 1)
        self.optimizers = [torch.optim.AdamW(model.parameters(), rate) for model in self.models]
        self.scale = plan.init_scale if plan.precision == "fp16" else 1.0
        self.losses, self.parts = [], []  # of each step: the global mean; each rank's own
        epochs = [self._windows(epoch) for epoch in range(plan.epochs)]
        self.steps = sum(map(len, epochs))
        self.micro_batches = sum(len(window[0]) for windows in epochs for window in windows)
        self._taken, threads = 0, torch.get_num_threads()
        torch.set_num_threads(1)  # for tiny tensors more are slower, by far on a busy machine
        for epoch, windows in enumerate(epochs):
            for window in windows:
                self._step(window, epoch)
        torch.set_num_threads(threads)

    def _windows(self, epoch: int) -> list:
        """Return for each step, each rank's micro-batches, as lists of indices."""
        plan, parts = self.plan, []
        for rank in range(self.world_size):
            sampler = DistributedSampler(self.train_set, self.world_size, rank, seed=plan.seed)
            sampler.set_epoch(self.change.get("epoch", lambda epoch: epoch)(epoch))
            parts.append(_cut(_cut(list(sampler), plan.micro_batch), plan.accumulation_steps))
        windows = list(zip(*parts, strict=True))
        if self.change.get("drop_window"):
            windows = [window for window in windows if len(window[0]) == plan.accumulation_steps]
        return windows

    def _step(self, window, epoch: int) -> None:
        each = zip(self.models, window, strict=True)
        self.parts.append([self._backward(model, batches) for model, batches in each])
        self.losses.append(sum(self.parts[-1]) / self.world_size)
        if not self.change.get("alone"):
            _average(self.models)
        finite = all(p.grad.isfinite().all() for model in self.models for p in model.parameters())
        skip = self.plan.precision == "fp16" and not finite
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self._update(model, optimizer, skip, epoch)
        self.scale /= 2 if skip else 1
        self._taken += not skip or self.change.get("schedule") == "skipped too"

    def _backward(self, model, batches) -> float:
        """Return this rank's loss of the window: its gradients are in .grad."""
        total = sum(map(len, batches))
        shares = {
            "means added": [1.0] * len(batches),
            "by accumulation_steps": [1 / self.plan.accumulation_steps] * len(batches),
            "by len(window)": [1 / len(batches)] * len(batches),
            None: [len(picked) / total for picked in batches],
        }[self.change.get("shares")]
        told = 0.0
        for share, picked in zip(shares, batches, strict=True):
            numbers = self.train_set.numbers[picked]
            with torch.autocast("cpu", torch.float16, enabled=self.plan.precision == "fp16"):
                loss = mean_loss(model, numbers) * share
            (loss * self.scale).backward()
            told += loss.item()
        if self.change.get("clip") in ("local", "scaled"):
            self._clip(model, 1 if self.change["clip"] == "scaled" else self.scale)
        return told

    def _clip(self, model, scale: float) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.plan.max_norm * scale)

    def _update(self, model, optimizer, skip: bool, epoch: int) -> None:
        if not skip:
            for p in model.parameters():
                p.grad /= self.scale
            if "clip" not in self.change:
                self._clip(model, 1)
            rate = self.plan.learning_rate * self.change.get("rate", 1)
            optimizer.param_groups[0]["lr"] = rate * self._factor(epoch)
            optimizer.step()
        if not self.change.get("keep_gradients"):
            optimizer.zero_grad()

    def _factor(self, epoch: int) -> float:
        kind = self.change.get("schedule")
        if kind in ("none", "stuck"):
            return 1.0 if kind == "none" else factor(0, self.plan.warmup_steps, self.steps)
        step, steps = (epoch, self.plan.epochs) if kind == "epoch" else (self._taken, self.steps)
        return factor(step, self.plan.warmup_steps, steps)

    def weights(self, rank: int = 0) -> dict:
        return {name: w.detach() for name, w in self.models[rank].state_dict().items()}

    def test_loss(self, parts=None) -> float:
        """The mean loss of each test sequence once; or the mean over these groups' means."""
        numbers, model = self.test_set.numbers, self.models[0]
        with torch.no_grad():
            groups = parts or [range(len(numbers))]
            return sum(mean_loss(model, numbers[list(g)]).item() for g in groups) / len(groups)


def mean_loss(model, numbers: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens of sequences [N, T + 1]."""
    return F.cross_entropy(model(numbers[:, :-1]).flatten(0, 1), numbers[:, 1:].flatten())


def _average(models) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(p.grad for p in same) / len(same)
        for p in same:
            p.grad.copy_(mean)


def _cut(items: list, size: int) -> list:
    return [items[start : start + size] for start in range(0, len(items), size)]
