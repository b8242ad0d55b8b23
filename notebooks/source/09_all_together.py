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
from collections import Counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, flight, launch, models, plots, predict, report, show

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


# %%
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
# Five variants, as real scripts have them. In each, one line stands elsewhere; in some, what went with it is missing as well: the clipping
# where the step comes early, the question whether a step was skipped. The difference to `right` stands below each.
#
# > **Predict.** Read each difference before you read on: error, wrong result, or only slow?


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


show.diff(right, clip_first)


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


show.diff(right, update_inside)


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


show.diff(right, sync_always)


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


show.diff(right, schedule_inside)


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


show.diff(right, unscale_inside)

# %%
order = predict.order(
    "Which of them is furthest from the right loss after 24 windows? Furthest first.",
    ["clip_first", "update_inside", "sync_always", "schedule_inside"],
)


# %% [markdown]
# All of them train the same network on the same windows, on two ranks.


# %%
def note(step, model):
    """Report the loss of rank 0's model on all training images."""
    x, y = data.digits()[0].tensors
    if dist.get_rank() == 0:
        with torch.no_grad():
            report(step=step, loss=F.cross_entropy(model(x), y))


# %%
def train_with(one_window, windows=24):
    """All-reduces a window, and in how many windows there was a learning rate above 0."""
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=windows)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    batches = list(data.shard(data.digits()[0], micro_batch=16))
    before, moved = len(flight.log()), 0
    for step in range(windows):
        note(step, model.module)
        moved += optimizer.param_groups[0]["lr"] > 0
        first = 4 * step % 44  # micro-batches 44 and 45 of the epoch are left out
        window = batches[first : first + 4]  # on two ranks 2 × 4 × 16 images
        one_window(model, window, optimizer, scaler, schedule, divisor=64)
    note(windows, model.module)
    calls = [call for call in flight.log()[before:] if call.name == "all_reduce"]
    return len(calls) / windows, moved


# %% tags=["nbval-ignore-output"]
variants = (right, clip_first, update_inside, sync_always, schedule_inside)
runs = {variant.__name__: launch(train_with, variant) for variant in variants}
loss = {name: run.records[-1]["loss"] for name, run in runs.items()}
calls = {name: run.values[0][0] for name, run in runs.items()}
moved = {name: run.values[0][1] for name, run in runs.items()}
for name in runs:
    print(f"{name:16} loss {loss[name]:.3f}   all-reduces a window {calls[name]:.0f}   "
          f"windows with a learning rate {moved[name]}")  # fmt: skip

# %% tags=["nbval-ignore-output"]
drawn = {name: run for name, run in runs.items() if name != "sync_always"}  # as `right`
plots.compare(drawn, title="Two wrong orders hardly learn, one looks better than right")

# %% tags=["nbval-ignore-output"]
assert loss["clip_first"] > 2 * loss["right"]  # nothing moves
assert loss["schedule_inside"] > 1.2 * loss["right"]
assert (moved["schedule_inside"], moved["right"]) == (6, 24)
assert loss["update_inside"] < 0.98 * loss["right"]  # looks better, see below
assert abs(loss["sync_always"] - loss["right"]) < 0.01  # right, but …
assert (calls["sync_always"], calls["right"]) == (4, 1)  # … four times the traffic
wrong = [name for name in loss if name != "right"]
order.compare(sorted(wrong, key=lambda name: -abs(loss[name] - loss["right"])))

# %% [markdown]
# Four of the five run to the end. The only word that was said is the warning about `lr_scheduler.step()` (it came from `schedule_inside`). What went wrong in each:
#
# | variant | symptom | cause |
# | --- | --- | --- |
# | `clip_first` | does not learn | clip saw gradients that still carried the scale, and cut them to nothing |
# | `update_inside` | another training, which looks fine | four steps a window, three of them with local gradients that no all-reduce has seen: the ranks drift apart |
# | `sync_always` | right, and slow | `no_sync` is missing: one all-reduce for each micro-batch |
# | `schedule_inside` | stops early | micro-batches are counted as steps: the learning rate is 0 after a quarter of the windows |
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
# The fifth is the kind one: it says so. And `update_inside` is the worst: on this curve it even looks *better* than the right one, since it takes
# four steps where the others take one.
#
# > **Predict.** Are its two ranks still the same model?


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
# Two different networks, of which a checkpoint would save one. **Fix.** Everything that needs the *sum* of a window stands after it.
#
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
# **Fix.** Restore on every rank what every rank needs; with equal scales the distance was 0. And check it, at the start and now and then:


# %%
def same_on_all_ranks(number):
    low, high = torch.tensor(number), torch.tensor(number)
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return low.item() == high.item()


def check(*powers):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** powers[dist.get_rank()])
    return same_on_all_ranks(scaler.get_scale())


assert launch(check, 12, 12).values == [True, True]
assert launch(check, 12, 10).values == [False, False]
print("two small all-reduces find it, on every rank")

# %% [markdown]
# ## 4. Stop and go on: what a checkpoint must hold
#
# A run is stopped after two of four epochs and started again. If everything was saved, it should go on as if nothing had happened, to the
# same bits. The network has dropout, so that random numbers matter, and a loss scale that starts too high. We leave out one part at a time.


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


# %%
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


# %% tags=["nbval-ignore-output"]
whole = launch(never_stopped).values[0]
changed = {}
with tempfile.TemporaryDirectory() as folder:
    launch(first_half, folder)
    for left_out in (None, *NAMES, "epoch", "random"):
        resumed = launch(second_half, folder, left_out).values[0]
        changed[left_out] = distance = (resumed - whole).norm().item()
        print(f"without {left_out or 'nothing':10} the weights end {distance:.3g} away")
assert changed[None] == 0  # bit for bit
assert all(distance > 0 for left_out, distance in changed.items() if left_out)
guess.compare("none of them")

# %% [markdown]
# Only with everything in it is the resumed run the same run. Without the `epoch` the sampler deals the orders of the first epochs again; without `random` dropout
# draws other units; without the `scaler` it searches its scale anew and skips steps.
#
# A run does not wait for the end of an epoch to die. One that restarts *within* an epoch needs its place in it, too.
#
# > **Predict.** A rank has used 5 of its 23 batches when it dies. The resumed run begins this epoch anew. What happens to those 5 batches?


# %%
def order_of(epoch, batches_done=0):
    """Which images this rank takes, from a place within an epoch on."""
    loader = data.shard(data.digits()[0], micro_batch=32)
    loader.sampler.set_epoch(epoch)
    return list(loader.sampler)[32 * batches_done :]


def seen_in_an_epoch(restart_at):
    before = order_of(2)[: 32 * 5]  # what the first run used before it died
    counts = Counter(before + order_of(2, restart_at))
    return sum(count == 2 for count in counts.values()), len(counts)


twice, _ = launch(seen_in_an_epoch, 0).values[0]
none_twice, images = launch(seen_in_an_epoch, 5).values[0]
print(f"epoch begun anew: {twice} images of rank 0 are used twice")
print(f"go on after 5 batches: {none_twice} twice, {images} once")
assert (twice, none_twice, images) == (160, 0, 719)

# %% [markdown]
# So `batches_done` belongs into the checkpoint, and the resumed loop skips that many batches of the epoch's order. What was done after the last checkpoint
# is lost in any case: save often enough that you can bear to do it again.
#
# ### The wrapper's name
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
# **Cause.** Saved from the wrapper, every name begins with `module.`. **Fix.** Save `model.module.state_dict()`, as `first_half` does: it fits with DDP and without.
# For a file that has the prefix already there is a helper:

# %%
nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
print(nn.Linear(4, 2).load_state_dict(saved))

# %% [markdown]
# `ddp_course.checkpoint` puts all of this into one file for all ranks. What if a run dies while it writes? It writes beside the old file, and replaces it in the end:

# %%
from ddp_course import checkpoint

show.source(checkpoint.save, checkpoint._write)

# %% [markdown]
# ## 5. The whole loop
#
# This is what `ddp-course train` and `torchrun -m ddp_course.train` run. You know each of its parts: `windows` and `accumulate` are lesson 07's,
# `amp.step` is lesson 08's, and `batches_done` is the place in the epoch. Where is `divisor`? The sampler gives every rank as many items as
# every other, so a rank's own count *is* the divisor. `check_equal_parts` makes sure of that once, and no step pays an all-reduce for it.

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
# * [09_full_step](../exercises/09_full_step.ipynb): write one window of the whole loop, with every line in its place.
# * [09_resume](../exercises/09_resume.ipynb): save and load everything, so that the resumed run ends with the same bits.
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
print(f"ranks apart: right {together}, update inside the window {drifted:.2f}, "
      f"two scales {different:.2f}")  # fmt: skip
print(f"resumed with everything: {changed[None]} away; "
      f"without the scaler: {changed['scaler']:.3g}")  # fmt: skip
print(f"an epoch begun anew uses {twice} images of rank 0 twice")
