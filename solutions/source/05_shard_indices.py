# %% [markdown]
# # Exercise 05 · Who sees which sample
#
# **Write** `shard_indices(length, rank, world_size, epoch, seed, shuffle)`, what a `DistributedSampler` does inside: the list of samples that one
# rank sees in one epoch.
#
# | | |
# | --- | --- |
# | `length` | the number of samples, 1 or more; it may be smaller than `world_size` |
# | returns | indices from 0 to `length` − 1, for this rank, in the order in which it sees them |
# | all ranks together | see every sample |
# | every rank | gets equally many, as few as possible; where `length` does not divide, some samples come twice, each as rarely as possible |
# | `shuffle=False` | rank r gets r, r + `world_size`, r + 2 · `world_size`, … (dealt like cards), going round to sample 0 at the end, more than once if need be |
# | `shuffle=True` | the same from a shuffled order, another one for each `epoch` and each `seed`, the same when asked again |
# | leaves alone | the global random generators; and it communicates with nobody |
#
# About 15 minutes. Lesson [05](../notebooks/05_sharding_data.ipynb) has all you need. No ranks are needed to try it.

# %%
import itertools
import math

import torch


def shard_indices(length, rank, world_size, epoch, seed, shuffle):
    """Return the indices that this rank sees in this epoch."""
    # BEGIN SOLUTION every rank gets its own, equally long part of one common order
    order = list(range(length))
    if shuffle:
        # A generator of its own, seeded alike on all ranks: they cut the same order without talking.
        generator = torch.Generator().manual_seed(seed * 10_000 + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    share = math.ceil(length / world_size)  # up, or the last samples would be lost
    padded = itertools.islice(
        itertools.cycle(order), share * world_size
    )  # round and round
    return list(padded)[rank::world_size]
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Ten samples on three ranks: colour and number say which rank sees a sample; what comes twice is outlined.

# %% tags=["nbval-ignore-output"]
from ddp_course import plots

plots.index_grid(
    {
        "in order": [shard_indices(10, rank, 3, 0, 0, False) for rank in range(3)],
        "epoch 0": [shard_indices(10, rank, 3, 0, 0, True) for rank in range(3)],
        "epoch 1": [shard_indices(10, rank, 3, 1, 0, True) for rank in range(3)],
    },
    samples=10,
    title="Which rank sees which of the 10 samples, in order and in two epochs",
)

# %% [markdown]
# ## Check it

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("05_shard_indices", shard_indices)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First make one order for everybody, then take a part of it: `order[rank::world_size]`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# All ranks must make the *same* order without talking. So the generator is seeded by what they have in common: the seed and the epoch.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Before cutting, lengthen the order to a multiple of `world_size`: `math.ceil(length / world_size) * world_size` entries, by going round
# (`itertools.cycle`), so that it also works with fewer samples than ranks.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# `torch.manual_seed(seed + epoch)` before `torch.randperm(length)` deals rightly. It also resets the generator that dropout and the first
# weights draw from, at every epoch, and makes seed 0 in epoch 1 the same as seed 1 in epoch 0.


# %% tags=["solution-only", "nbval-ignore-output"]
def seeds_globally(length, rank, world_size, epoch, seed, shuffle):
    torch.manual_seed(seed + epoch)
    order = torch.randperm(length).tolist() if shuffle else list(range(length))
    share = math.ceil(length / world_size)
    return list(itertools.islice(itertools.cycle(order), share * world_size))[
        rank::world_size
    ]


assert not check("05_shard_indices", seeds_globally, seed=1)
