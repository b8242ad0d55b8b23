# %% [markdown]
# # Exercise 08 · One training step in fp16
#
# Eight lines make a step in fp16, and most orders of them run without an error. **Write** `amp_step(model, optimizer, scaler, x, y, max_norm)`:
# one step, each line in its place, and an honest word on whether a step was taken.
#
# | | |
# | --- | --- |
# | `model` | linear layers, weights in float32, some perhaps frozen; maps `x` of shape `[N, 6]` to logits `[N, 3]` |
# | `optimizer`, `scaler` | one optimizer, and a `torch.amp.GradScaler("cpu")` |
# | forward and loss | under autocast, in float16, on `"cpu"`; the loss is the mean cross entropy; backward is *not* under autocast |
# | clipping | once, of the true gradients, to a norm of `max_norm` over all parameters |
# | if a gradient is inf or nan | the step is skipped and the scale goes down: the scaler does both |
# | the next step | begins without gradients of this one |
# | returns | `(loss, grad_norm, stepped)`: the loss without the scale, and without a graph; the norm of the true gradients *before* clipping (anything, if the step was skipped); True if the optimizer stepped, False if the step was skipped |
# | leaves alone | the types of the weights |
#
# `stepped` is what a learning-rate schedule wants to know. No ranks are needed.
#
# About 15 minutes. Lesson [08](../notebooks/08_mixed_precision.ipynb), sections 3 to 5, has all you need.

# %%
import torch
import torch.nn.functional as F
from torch import nn


def amp_step(model, optimizer, scaler, x, y, max_norm):
    """Take one fp16 step, or skip it; return (loss, grad_norm, stepped)."""
    # BEGIN SOLUTION an fp16 step, each line in its place; say if it was taken
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)  # inside: the loss runs in fp32 there
    # Outside: backward takes the types of the forward by itself.
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # before anybody looks at gradients
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()  # what this step was scaled with
    scaler.step(
        optimizer
    )  # not optimizer.step(): this one skips if something is inf or nan
    scaler.update()
    optimizer.zero_grad()
    # The scale goes down exactly when a step is skipped. After good steps it may go *up*.
    return loss.item(), grad_norm.item(), scaler.get_scale() >= scale
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A real fp16 training with your step. The scale begins too high and grows after ten good steps; the ✕ are where you said that no step was taken.

# %% tags=["nbval-ignore-output"]
from ddp_course import data, launch, models, plots, report


def train(steps=60):
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
    loader = iter(data.shard(data.digits()[0], micro_batch=16))
    for step in range(steps):
        x, y = next(loader)
        scale = scaler.get_scale()
        loss, _, stepped = amp_step(model, optimizer, scaler, x, y, max_norm=1.0)
        report(step=step, loss=loss, loss_scale=scale, skipped=not stepped)


run = launch(train, nproc=1)
skipped = sum(record["skipped"] for record in run.records)
title = f"The scale is searched: {skipped} of {len(run.records)} steps were skipped"
plots.loss_scale(run, growth_interval=10, title=title)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("08_amp_step", amp_step)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Only two things go into the `with torch.amp.autocast(...)`: the forward, and the loss. What comes after it works on gradients, which are fp32.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Who looks at gradients wants them without the scale: `scaler.unscale_(optimizer)` once, and after it `nn.utils.clip_grad_norm_`, which
# also *returns* the norm that it found.
# </details>
#
# <details><summary>Hint 3</summary>
#
# `scaler.step` does not say whether it stepped. Compare `scaler.get_scale()` before it and after `scaler.update()`: what does the scale do after a
# skipped step, and what may it do after a good one?
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# `stepped = scaler.get_scale() == before` reads well, and is right in a run of 60 steps, since the scale grows once in 2,000. Every time it
# grows, a step was taken that the schedule will not count. The check lets it grow after each step:


# %% tags=["solution-only", "nbval-ignore-output"]
def if_the_scale_is_equal(model, optimizer, scaler, x, y, max_norm):
    before = scaler.get_scale()
    loss, grad_norm, _ = amp_step(model, optimizer, scaler, x, y, max_norm)
    return loss, grad_norm, scaler.get_scale() == before


assert not check("08_amp_step", if_the_scale_is_equal, seed=1)
