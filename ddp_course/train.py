"""Train with DDP, gradient accumulation and mixed precision. `train` is the whole loop, on one
screen.

One process:              python -m ddp_course.train
Two ranks, one machine:   torchrun --nproc-per-node 2 -m ddp_course.train
Two machines, on each:    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
                              --rdzv-endpoint FIRST_MACHINE:29400 -m ddp_course.train
From a notebook:          launch(train.run, train.Settings(precision="bf16"), nproc=2)
"""

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from . import checkpoint, data, fsdp
from .accumulation import accumulate, windows
from .compression import compressed_ddp
from .logs import tensorboard
from .process_group import process_group, this_rank, threads_per_rank
from .rank import report
from .settings import Parser, Settings, add_arguments, settings_from


def train(
    model, loader, optimizer, amp, scheduler, *, epochs, accumulation_steps=1, done=(0, 0, 0)
) -> Iterator[dict]:
    """Train, and yield one record for every optimizer step. Every rank must iterate to the end.

    `model` is wrapped in DDP, `loader` comes from `data.shard`, `amp` is a `MixedPrecision`. `done`
    says where a resume goes on: (epoch, step, batches of that epoch). A record holds step and epoch
    (from 0), batches_done, loss (mean over the global window), local_loss (this rank's part of it),
    learning_rate, grad_norm, loss_scale, skipped, samples (targets of all ranks), seconds and
    samples_per_s.
    """
    device, world_size = this_rank().device, this_rank().world_size
    first_epoch, step, batches_done = done
    check_equal_parts(loader)  # then DDP's average of means is the mean over the global window
    clock = time.perf_counter()
    for epoch in range(first_epoch, epochs):
        loader.sampler.set_epoch(epoch)  # another order every epoch, the same on all ranks
        for window in windows(itertools.islice(loader, batches_done, None), accumulation_steps):
            local = torch.zeros((), device=device)
            for x, y in accumulate(model, window):  # all-reduces after the last micro-batch only
                with amp.autocast():
                    loss = summed_loss(model(x.to(device)), y.to(device)) / window.samples
                amp.backward(loss)
                local += loss.detach()
            learning_rate = optimizer.param_groups[0]["lr"]
            taken = amp.step(optimizer)  # unscale, clip, step, update, zero
            if not taken.skipped:
                scheduler.step()
            batches_done += len(window)
            loss = mean_over_ranks(local)  # waits for the device, so time is true
            seconds = time.perf_counter() - clock
            yield {
                "step": step,
                "epoch": epoch,
                "batches_done": batches_done,
                "loss": loss,
                "local_loss": local.item(),
                "learning_rate": learning_rate,
                **taken._asdict(),
                "samples": window.samples * world_size,
                "seconds": seconds,
                "samples_per_s": window.samples * world_size / seconds,
            }
            step += 1
            clock = time.perf_counter()
        batches_done = 0


def summed_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy summed over all targets: logits […, classes], y […]."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")


def check_equal_parts(loader) -> None:
    """Raise ValueError, on every rank, if ranks get unequal parts. Every rank must call it.

    Sums would then have to be divided by `Window.divisor`, one more all-reduce a step (lesson 07).
    """
    if not dist.is_initialized():
        return
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (len(loader.sampler), loader.batch_size))
    if len(set(parts)) > 1:
        told = "; ".join(f"rank {k}: {n} items by {size}" for k, (n, size) in enumerate(parts))
        raise ValueError(f"ranks get unequal parts ({told}): use data.shard's loader.")


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the mean of a scalar over all ranks, the same on each. Every rank must call it."""
    if not dist.is_initialized():
        return value.item()
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model, loader, amp) -> tuple[float, float]:
    """Return (mean loss, accuracy) over a whole data set, each item counted once. Every rank must
    call it.

    `loader` comes from `data.exact_shard`: sums are all-reduced, not means, since ranks may hold
    different numbers of items.
    """
    model = getattr(
        model, "module", model
    )  # no collective in the loop: ranks may have fewer batches
    device = this_rank().device
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, targets
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        with amp.autocast():
            logits = model(x)
        correct = (logits.argmax(-1) == y).sum()
        sums += torch.stack([summed_loss(logits.float(), y), correct, y.new_tensor(y.numel())])
    model.train()
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, correct, targets = sums.tolist()
    return loss / targets, correct / targets


def warmup_then_cosine(optimizer, warmup_steps: int, steps: int):
    """Return a schedule: linear warm-up to the full learning rate, then half a cosine to 0."""

    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 * (
            1 + math.cos(math.pi * min(1, (step - warmup_steps) / max(1, steps - warmup_steps)))
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def run(settings: Settings, tell: Callable = report) -> dict:
    """Train and evaluate by `settings`; `tell(**record)` hears of each step. Every rank must call
    it.

    Returns {"test_loss", "accuracy", "steps", "weights"}, the same on all ranks; `weights` is the
    model's state. Records have, beside those of `train`, steps and communication (share of time).
    """
    settings.check_place()
    torch.manual_seed(settings.seed)  # the same first weights on every rank
    train_set, test_set = settings.load_data()
    loader = data.shard(train_set, settings.micro_batch, seed=settings.seed)
    model = settings.build_model(train_set).to(this_rank().device)
    amp = settings.mixed_precision()
    amp.check_model(model)
    if dist.is_initialized():
        model = _distribute(model, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    window = settings.window(this_rank().world_size)
    steps = settings.epochs * math.ceil(len(loader) / window)
    scheduler = warmup_then_cosine(optimizer, settings.warmup_steps, steps)
    torch.manual_seed(settings.seed + this_rank().rank)  # dropout differs between ranks

    parts = {"model": model, "optimizer": optimizer, "amp": amp, "scheduler": scheduler}
    done = _resume(settings, parts, loader)
    schedule = {"epochs": settings.epochs, "accumulation_steps": window}
    with tensorboard(settings.tensorboard) as log:
        for record in train(model, loader, optimizer, amp, scheduler, **schedule, done=done):
            record |= {**_communication(model, record["seconds"]), "steps": steps}
            tell(**record)
            log(record)
            if settings.checkpoint and record["batches_done"] == len(loader):
                epoch, step = record["epoch"] + 1, record["step"] + 1
                extra = settings.identity()
                checkpoint.save(settings.checkpoint, **parts, epoch=epoch, step=step, extra=extra)
    weights = fsdp.whole(getattr(model, "module", model).state_dict())
    if fsdp.is_sharded(model):  # its forward is collective: ranks with fewer batches would hang it
        model = settings.build_model(train_set).to(this_rank().device)
        model.load_state_dict(weights)
    test_loss, accuracy = evaluate(model, data.exact_shard(test_set, 256), amp)
    return {"test_loss": test_loss, "accuracy": accuracy, "steps": steps, "weights": weights}


def _distribute(model, settings: Settings):
    """Return the model as DDP's, or sharded."""
    if settings.strategy == "fsdp":
        return fsdp.shard(model)
    model = compressed_ddp(model, settings.compression)
    model._set_ddp_runtime_logging_sample_rate(1)  # its clock, for every step
    return model


def _communication(model, seconds: float) -> dict[str, float]:
    """Return {"communication": share of the step's seconds}, from DDP's own clock, if it has one.

    From the first bucket's all-reduce to the end of the last; it may overlap with the backward.
    """
    if not isinstance(model, DistributedDataParallel):
        return {}
    measured = model._get_ddp_logging_data().get("backward_comm_time")  # nanoseconds
    return {} if measured is None else {"communication": measured / 1e9 / seconds}


def _resume(settings: Settings, parts: dict, loader) -> tuple[int, int, int]:
    """Load the checkpoint if one is asked for and there; return (epoch, step, batches) that are
    done.
    """
    if not settings.resume or not Path(settings.checkpoint).exists():
        return 0, 0, 0
    if isinstance(parts["model"], DistributedDataParallel):
        _settle_buckets(parts["model"], loader, parts["amp"])
    state = checkpoint.load(settings.checkpoint, **parts, any_world_size=settings.ranks > 0)
    for name, value in settings.identity().items():
        if (state["extra"] or {}).get(name, value) != value:
            raise ValueError(
                f"{settings.checkpoint} was saved by a run with {name}={state['extra'][name]}, not "
                f"{value}: resume with the same settings."
            )
    return state["epoch"], state["step"], state["batches_done"]


def _settle_buckets(model, loader, amp) -> None:
    """Let DDP lay out its buckets as after a first step: the layout decides the order of sums.

    Without it a resumed run of three ranks differs in the last bit from one that never stopped.
    """
    x, y = (part.to(this_rank().device) for part in next(iter(loader)))
    with amp.autocast():
        loss = summed_loss(model(x), y)
    loss.backward()
    model.zero_grad()


def describe(record: dict) -> str:
    """Return one line of a log for a step's record."""
    skipped = "  skipped (overflow)" if record["skipped"] else ""
    return (
        f"step {record['step'] + 1:4d}/{record['steps']}  loss {record['loss']:.4f}  "
        f"lr {record['learning_rate']:.2e}  grad norm {record['grad_norm']:.3f}  "
        f"{_scale(record['loss_scale'])}{record['samples_per_s']:.0f} samples/s{skipped}"
    )


def _scale(loss_scale: float) -> str:
    """A loss scale as a power of two; nothing where there is none, in fp32 and bf16."""
    if loss_scale == 1:
        return ""
    return f"loss scale 2^{math.log2(loss_scale):.0f}  " if loss_scale > 0 else "loss scale 0  "


def main(argv: list[str] | None = None) -> int:
    """Train as a script: under torchrun on all its ranks, otherwise in this one process."""
    parser = Parser(
        prog="ddp_course.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        settings = settings_from(parser.parse_args(argv))
    except ValueError as error:
        if this_rank().local_rank == 0:  # once, not from every rank
            print(f"ddp_course.train: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(threads_per_rank(this_rank().local_world_size))
    with process_group() as me:
        first = me.rank == 0
        result = run(settings, tell=lambda **record: print(describe(record)) if first else None)
        if first:
            print(summary(result))
    return 0


def summary(result: dict) -> str:
    """Return one line on what `run` returned."""
    return f"test loss {result['test_loss']:.4f}, test accuracy {result['accuracy']:.2%}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # PyTorch's threads now and then abort a process that is already done
