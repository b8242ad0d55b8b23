# %% [markdown]
# # Exercise 14 · Capstone: a script for one process, made distributed
#
# Lesson [14](../notebooks/14_capstone.ipynb) has the script for one process, runs it, and shows what is measured here. **Write**
# `capstone(model, train_set, test_set, plan)`: the same training on any number of ranks, in any precision, that can be stopped and started again.
#
# | | |
# | --- | --- |
# | who calls it | every rank; the process group is up |
# | `model` | a GPT: numbers `[N, T]` → logits `[N, T, V]`. Each rank's has **other weights**: rank 0's are the ones to begin with |
# | `train_set`, `test_set` | items `x, y`, each int64 `[T]`; all items have the same `T` |
# | `plan` | `epochs`, `micro_batch` (sequences per rank and forward), `accumulation_steps`, `learning_rate`, `warmup_steps`, `max_norm`, `precision` (`"fp32"`, `"bf16"`, `"fp16"`), `init_scale` (of fp16), `seed`, `checkpoint` (a path, or `""`) |
# | order | that of a `DistributedSampler`, shuffled with `plan.seed`, another one in every epoch; nothing is dropped, the last micro-batch and the last window of an epoch are what is left |
# | a window's loss | the mean over **all its tokens on all ranks**; one all-reduce of the gradients a window |
# | a step | clip the gradient's norm to `max_norm`; `AdamW` with its defaults; learning rate × `factor(step, …)`, which is given, with `steps` = `plan.epochs` × the windows of an epoch; a step skipped in fp16 does not count |
# | checkpoint | if `plan.checkpoint` is not `""`: written after every epoch; if the file is there at the start, go on from it, as if nothing had happened |
# | returns, on every rank | a dict: `weights` (the model's own `state_dict`), `losses` (of each window, also of one that was skipped: the mean over all ranks; since the start or restart), `test_loss` (per token, every item of `test_set` **once**, without autocast), `tokens_per_s` (tokens trained on, of all ranks, per second, by the slowest rank's clock, from the first batch to the last step) |
# | on real text | below the loss of guessing each character by its frequency |
#
# The models of the checks are in float64 where the precision is `"fp32"`, to see mistakes and not rounding: add up in float64 too. No model has dropout.
#
# An hour or more. Everything in it was in an exercise before: 05 to 10. What the package has for it may be used (`ddp_course.accumulation`, `amp`, `checkpoint`, `data`), or plain PyTorch.

# %%
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


def factor(step, warmup_steps, steps):
    """The learning rate's share of its peak: linear warm-up, then half a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


# %%
def capstone(model, train_set, test_set, plan):
    """Train a GPT by `plan` on all ranks; return weights, losses, test_loss, tokens_per_s."""
    # BEGIN SOLUTION sampler, DDP, windows, mixed precision, schedule, checkpoint, exact test loss
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(train_set, seed=plan.seed)
    loader = DataLoader(train_set, plan.micro_batch, sampler=sampler)
    model = DistributedDataParallel(model)  # sends rank 0's weights to all
    optimizer = torch.optim.AdamW(model.parameters(), plan.learning_rate)
    steps = plan.epochs * math.ceil(len(loader) / plan.accumulation_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(step, plan.warmup_steps, steps)
    )
    fp16 = plan.precision == "fp16"
    scaler = torch.amp.GradScaler("cpu", init_scale=plan.init_scale, enabled=fp16)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(plan.precision)
    parts = {"model": model.module, "optimizer": optimizer}  # names without "module."
    parts |= {"schedule": schedule, "scaler": scaler}
    first_epoch = 0
    if plan.checkpoint and os.path.exists(plan.checkpoint):  # every rank reads it
        state = torch.load(plan.checkpoint)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first_epoch = state["epoch"]

    losses, tokens, begun = [], 0, time.perf_counter()
    for epoch in range(first_epoch, plan.epochs):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for start in range(0, len(batches), plan.accumulation_steps):
            window = batches[start : start + plan.accumulation_steps]  # the last may be shorter
            # All ranks have equally many: the sampler pads. So this is the global window's mean.
            size = sum(y.numel() for _, y in window)
            loss_of_window = torch.zeros(())
            for number, (x, y) in enumerate(window, 1):
                # DDP decides in the forward whether the backward will all-reduce.
                model.require_backward_grad_sync = number == len(window)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    logits = model(x).flatten(0, 1)
                    loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / size
                scaler.scale(loss).backward()
                loss_of_window += loss.detach()
            scaler.unscale_(optimizer)  # before clipping
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:  # the step was taken
                schedule.step()
            dist.all_reduce(loss_of_window)
            losses.append(loss_of_window.item() / world_size)
            tokens += size * world_size
        if plan.checkpoint:
            if rank == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(state | {"epoch": epoch + 1}, plan.checkpoint + ".tmp")
                os.replace(plan.checkpoint + ".tmp", plan.checkpoint)  # the old or the new
            dist.barrier()  # nobody goes on before it is there
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # one number for all ranks

    sums = torch.zeros(2, dtype=torch.float64)  # of losses, of tokens
    mine = Subset(test_set, range(rank, len(test_set), world_size))  # each item on one rank
    with torch.no_grad():
        for x, y in DataLoader(mine, plan.micro_batch):
            logits = model.module(x).flatten(0, 1)  # the bare model: ranks may have fewer batches
            loss = F.cross_entropy(logits, y.flatten(), reduction="sum")
            sums += torch.tensor([loss.item(), y.numel()])
    dist.all_reduce(sums)
    return {
        "weights": model.module.state_dict(),
        "losses": losses,
        "test_loss": (sums[0] / sums[1]).item(),
        "tokens_per_s": tokens / seconds.item(),
    }
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# On the Python manual's text: one rank, and two ranks with half the micro-batch. The curves should lie on each other.

# %% tags=["nbval-ignore-output"]
from ddp_course import data, launch, models, plots
from ddp_course.grading.exercises.capstone import Plan


def try_it(micro_batch):
    torch.set_num_threads(1)
    train, test = data.characters(context=32)
    torch.manual_seed(dist.get_rank())
    model = models.GPT(len(train.vocabulary), context=32, width=48)
    plan = Plan(epochs=1, micro_batch=micro_batch, warmup_steps=8)
    return capstone(model, Subset(train, range(2560)), Subset(test, range(100)), plan)


curves = {}
for nproc, micro_batch in ((1, 32), (2, 16)):
    mine = launch(try_it, micro_batch, nproc=nproc, timeout=120).values[0]
    print(f"{nproc} rank(s): test loss {mine['test_loss']:.3f}", end=", ")
    print(f"{mine['tokens_per_s']:.0f} tokens/s")
    records = [{"rank": 0, "step": n, "loss": x} for n, x in enumerate(mine["losses"])]
    curves[f"{nproc} rank(s), micro_batch {micro_batch}"] = records
plots.compare(curves, title="Your loss by step, with one rank and with two")

# %% [markdown]
# ## Check it
#
# Some seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("14_capstone", capstone)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Begin with exercise 06's loop, and check: the message names what is missing next. Then windows (07), `no_sync` (07), clipping and the schedule, fp16 (08), the checkpoint (09), the
# test loss (05), and in the end the seconds.
# </details>
#
# <details><summary>Hint 2</summary>
#
# With a `DistributedSampler` all ranks have equally many sequences in a window. So DDP's average over ranks of (summed loss / this rank's tokens in the window) is the mean
# over the global window. Count the window's tokens first, then go through its micro-batches.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Make every part first (model in DDP, optimizer, schedule, scaler), then load the checkpoint into them, then begin with its epoch. `GradScaler("cpu", enabled=False)` does nothing,
# so one loop serves all three precisions; `get_scale()` falls exactly when a step was skipped.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# With fp16 the schedule is stepped in every window, also in those that the scaler skipped. All invariants hold but one: the first steps are taken with a learning rate that
# belongs to later ones.


# %% tags=["solution-only", "nbval-ignore-output"]
import ast
import inspect

source = inspect.getsource(capstone)
source = source.replace("if scaler.get_scale() >= scale:", "if True:")
changed = {**globals()}
exec(compile(ast.parse(source), "<changed>", "exec"), changed)
assert not check("14_capstone", changed["capstone"], seed=1)
