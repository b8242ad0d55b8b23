# %% [markdown]
# # Exercise 02 · Ring all-reduce
#
# **Write** `ring_all_reduce(x)`: after it every rank's `x` is the sum of all ranks' `x`. Use `send` and `recv` (or `isend`, `irecv`,
# `batch_isend_irecv`) only, to the right neighbour and from the left one.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with a one-dimensional tensor of the same size and type |
# | afterwards | `x` is the sum over ranks, in place, bit for bit the same on each |
# | sends | only to rank + 1 (the last one to rank 0), 2 (N − 1) / N of the tensor in all |
# | sizes | any: also not divisible by N, and smaller than N. `x.tensor_split(N)` cuts x into a tuple of N views of it, of uneven sizes; change them in place (`.add_`, `.copy_`) |
# | one rank alone | nothing happens |
#
# About 30 minutes. Lesson [02](../notebooks/02_processes_and_collectives.ipynb) goes through it step by step. The process group is up.

# %%
import torch
import torch.distributed as dist


def ring_all_reduce(x):
    """Replace x by its sum over all ranks, by talking to neighbours only."""
    # BEGIN SOLUTION 2 (N − 1) steps, in each of which one chunk goes to the right neighbour
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = x.tensor_split(world_size)  # views of x, also of uneven sizes and of none
    for step in range(2 * (world_size - 1)):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(target)
        sending = dist.isend(
            outgoing, right
        )  # begins, and does not wait: all may send at once
        dist.recv(arrived, left)
        sending.wait()
        if step < world_size - 1:
            target += arrived  # reduce-scatter: a chunk collects one more rank's part
        else:
            target.copy_(arrived)  # all-gather: a finished chunk is only passed on
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Four ranks hold 1, 10, 100 and 1,000. With your function all of them should hold 1,111.

# %% tags=["nbval-ignore-output"]
from ddp_course import launch, plots


def try_it():
    x = torch.full((4,), 10.0 ** dist.get_rank())
    before = x.clone()
    ring_all_reduce(x)
    return before, x


before, after = zip(*launch(try_it, nproc=4).values, strict=True)
plots.before_after(before, after, title="Before and after your ring_all_reduce")

# %% [markdown]
# ## Check it

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("02_ring_all_reduce", ring_all_reduce)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `x.tensor_split(world_size)` gives a tuple of `world_size` views of x. Change them in place, with `.add_` or `.copy_`, and x changes.
# `chunks[i] += …` is an error on a tuple, and `chunks[i] = …` on a list only puts another tensor into your list.
# </details>
#
# <details><summary>Hint 2</summary>
#
# In step 0 rank r sends chunk r. What arrives belongs to chunk r − 1: add it there. In the next step send that one on. After N − 1 steps each rank has one
# finished chunk. Which?
# </details>
#
# <details><summary>Hint 3</summary>
#
# In step s rank r sends chunk (r − s) mod N and receives chunk (r − s − 1) mod N, for all 2 (N − 1) steps. In the first half what arrives is added, in the second half it
# replaces. `dist.isend` first, then `dist.recv`, then `wait()`: if all ranks call `dist.send` first, all wait.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# Send the whole tensor round N − 1 times, and add up what comes by. It is shorter and gives the sum, but each rank sends N − 1 tensors instead of less than two,
# and the sums differ in their last bits, since each rank adds in another order:


# %% tags=["solution-only", "nbval-ignore-output"]
def all_of_it_round(x):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    travelling = x.clone()
    for _ in range(world_size - 1):
        sending = dist.isend(travelling, (rank + 1) % world_size)
        arrived = torch.empty_like(x)
        dist.recv(arrived, (rank - 1) % world_size)
        sending.wait()
        x += arrived
        travelling = arrived


assert not check("02_ring_all_reduce", all_of_it_round, seed=1)
