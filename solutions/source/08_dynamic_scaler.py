# %% [markdown]
# # Exercise 08 · A dynamic loss scaler for several ranks
#
# The gradients in `.grad` are those of a *scaled* loss. **Write** `scaler_step(optimizer, state)`: unscale them, take the step or skip it, and adapt
# the scale, as lesson [08](../notebooks/08_mixed_precision.ipynb), section 4 does, but for ranks that see different overflows.
#
# | | |
# | --- | --- |
# | who calls it | every rank, once a step, after backward |
# | `optimizer` | its parameters' `.grad` hold scale × gradient; some parameters may have no `.grad`; there may be several param groups |
# | `state` | `{"scale": float, "good_steps": int, "growth_interval": int}`, changed in place |
# | if **any** gradient on **any** rank is inf or nan | no rank steps; the scale is halved, `good_steps` is 0; returns False |
# | otherwise | gradients are divided by the scale (and not averaged: each rank steps with those it has), the optimizer steps, `good_steps` grows by 1; when it reaches `growth_interval` the scale doubles and `good_steps` is 0 again; returns True |
#
# About 20 minutes. The process group is up.

# %%
import torch
import torch.distributed as dist


def scaler_step(optimizer, state):
    """Unscale, step or skip alike on all ranks, adapt the scale; say if it stepped."""
    # BEGIN SOLUTION unscale, decide on all ranks together, step or skip, adapt the scale
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    for gradient in gradients:
        gradient /= state["scale"]  # in place: the optimizer reads .grad
    # isfinite finds inf and nan; one bad number spoils the step.
    bad = torch.tensor(
        float(not all(gradient.isfinite().all() for gradient in gradients))
    )
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # every rank asks, so every rank knows
    if bad:
        state["scale"] /= 2
        state["good_steps"] = 0  # growth needs good steps in a row
        return False
    optimizer.step()
    state["good_steps"] += 1
    if state["good_steps"] == state["growth_interval"]:
        state["scale"] *= 2
        state["good_steps"] = 0
    return True
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A real fp16 training on two ranks, with your scaler and *without* DDP's all-reduce, so that each rank meets its own overflows.

# %% tags=["nbval-ignore-output"]
import torch.nn.functional as F

from ddp_course import data, launch, models, plots, report


def train(steps=60):
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"scale": 2.0**22, "good_steps": 0, "growth_interval": 10}
    loader = iter(data.shard(data.digits()[0], micro_batch=8))
    for step in range(steps):
        x, y = next(loader)
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scale = state["scale"]
        (loss * scale).backward()
        stepped = scaler_step(optimizer, state)
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        report(step=step, loss=mean, loss_scale=scale, skipped=not stepped)


run = launch(train)
try:
    plots.show(plots.loss_scale(run, growth_interval=10))
except ValueError as error:
    print(f"your ranks' scales differ: {error}")

# %% [markdown]
# ## Check it

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("08_dynamic_scaler", scaler_step)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `optimizer.param_groups` is a list of dicts, each with a list under `"params"`. Skip parameters whose `.grad` is `None`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `tensor.isfinite().all()` is False for inf *and* for nan. What one rank knows, the others do not know yet: which collective tells
# everybody that somebody has a problem?
# </details>
#
# <details><summary>Hint 3</summary>
#
# Put 1.0 or 0.0 into a tensor and `dist.all_reduce(flag, op=dist.ReduceOp.MAX)`, on every rank, in every step.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# The scaler of the lesson, unchanged. With DDP it is right, since the all-reduced gradients are the same everywhere. Here each rank decides for itself:


# %% tags=["solution-only", "nbval-ignore-output"]
def for_itself(optimizer, state):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in params if p.grad is not None]
    for gradient in gradients:
        gradient /= state["scale"]
    if not all(gradient.isfinite().all() for gradient in gradients):
        state["scale"], state["good_steps"] = state["scale"] / 2, 0
        return False
    optimizer.step()
    state["good_steps"] += 1
    if state["good_steps"] == state["growth_interval"]:
        state["scale"], state["good_steps"] = state["scale"] * 2, 0
    return True


assert not check("08_dynamic_scaler", for_itself, seed=1)
