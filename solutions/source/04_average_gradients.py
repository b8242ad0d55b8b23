# %% [markdown]
# # Exercise 04 · Average the gradients
#
# Every rank has run forward and backward on its own data. Now each has its own gradients, and if each stepped with them, there
# would be as many models as ranks. **Write** `average_gradients(model)`, the half of DDP that prevents it.
#
# | | |
# | --- | --- |
# | who calls it | every rank, after `backward()`, with the same model |
# | afterwards | each parameter's `.grad` is the mean of the ranks' gradients, the same on every rank |
# | a parameter that a rank did not use | has `.grad` None there: it counts as 0 |
# | frozen parameters (`requires_grad` False) | stay without a gradient |
# | leaves alone | the weights |
#
# The process group is up. All ranks must call the same collectives in the same order.
#
# About 15 minutes. Lesson [04](../notebooks/04_ddp_from_scratch.ipynb) has all you need.

# %%
import torch
import torch.distributed as dist


def average_gradients(model):
    """Replace every parameter's .grad by its mean over all ranks."""
    # BEGIN SOLUTION after it every rank's .grad is the mean over all ranks
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue  # frozen on every rank, so every rank leaves it out
        if parameter.grad is None:
            # Another rank may have used it. Who skips a collective that others call, hangs them.
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)  # the sum, in place, on every rank
        parameter.grad /= dist.get_world_size()  # of all ranks, also those that brought 0
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Two ranks train the same small network on different data. With your function their weights stay together.

# %% tags=["nbval-ignore-output"]
from ddp_course import launch, plots, report


def train(steps=30):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        model(torch.randn(16, 8)).square().mean().backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        mine = model.weight.detach()
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        report(step=step, distance=(mine - theirs).norm())


plots.drift({"with your average_gradients": launch(train)})

# %% [markdown]
# ## Check it

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("04_average_gradients", average_gradients)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `dist.all_reduce(tensor)` replaces the tensor by the sum over all ranks. `.grad` is a tensor.
# </details>
#
# <details><summary>Hint 2</summary>
#
# A sum is not yet a mean. And what if `.grad` is `None` on one rank only? Ask what the *other* ranks do in that moment.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Give a parameter that this rank did not use a `.grad` of zeros (`torch.zeros_like`), unless it is frozen; then every rank calls
# `all_reduce` for the same parameters.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# `if parameter.grad is not None:` looks careful. As long as all ranks use all parameters it is right. When one rank does not use a branch, it
# skips a collective, and from there on the ranks talk past each other:


# %% tags=["solution-only", "nbval-ignore-output"]
def skips_none(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


assert not check("04_average_gradients", skips_none, seed=1)
