"""Training steps on two ranks: this course's loop, the same by hand in plain torch, and wrappers.

All contenders train a model of their own on the same batches, in the same ranks, in turns. Each
does what the course's loop does in a step: micro-batches without synchronisation, clipping, the
learning-rate schedule, and the mean loss over the ranks as a number.
"""

import contextlib
import copy
import functools
import importlib.util
import itertools
import math
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from .. import data, models
from ..amp import PRECISIONS, MixedPrecision
from ..launch import launch
from ..train import train, warmup_then_cosine
from .cases import COURSE, Case, Goal, seconds_on_ranks

PLAIN = "plain torch, by hand"
WRAPPERS = {"accelerate": "accelerate", "Fabric": "lightning_fabric"}
TASKS = {"MLP": ("mlp", 64), "CNN": ("cnn", 32), "GPT": ("gpt", 8)}  # model, micro-batch
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATE, MAX_NORM, STEPS = 1e-3, 1.0, 10**6


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each model, precision and number of accumulated micro-batches."""
    cases = []
    for task, precision, accumulated in itertools.product(TASKS, PRECISIONS, (1, 4)):
        if (task, precision) == ("CNN", "fp16"):
            continue  # on a CPU many times slower than fp32: the course refuses it
        say(f"{task}, {precision}, accumulation {accumulated}")
        run = launch(contest, task, precision, accumulated, rounds, nproc=2, timeout=600)
        case = Case(f"{task}, {precision}, accumulation {accumulated}", "samples/s",
                    goals=[Goal(0.99, PLAIN)], more_is_better=True)  # fmt: skip
        case.samples, case.notes = run.values[0]
        case.goals += [Goal(1, name) for name in WRAPPERS if name in case.samples]
        cases.append(case)
    return cases


def contest(task: str, precision: str, accumulated: int, rounds: int):
    """Return ({contender: samples per second a round}, notes). Every rank must call it."""
    torch.set_num_threads(1)
    dataset = data.digits()[0] if task != "GPT" else data.characters()[0]
    name, micro_batch = TASKS[task]
    sizes = {"vocabulary": len(dataset.vocabulary)} if task == "GPT" else {}
    torch.manual_seed(0)
    model = models.build(name, **sizes)
    contenders, notes = {}, []
    for contender, make in MAKERS.items():
        package = WRAPPERS.get(contender)
        if package and importlib.util.find_spec(package) is None:
            notes.append(f'{contender}: left out, not installed (pip install -e ".[peers]")')
            continue
        mine, loader = copy.deepcopy(model), data.shard(dataset, micro_batch)
        with warnings.catch_warnings(), _type_of_linear(mine) as computed_in:
            warnings.simplefilter("ignore")
            steps = make(mine, loader, precision, accumulated)
            losses = [next(steps) for _ in range(5)]
        if computed_in != {TYPES[precision]}:
            notes.append(f"{contender}: left out, it computes in {computed_in}")
            continue
        contenders[contender] = steps, losses
    _check_losses({name: losses for name, (_, losses) in contenders.items()})
    calls = {name: functools.partial(next, steps) for name, (steps, _) in contenders.items()}
    samples = 2 * micro_batch * accumulated
    seconds = seconds_on_ranks(calls, rounds)
    return {name: [samples / took for took in seconds[name]] for name in seconds}, notes


@contextlib.contextmanager
def _type_of_linear(model):
    """Yield the set of the types that the model's last linear layer computes in."""
    *_, last = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    seen = set()
    hook = last.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    try:
        yield seen
    finally:
        hook.remove()


def _check_losses(losses: dict[str, list[float]]) -> None:
    """Raise AssertionError if they do not all train alike: then times would compare nothing."""
    for name, seen in losses.items():
        assert math.dist(seen, losses[PLAIN]) < 0.02 * math.hypot(*seen), (name, losses)


# ---- contenders: generators that take one optimizer step at a time and yield the mean loss


def _course(model, loader, precision, accumulated):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = warmup_then_cosine(optimizer, 10, STEPS)
    amp = MixedPrecision(precision, max_norm=MAX_NORM, init_scale=2.0**8)
    how = {"epochs": STEPS, "accumulation_steps": accumulated}
    loader = _whole_windows(loader, accumulated)
    for record in train(model, loader, optimizer, amp, schedule, **how):
        yield record["loss"]


def _plain(model, loader, precision, accumulated):
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = warmup_then_cosine(optimizer, 10, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=precision == "fp16")
    for window in _windows(loader, accumulated):
        mean = torch.zeros(())
        for index, (x, y) in enumerate(window):
            last = index == accumulated - 1
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.amp.autocast("cpu", dtype=TYPES[precision], enabled=precision != "fp32"):
                    loss = _loss(model(x), y) / accumulated
                scaler.scale(loss).backward()
            mean += loss.detach()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        yield mean.item() / dist.get_world_size()


def _accelerate(model, loader, precision, accumulated):
    from accelerate import Accelerator

    mixed = {"fp32": "no"}.get(precision, precision)
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed, gradient_accumulation_steps=accumulated
    )
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = warmup_then_cosine(optimizer, 10, STEPS)
    model, optimizer = accelerator.prepare(model, optimizer)
    for window in _windows(loader, accumulated):
        mean = torch.zeros(())
        for x, y in window:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = _loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            mean += loss.detach() / accumulated
        schedule.step()
        yield accelerator.reduce(mean, "mean").item()


def _fabric(model, loader, precision, accumulated):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    mixed = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[precision]
    place = {"accelerator": "cpu", "devices": dist.get_world_size(), "strategy": "ddp"}
    fabric = Fabric(**place, precision=mixed, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = warmup_then_cosine(optimizer, 10, STEPS)
    model, optimizer = fabric.setup(model, optimizer)
    for window in _windows(loader, accumulated):
        mean = torch.zeros(())
        for index, (x, y) in enumerate(window):
            with fabric.no_backward_sync(model, enabled=index < accumulated - 1):
                loss = _loss(model(x), y) / accumulated
                fabric.backward(loss)
            mean += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield fabric.all_reduce(mean, reduce_op="mean").item()


MAKERS = {PLAIN: _plain, COURSE: _course, "accelerate": _accelerate, "Fabric": _fabric}


def _loss(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def _windows(loader, accumulated):
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        batches = iter(_whole_windows(loader, accumulated))
        while window := list(itertools.islice(batches, accumulated)):
            yield window


class _whole_windows:
    """A loader without the ragged last window of an epoch and its short batch, which by-hand loops
    weight wrongly (lesson 07)."""

    def __init__(self, loader, accumulated):
        self._loader, self.sampler, self.batch_size = loader, loader.sampler, loader.batch_size
        full = len(loader.sampler) // loader.batch_size
        self._batches = full // accumulated * accumulated

    def __len__(self):
        return self._batches

    def __iter__(self):
        return itertools.islice(self._loader, self._batches)
