# %% [markdown]
# # 09 · All together
#
# **What you will do.** Join DDP, gradient accumulation, mixed precision, clipping and a schedule into one loop; move its lines one by one
# and watch what breaks; stop a run, start it again, and get the very same bits.
#
# **What you will learn.** Why each line stands where it stands, and what a checkpoint must hold.
#
# **What you need.** Lessons 06, 07 and 08. About 35 minutes.
#
# ---
# **The question.** You know each part. Ten lines in the right order train your model. How many wrong orders also run, without a word?

# %%
import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, flight, launch, models, predict, show

# %% [markdown]
# ## 1. From the loop of lesson 06 to the whole one
#
# One *window* of the plain loop, and one window with everything in it. `divisor` is lesson 07's: the targets of the window over all ranks,
# divided by the world size.


# %%
def plain_window(model, window, optimizer, scaler, schedule, divisor):
    for x, y in window:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def right(model, window, optimizer, scaler, schedule, divisor):
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= scale:
        schedule.step()


show.diff(plain_window, right)

# %% [markdown]
# Read it from the inside:
#
# 1. **forward** under `autocast`, inside `no_sync` for all but the last micro-batch: DDP decides in the forward (lesson 07);
# 2. **backward** of the *scaled* loss, still inside `no_sync`, but not under `autocast`;
# 3. once a window: **unscale, clip, step, update, zero**;
# 4. the **schedule** counts steps that were taken.
#
# ## 2. Move a line
#
# Five variants. In each of them one thing stands elsewhere, as it does in real scripts.


# %%
def clip_first(model, window, optimizer, scaler, schedule, divisor):
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= scale:
        schedule.step()


# %%
def update_inside(model, window, optimizer, scaler, schedule, divisor):
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= scale:
        schedule.step()


# %%
def sync_always(model, window, optimizer, scaler, schedule, divisor):
    for x, y in window:
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() >= scale:
        schedule.step()


# %%
def schedule_inside(model, window, optimizer, scaler, schedule, divisor):
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()
        schedule.step()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# %%
def unscale_inside(model, window, optimizer, scaler, schedule, divisor):
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()


# %%
order = predict.order(
    "Which of them is furthest from the right loss after 24 windows? Furthest first.",
    ["clip_first", "update_inside", "sync_always", "schedule_inside"],
)


# %% [markdown]
# All of them train the same network on the same windows, on two ranks.


# %%
def train_with(one_window, windows=24):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=windows)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    batches = list(data.shard(data.digits()[0], micro_batch=16))
    before = len(flight.log())
    for step in range(windows):
        first = 4 * step % 44  # micro-batches 44 and 45 of the epoch are left out
        window = batches[first : first + 4]
        one_window(model, window, optimizer, scaler, schedule, divisor=64)
    calls = [call for call in flight.log()[before:] if call.name == "all_reduce"]
    model.eval()
    x, y = data.digits()[0].tensors
    loss = F.cross_entropy(model.module(x), y).item()
    return loss, len(calls) / windows, optimizer.param_groups[0]["lr"]


# %% tags=["nbval-ignore-output"]
variants = (right, clip_first, update_inside, sync_always, schedule_inside)
results = {}
for variant in variants:
    results[variant.__name__] = launch(train_with, variant).values[0]
    loss, calls, rate = results[variant.__name__]
    print(
        f"{variant.__name__:16} loss {loss:.3f}   all-reduces a window {calls:.1f}   rate left {rate:.3f}"
    )

# %% tags=["nbval-ignore-output"]
loss = {name: result[0] for name, result in results.items()}
calls = {name: result[1] for name, result in results.items()}
assert loss["clip_first"] > 2 * loss["right"]  # nothing moves
assert loss["schedule_inside"] > 1.2 * loss["right"]  # the rate ran out after a quarter
assert abs(loss["update_inside"] - loss["right"]) > 0.02 * loss["right"]
assert abs(loss["sync_always"] - loss["right"]) < 0.01  # right, but …
assert calls["sync_always"] > 3 * calls["right"]  # … four times the traffic
wrong = [name for name in loss if name != "right"]
order.compare(sorted(wrong, key=lambda name: -abs(loss[name] - loss["right"])))

# %% [markdown]
# Four of five run to the end; the only word is a warning that speaks of something else. What went wrong in each:
#
# | variant | symptom | cause |
# | --- | --- | --- |
# | `clip_first` | hardly learns | clip saw gradients that still carried the scale, and cut them to nothing |
# | `update_inside` | another training | steps with a quarter of a window, with local gradients that no all-reduce has seen: the ranks drift apart |
# | `sync_always` | right, and slow | `no_sync` is missing: one all-reduce for each micro-batch |
# | `schedule_inside` | stops early | micro-batches are counted as steps: the learning rate is used up after a quarter of the windows |
# | `unscale_inside` | an error | below |

# %% tags=["nbval-ignore-output"]
from ddp_course import RankError

error = None
try:
    launch(train_with, unscale_inside)
except RankError as caught:
    error = caught
    print(error)
assert "unscale_() has already been called" in str(error)

# %% [markdown]
# The fifth is the kind one: it says so. And the second is the worst. Are its ranks still the same model?


# %%
def weights_after(one_window, windows=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    batches = list(data.shard(data.digits()[0], micro_batch=16))
    for step in range(windows):
        window = batches[4 * step : 4 * step + 4]
        one_window(model, window, optimizer, scaler, schedule, divisor=64)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def apart(run):
    """How far the ranks' weights are from each other."""
    return (run.values[0] - run.values[1]).norm().item()


# %% tags=["nbval-ignore-output"]
together, drifted = (apart(launch(weights_after, way)) for way in (right, update_inside))
print(f"distance between the ranks: right {together}, update_inside {drifted:.2f}")
assert together == 0 < drifted

# %% [markdown]
# ## 3. One scale for all ranks
#
# In lesson 08 an inf on one rank made *all* ranks skip, since the all-reduce carries it. That keeps their scales equal as long as they began equal.
# They need not: somebody restores the scaler's state on rank 0 only.
#
# > **Predict.** Rank 0 scales by 2^12, rank 1 by 2^10. Do the ranks' weights stay the same? Is there an error?


# %%
def with_scales(*powers):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** powers[dist.get_rank()])
    loader = data.shard(data.digits()[0], micro_batch=16)
    for _, (x, y) in zip(range(20), loader, strict=False):
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# %% tags=["nbval-ignore-output"]
equal, different = (
    apart(launch(with_scales, *powers)) for powers in ((12, 12), (12, 10))
)
print(f"distance between the ranks: equal scales {equal}, different ones {different:.2f}")
assert equal == 0 < 0.05 < different

# %% [markdown]
# No error, and two different models. The all-reduce averages gradients of different scales; then each rank divides the mixture by its *own* scale.
# **Fix.** Restore on every rank what every rank needs. A quick check in a long run: all-reduce the minimum and the maximum of the loss scale, and compare.
#
# ## 4. Stop and go on: what a checkpoint must hold
#
# A run is stopped after two of four epochs and started again. If everything was saved, it goes on as if nothing had happened: the
# same bits. We leave out one part at a time.


# %%
def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=60)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=30)
    torch.manual_seed(seed + dist.get_rank())  # dropout differs between ranks
    return model, optimizer, schedule, scaler


def train_epochs(epochs, model, optimizer, schedule, scaler):
    loader = data.shard(data.digits()[0], micro_batch=64)
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.amp.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y)
            scale = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() >= scale:
                schedule.step()


# %%
NAMES = ("model", "optimizer", "schedule", "scaler")


def first_half(folder):
    parts = dict(zip(NAMES, build(), strict=True))
    train_epochs(range(2), *parts.values())
    state = {name: part.state_dict() for name, part in parts.items()}
    state["model"] = parts["model"].module.state_dict()  # without "module."
    state |= {"epoch": 2, "random": torch.get_rng_state()}
    torch.save(state, os.path.join(folder, f"rank{dist.get_rank()}.pt"))


def second_half(folder, leave_out=None):
    parts = dict(zip(NAMES, build(), strict=True))
    state = torch.load(os.path.join(folder, f"rank{dist.get_rank()}.pt"))
    for name, part in parts.items():
        if name != leave_out:
            (part.module if name == "model" else part).load_state_dict(state[name])
    if leave_out != "random":
        torch.set_rng_state(state["random"])
    epoch = 0 if leave_out == "epoch" else state["epoch"]
    train_epochs(range(epoch, epoch + 2), *parts.values())
    return torch.cat([p.detach().flatten() for p in parts["model"].parameters()])


# %%
guess = predict.choose(
    "Which part can be left out without changing a single bit of the result?",
    ["random", "scaler", "schedule", "epoch", "none of them"],
)


# %%
def never_stopped():
    parts = build()
    train_epochs(range(4), *parts)
    return torch.cat([p.detach().flatten() for p in parts[0].parameters()])


whole = launch(never_stopped).values[0]
changed = {}
with tempfile.TemporaryDirectory() as folder:
    launch(first_half, folder)
    for left_out in (None, *NAMES, "epoch", "random"):
        resumed = launch(second_half, folder, left_out).values[0]
        changed[left_out] = (resumed - whole).norm().item()

# %% tags=["nbval-ignore-output"]
for left_out, distance in changed.items():
    print(f"without {left_out or 'nothing':10} the weights end {distance:.3g} away")
assert changed[None] == 0  # bit for bit
assert all(distance > 0 for left_out, distance in changed.items() if left_out)
guess.compare("none of them")

# %% [markdown]
# Only with everything in it is the resumed run the same run. Without the `epoch` it sees the data of the first epochs again; without `random` dropout
# draws other units; without the `scaler` it searches its scale anew and skips steps.
#
# A frequent error comes from DDP's wrapper:

# %% tags=["nbval-ignore-output"]
error = None


def save_the_wrapper():
    return DistributedDataParallel(nn.Linear(4, 2)).state_dict()


saved = launch(save_the_wrapper).values[0]
try:
    nn.Linear(4, 2).load_state_dict(saved)
except RuntimeError as caught:
    error = caught
    print(error)
assert '"module.weight"' in str(error)

# %% [markdown]
# **Cause.** Saved from the wrapper, every name begins with `module.`. **Fix.** Save `model.module.state_dict()`: it fits with DDP and without.
#
# `ddp_course.checkpoint` holds all of that in one file for all ranks, written so that a crash leaves the old file or the new one:

# %%
from ddp_course import checkpoint

show.source(checkpoint._states, checkpoint._unwrap)

# %% [markdown]
# ## 5. The whole loop
#
# This is what `ddp-course train` and `torchrun -m ddp_course.train` run. You know every line of it.

# %%
from ddp_course import train

show.source(train.train)

# %% tags=["nbval-ignore-output"]
from ddp_course import live

settings = train.Settings(
    epochs=6,
    precision="fp16",
    accumulation_steps=2,
    micro_batch=16,
    init_scale=2.0**24,
    growth_interval=100,
)
with live.view() as view:
    run = launch(train.run, settings, on_record=view)

# %% tags=["nbval-ignore-output"]
steps = [record for record in run.records if record["rank"] == 0]
skipped = sum(record["skipped"] for record in steps)
print(f"{len(steps)} steps, {skipped} skipped, accuracy {run.values[0]['accuracy']:.1%}")
assert skipped >= 1 and run.values[0]["accuracy"] > 0.9
assert all(
    one["loss_scale"] == other["loss_scale"]
    for one, other in zip(steps, [r for r in run.records if r["rank"] == 1], strict=True)
)

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("09_all_together")

# %% [markdown]
# ## Exercises
#
# `09_full_step`: one window of the whole loop. `09_resume`: save and load everything, bit for bit.
#
# ## How this looks on several GPUs and nodes
#
# The loop does not change. On GPUs the state of `torch.cuda`'s random generators belongs in the checkpoint too (`checkpoint` saves it), and bitwise equality
# needs deterministic operations (`torch.use_deterministic_algorithms`). With hundreds of GPUs one file for all becomes slow: `torch.distributed.checkpoint`
# writes one part a rank. Under torchrun a run that lost a node starts again from the last checkpoint by itself (lesson 12).
#
# ## Where to read more
#
# * PyTorch documentation: *Automatic Mixed Precision examples* (gradient accumulation, clipping), *Saving and loading a general checkpoint*.
# * Goyal, Dollár, Girshick and others: *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017): warm-up and schedules for large batches.
# * Li, Zhao, Varma and others: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (VLDB 2020): `no_sync` and buckets.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
for name, value in loss.items():
    print(f"{name:16} loss {value:.3f}, {calls[name]:.1f} all-reduces a window")
print(
    f"ranks apart: right {together}, update inside the window {drifted:.2f}, two scales {different:.2f}"
)
print(
    f"resumed with everything: {changed[None]} away; without the scaler: {changed['scaler']:.3g}"
)
