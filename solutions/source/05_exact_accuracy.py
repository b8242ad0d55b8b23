# %% [markdown]
# # Exercise 05 · An exact accuracy on any number of ranks
#
# The weights are trained, and the test set is evaluated on all ranks. How many ranks there are must not change the number, not in the last
# digit. **Write** `exact_accuracy(model, dataset, batch_size)`.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with the same weights and the whole data set; the process group is up |
# | `model` | the plain network (not in DDP): maps `x` of shape `[N, 6]` to logits `[N, 4]`. It has dropout, which must not drop here |
# | `dataset` | `len(dataset)` samples `(x, y)`; perhaps fewer than there are ranks |
# | `batch_size` | at most so many samples in one forward |
# | returns | right answers / number of samples, each sample counted **once**; exact to the last digit of a Python number (float64), the same on every rank |
# | work | is shared out: a rank evaluates no more than ⌈`len(dataset)` / `world_size`⌉ samples, and keeps no graph (`torch.no_grad()`) |
# | afterwards | the model is in the mode it came in, training or evaluation (`model.training` says which; `model.eval()` and `model.train(…)` change it) |
#
# About 15 minutes. Lesson [05](../notebooks/05_sharding_data.ipynb), section 3, has all you need.

# %%
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def exact_accuracy(model, dataset, batch_size):
    """Return the share of right answers over the whole data set, the same on every rank."""
    # BEGIN SOLUTION right answers of all ranks / samples of all ranks, each sample counted once
    # Not a DistributedSampler: it pads, and what it deals twice would count twice.
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    # Right answers, samples; whole numbers in float64, or the quotient would be rounded early.
    sums = torch.zeros(2, dtype=torch.float64)
    training = model.training
    model.eval()  # dropout off, or the answers would be random
    with torch.no_grad():  # no backward will come: no graph, no activations
        # A rank may have fewer batches than others, or none: no collective in this loop.
        for x, y in DataLoader(dataset, batch_size, sampler=mine):
            right = (model(x).argmax(1) == y).sum()
            sums += torch.tensor([right, len(y)])
    model.train(training)  # as it was, not simply train()
    dist.all_reduce(sums)  # counts, not shares: a mean of means is not the mean
    return (sums[0] / sums[1]).item()
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# 22 scans of digits and an untrained network, on 1, 2, 3 and 4 ranks. A cell says which rank asked for a sample; outlined is what was asked for
# twice. The accuracy, printed, should not care.

# %% tags=["nbval-ignore-output"]
from torch.utils.data import Dataset

from ddp_course import data, launch, models, plots


class Noting(Dataset):
    """The first 22 test digits; notes the indices that it is asked for."""

    def __init__(self):
        self.digits, self.asked = data.digits()[1], []

    def __len__(self):
        return 22

    def __getitem__(self, index):
        self.asked.append(index)
        return self.digits[index]


# %% tags=["nbval-ignore-output"]
def try_it():
    torch.manual_seed(0)
    model, dataset = models.MLP(width=64), Noting()
    return exact_accuracy(model, dataset, batch_size=4), dataset.asked


rows = {}
for nproc in (1, 2, 3, 4):
    values = launch(try_it, nproc=nproc).values
    print(f"{nproc} rank(s): accuracy", [accuracy for accuracy, _ in values])
    rows[f"{nproc} rank(s)"] = [asked for _, asked in values]
plots.index_grid(rows, samples=22, title="Which rank evaluates which of the 22 digits")

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("05_exact_accuracy", exact_accuracy)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# A rank's samples: `range(rank, len(dataset), world_size)`. A `DataLoader` takes it as its `sampler`.
# </details>
#
# <details><summary>Hint 2</summary>
#
# Two numbers say all that a rank knows: how many answers were right, and of how many. Add them up over the batches, then over the ranks. Divide
# them as Python's numbers (`.item()`) or in `torch.float64`: torch divides two tensors of whole numbers in float32, and 5 / 22 becomes 0.22727273404….
# </details>
#
# <details><summary>Hint 3</summary>
#
# One `dist.all_reduce` of both numbers, *after* the loop: a rank without a sample goes through the loop zero times and still takes part, with
# zeros. Note `model.training` before `model.eval()`, and give it to `model.train(…)` in the end.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# Each rank computes its accuracy, and the ranks average: one `all_reduce` with `AVG`. As long as all ranks hold equally many samples it is right, to rounding. Else the samples
# of a rank that has one less weigh more, and a rank that has none divides zero by zero.


# %% tags=["solution-only", "nbval-ignore-output"]
def mean_of_means(model, dataset, batch_size):
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    right, training = torch.zeros((), dtype=torch.float64), model.training
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(dataset, batch_size, sampler=mine):
            right += (model(x).argmax(1) == y).sum()
    model.train(training)
    accuracy = right / len(mine)
    dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)
    return accuracy.item()


assert not check("05_exact_accuracy", mean_of_means, seed=1)
