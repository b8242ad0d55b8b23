# %% [markdown]
# # Exercise 09 · Stop, and go on as if nothing had happened
#
# A run is saved in the middle of an epoch, dies, and is started again. **Write** `checkpoints(folder, model, optimizer, schedule, scaler, progress)`: it
# returns two functions without parameters, `save` and `load`, for a run made of these parts. The resumed run must end with the very same bits.
#
# | | |
# | --- | --- |
# | who calls it | every rank, at every start; then all ranks call `save()` between two steps, now and then, or `load()` once, before the first step |
# | `folder` | the path of a folder that exists and that all ranks share; what you write there is yours to decide |
# | `model` | with DDP around it when it is saved; perhaps **without** DDP when it is loaded |
# | `optimizer`, `schedule`, `scaler` | PyTorch's, each with `state_dict` and `load_state_dict` |
# | `progress` | a dict, `{"epoch": 2, "batches_done": 3}`, which the training loop reads and changes; `load` changes the one it was given |
# | dropout | draws from torch's global generator; **each rank has its own** state (`torch.get_rng_state`) |
# | `save()` | leaves the run as it is; returns, on every rank, when the **whole** checkpoint is in the folder; the last save counts |
# | if a save fails half-way | the checkpoint before it can still be loaded (checked with one rank) |
# | `load()` | puts this rank where it was at the last save; the number of ranks is the same |
#
# About 25 minutes. Lesson [09](../notebooks/09_all_together.ipynb), section 4, has all you need.

# %%
import os

import torch
import torch.distributed as dist


def checkpoints(folder, model, optimizer, schedule, scaler, progress):
    """Return (save, load) for a run made of these parts, with its files in `folder`."""
    # BEGIN SOLUTION save writes all that decides how the run goes on, load gives it back
    model = getattr(model, "module", model)  # names without "module.", with DDP or not
    parts = {"model": model, "optimizer": optimizer}
    parts |= {"schedule": schedule, "scaler": scaler}
    # One file a rank: each has its own random numbers.
    path = os.path.join(folder, f"rank{dist.get_rank()}.pt")

    def save():
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"progress": progress, "random": torch.get_rng_state()}
        torch.save(state, path + ".tmp")  # beside the old file, which stays whole
        os.replace(path + ".tmp", path)  # in one step: the old one or the new one
        dist.barrier()  # nobody goes on before all files are there

    def load():
        state = torch.load(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        progress.update(state["progress"])  # the caller's dict, not a new one
        torch.set_rng_state(state["random"])  # last: whatever came before may draw

    return save, load
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Two ranks train with dropout and a loss scale that begins too high. They save in the middle of the second epoch and go on. Then, in new
# processes, the run is loaded and trained to the end. If nothing is forgotten, its curve lies on the other.

# %%
import tempfile

import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, launch, plots, report

STEPS, STOP = 33, 16  # an epoch has 12 steps on two ranks


def build():
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10)
    torch.manual_seed(dist.get_rank())  # dropout differs between ranks
    return model, optimizer, schedule, scaler, {"epoch": 0, "batches_done": 0}


# %%
def train(until, model, optimizer, schedule, scaler, progress, save=None):
    loader = data.shard(data.digits()[0], micro_batch=60)
    step = progress["epoch"] * len(loader) + progress["batches_done"]
    while step < until:
        loader.sampler.set_epoch(progress["epoch"])
        for x, y in list(loader)[progress["batches_done"] :][: until - step]:
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:
                schedule.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            report(step=step, loss=mean)
            step += 1
            progress["batches_done"] += 1
            if save and step == STOP:
                save()
        if progress["batches_done"] == len(loader):
            progress.update(epoch=progress["epoch"] + 1, batches_done=0)


# %% tags=["nbval-ignore-output"]
def never_stopped(folder):
    parts = build()
    save, _ = checkpoints(folder, *parts)
    train(STEPS, *parts, save=save)


def resumed(folder):
    parts = build()
    checkpoints(folder, *parts)[1]()
    train(STEPS, *parts)


with tempfile.TemporaryDirectory() as folder:
    whole, rest = launch(never_stopped, folder), launch(resumed, folder)
losses = {record["step"]: record["loss"] for record in whole.records}
gap = max(abs(record["loss"] - losses[record["step"]]) for record in rest.records)
title = f"Resumed at step {STOP}, the loss is {'the same' if gap == 0 else 'another'}"
plots.compare({"never stopped": whole, f"resumed at {STOP}": rest}, title=title)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time, on up to three ranks. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("09_resume", checkpoints)

# %% tags=["solution-only"]
assert gap == 0
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Two functions inside a function see its parameters: `def save(): torch.save({...}, path)`, `def load(): ...`, `return save, load`. Go through the
# table: each row in the middle is something to save. One file for each rank is the shortest way.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `getattr(model, "module", model)` is the model inside DDP, or the model itself if there is no DDP around it. `progress = state["progress"]`
# would only give a *name* in your function another dict; `progress.update(...)` changes the one that the loop reads.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Write to `path + ".tmp"` and let `os.replace(path + ".tmp", path)` put it where it belongs. `dist.barrier()` at the end of `save`, on every
# rank, not inside an `if`.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# "Rank 0 saves, all load": the weights are the same everywhere, and so are optimizer, schedule and scaler. The random numbers are not. All ranks
# would go on with those of rank 0, and drop the same units:


# %% tags=["solution-only", "nbval-ignore-output"]
def rank_0_saves(folder, model, optimizer, schedule, scaler, progress):
    save_all, _ = checkpoints(folder, model, optimizer, schedule, scaler, progress)
    parts = getattr(model, "module", model), optimizer, schedule, scaler

    def load():
        state = torch.load(os.path.join(folder, "rank0.pt"))
        for name, part in zip(
            ("model", "optimizer", "schedule", "scaler"), parts, strict=True
        ):
            part.load_state_dict(state[name])
        progress.update(state["progress"])
        torch.set_rng_state(state["random"])

    return save_all, load


assert not check("09_resume", rank_0_saves, seed=1)

# %% [markdown] tags=["solution-only"]
# The solution above has a weakness of its own: when *one* of several ranks fails in the middle of a save, the folder holds files of two checkpoints.
# `ddp_course.checkpoint` therefore gathers the random states on rank 0 and writes one file for all: the old checkpoint or the new one, nothing between.
