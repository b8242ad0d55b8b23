# %% [markdown]
# # Exercise 03 · From DataParallel to DDP
#
# A script trains with `DataParallel`. Its step looks like this: one process, one loss, over the outputs that were gathered on device 0.
#
# ```python
# def step(parallel, x, y):  # parallel = nn.DataParallel(model)
#     loss = F.cross_entropy(parallel(x), y)
#     loss.backward()
#     return loss.detach()
# ```
#
# **Write** `ddp_step(parallel, x, y)`, the same step for `parallel = DistributedDataParallel(model)`. Now each rank runs it, nobody scatters,
# and nobody gathers.
#
# | | |
# | --- | --- |
# | who calls it | every rank, each with the same `x` of shape `[N, 5]` and `y` of shape `[N]`: the whole batch |
# | each rank | runs its own part of the batch through the model, once; every sample goes to one rank, no rank gets more than it must, and none goes without if there are as many samples as ranks |
# | afterwards | each `.grad` is the gradient of the mean cross entropy over **all N** samples, as `DataParallel` leaves it; N need not divide by the number of ranks |
# | returns | that mean loss over all N, the same on every rank, as a number or a tensor without a graph |
# | leaves alone | the weights; gradients are cleared by the caller |
#
# About 15 minutes; five lines are enough. Lesson [03](../notebooks/03_dataparallel_vs_ddp.ipynb), section 2, has both steps; `all_reduce` is lesson 02's. DDP *averages*
# gradients over the ranks: it adds them up and divides by the number of ranks.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F


def ddp_step(parallel, x, y):
    """Run this rank's part forward and backward; return the whole batch's mean loss."""
    # BEGIN SOLUTION run this rank's part; gradients and loss of the whole batch's mean
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # What scatter did. tensor_split makes a part for each rank; chunk can make fewer.
    own_x, own_y = (part.tensor_split(world_size)[rank] for part in (x, y))
    # A share of the batch's mean: divided by all N, a sample weighs the same on any rank.
    loss = F.cross_entropy(parallel(own_x), own_y, reduction="sum") / len(y)
    # Shares are to be added up. DDP adds up and divides by world_size: undone here.
    (loss * world_size).backward()
    # Each rank knows its share only; all_reduce adds them up. Detached: it is for the log.
    total = loss.detach()
    dist.all_reduce(total)
    return total
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Three ranks, three batches. Does your gradient have the size of the whole batch's? A bar is the norm of a gradient. The numbers of samples
# that each rank's model saw are printed before it.

# %% tags=["nbval-ignore-output"]
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch


class Watched(torch.nn.Linear):
    def forward(self, x):
        print("my model sees", len(x), "samples")
        return super().forward(x)


def gradient_norms(samples):
    torch.manual_seed(0)
    model = Watched(5, 3).double()
    parallel = DistributedDataParallel(model)
    x, y = torch.randn(samples, 5).double(), torch.randint(3, (samples,))
    ddp_step(parallel, x, y)
    mine = model.weight.grad.norm().item()
    whole = F.cross_entropy(x @ model.weight.T + model.bias, y)
    wanted = torch.autograd.grad(whole, model.weight)[0].norm().item()
    return {"whole batch": wanted, "yours": mine}


# %% tags=["nbval-ignore-output"]
for samples in (12, 11, 7):
    print(samples, "samples on 3 ranks:")
    norms = launch(gradient_norms, samples, nproc=3).values[0]
    for whose, norm in norms.items():
        bar = "█" * min(60, round(20 * norm / norms["whole batch"]))
        print(f"  gradient, {whose:<11}  {norm:.6f} {bar}")

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("03_dp_vs_ddp", ddp_step)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First scatter by hand: `x.tensor_split(world_size)[rank]`, the same for `y`. Then `parallel(…)`, not `model(…)`: only the wrapper averages.
# </details>
#
# <details><summary>Hint 2</summary>
#
# With 7 samples on 3 ranks the parts are 3, 2 and 2. What weight does each sample have in a mean of the three means? Let every rank sum the losses of its samples,
# and divide by the number of *all* samples.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Now the ranks' losses are shares: their sum is the batch's mean. DDP gives the gradients' sum divided by `world_size`, so multiply the loss by
# `world_size` before `backward()`. For the log, `all_reduce` the detached share.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# The step as it stands in most scripts: each rank takes the mean of its own part. It passes the first check, because with equal parts the mean of the means is the mean. With
# `DataParallel` the question never came up: there is one loss, over all gathered outputs.


# %% tags=["solution-only", "nbval-ignore-output"]
def mean_of_means(parallel, x, y):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own_x, own_y = (part.tensor_split(world_size)[rank] for part in (x, y))
    loss = F.cross_entropy(parallel(own_x), own_y)
    loss.backward()
    total = loss.detach()
    dist.all_reduce(total)
    return total / world_size


assert not check("03_dp_vs_ddp", mean_of_means, seed=1)

# %% [markdown] tags=["solution-only"]
# In practice people keep all parts equal instead: a sampler pads or drops (lesson 05), and then the short version is right.
