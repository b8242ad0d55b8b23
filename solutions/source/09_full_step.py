# %% [markdown]
# # Exercise 09 · The whole window
#
# DDP, gradient accumulation, fp16, clipping, a schedule: you have seen each alone. **Write** `full_step(model, optimizer, scaler, schedule, window, max_norm)`:
# one window with all of them, every line in its place.
#
# | | |
# | --- | --- |
# | who calls it | every rank, once a window, with its own micro-batches |
# | `model` | wrapped in DDP; linear layers, some perhaps frozen; maps `x` of shape `[N, 6]` to logits `[N, 3]` |
# | `window` | a list of `(x, y)`, at least one; sizes and number of micro-batches may differ between ranks |
# | the gradient | that of the **mean** cross entropy over **all samples of all ranks** in this window |
# | forward and loss | under autocast, in float16, on `"cpu"`; backward is not |
# | on the wire | the gradients cross **once** a window; small extras, such as a count, are fine |
# | clipping | once, of the window's true gradient, to a norm of `max_norm` |
# | if a gradient on **any** rank is inf or nan | **no** rank steps; every scaler halves its scale; the schedule does not move |
# | otherwise | optimizer and schedule advance by one, on every rank |
# | the next window | begins without gradients of this one |
# | returns | True if the step was taken, False if it was skipped |
#
# About 25 minutes. Lesson [09](../notebooks/09_all_together.ipynb), sections 1 to 3, has the order of the lines; what the loss is divided by is in
# lesson [07](../notebooks/07_gradient_accumulation.ipynb), section 7.

# %%
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def full_step(model, optimizer, scaler, schedule, window, max_norm):
    """Take one step with this window, or skip it on all ranks; return if it was taken."""
    # BEGIN SOLUTION accumulate, all-reduce once, then everything that needs the sum
    samples = torch.tensor(sum(len(y) for _, y in window))
    dist.all_reduce(samples)  # of all ranks, known before the first backward
    # DDP averages over ranks: Σ loss / (samples / world_size) becomes Σ loss / samples.
    divisor = samples.item() / dist.get_world_size()
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        # The forward is inside as well: there DDP decides if backward will all-reduce.
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()  # one scale for the whole window
    # Now .grad is the window's, the same on every rank: an inf of one is an inf of all.
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # It goes down when a step is skipped, and does so on all ranks alike.
    stepped = scaler.get_scale() >= scale
    if stepped:
        schedule.step()  # counts steps that were taken
    return stepped
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Two ranks, windows of four micro-batches, real digits. In window 20 a pixel of rank 1 is inf; the ✕ are the windows for which your function returns False.

# %% tags=["nbval-ignore-output"]
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, flight, launch, models, plots, report


def train(windows=44, micro_batch=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=windows)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=15)
    batches = list(data.shard(data.digits()[0], micro_batch))
    for step in range(windows):
        window = batches[4 * step : 4 * step + 4]
        if step == 20 and dist.get_rank() == 1:
            window[0][0][0, 0] = float("inf")
        scale, before = scaler.get_scale(), len(flight.log())
        stepped = full_step(model, optimizer, scaler, schedule, window, max_norm=1.0)
        calls = sum(call.name == "all_reduce" for call in flight.log()[before:])
        loss = sum(F.cross_entropy(model.module(x), y).item() for x, y in window) / 4
        mean = torch.tensor(loss)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        report(step=step, loss=mean, loss_scale=scale, skipped=not stepped, calls=calls)
    return schedule.last_epoch


run = launch(train)
print(f"the schedule counted {run.values[0]} steps; "
      f"all-reduces in the last window: {run.records[-1]['calls']}")  # fmt: skip
plots.loss_scale(run, growth_interval=15)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time, on up to three ranks. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("09_full_step", full_step)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three places: *before* the micro-batches (what is the loss divided by?), *for each* micro-batch (forward, loss, scaled backward), *after* them
# (everything that needs the window's gradient).
# </details>
#
# <details><summary>Hint 2</summary>
#
# All micro-batches but the last run inside `model.no_sync()`, forward and backward. The divisor is (samples of all ranks) / (number of ranks):
# one small all-reduce tells it to everybody.
# </details>
#
# <details><summary>Hint 3</summary>
#
# After the loop: `unscale_`, clip, `scaler.step`, `update`, `zero_grad`. Then compare the scale with the one before `update`: if it went down,
# the step was skipped, on all ranks, and the schedule stays where it is.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# To look at one's own loss seems the shortest way to know if the step will be taken. Only the rank with the inf sees it there. The others'
# gradients are spoilt as well, by the all-reduce, and their steps skipped, but their schedules go on:


# %% tags=["solution-only", "nbval-ignore-output"]
from ddp_course.accumulation import Window, accumulate


def looks_at_its_own_loss(model, optimizer, scaler, schedule, window, max_norm):
    window, finite = Window(window), True
    divisor = window.divisor()
    for x, y in accumulate(model, window):
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
        scaler.scale(loss).backward()
        finite = finite and bool(loss.isfinite())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if finite:  # on this rank
        schedule.step()
    return finite


assert not check("09_full_step", looks_at_its_own_loss, seed=1)
