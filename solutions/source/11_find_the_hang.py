# %% [markdown]
# # Exercise 11 · Find the hang
#
# Five programs for three ranks. Three of them hang, one fails, one runs to its end with wrong numbers. For each: run it, read the report, **mend** it; in the end **write**
# `find_the_hang(program)`, which returns what you found.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with a program's name, such as `"epoch_loss"` |
# | returns | `(rank, line, mended)` |
# | `rank` | the number of the rank that leaves the others' path *in the run below*: it never came, failed first, or does what no other does |
# | `line` | the line where it does so, as text, copied from the program (a condition, or the line under it: both count); indent and comments do not matter |
# | `mended` | your function, with the program's parameters; every rank calls it, and it does what the program's docstring promises, on any number of ranks and with any numbers |
#
# About 30 minutes. Lesson [11](../notebooks/11_when_it_breaks.ipynb), sections 2 to 5, has all you need: section 4 also how to end a loop together.

# %%
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import HangError, RankError, launch, plots

seen = {}


def run(program, inputs):
    """Run a program on three ranks with `inputs(rank)`; show, and note, what comes of it."""
    try:
        result = launch(lambda: program(*inputs(dist.get_rank())), nproc=3).values
        for rank, value in enumerate(result):
            print(f"rank {rank}: {value}")
    except (HangError, RankError) as error:
        result = error
        print(error)
        if any(error.collectives):
            plots.show(plots.waits(error, "The last collectives of each rank"))
    seen[program.__name__] = result


# %% [markdown]
# ## Program 1: the loss of an epoch


# %%
def epoch_loss(losses):
    """Return the mean over all batches of all ranks; ranks may have different numbers of them."""
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        both = torch.stack([loss, torch.ones_like(loss)])  # the loss, and one batch
        dist.all_reduce(both)
        total += both
    return (total[0] / total[1]).item()


# %% tags=["nbval-ignore-output"]
batches = torch.arange(1.0, 4.0, dtype=torch.float64)
run(epoch_loss, lambda rank: (batches[: 2 if rank == 1 else 3],))


# %%
def mended_epoch_loss(losses):
    """Return the mean over all batches of all ranks; ranks may have different numbers of them."""
    # BEGIN SOLUTION program 1, so that every rank calls as many collectives as the others
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        total += torch.stack([loss, torch.ones_like(loss)])  # no other rank is asked here
    dist.all_reduce(total)  # once, whatever the number of batches
    return (total[0] / total[1]).item()
    # END SOLUTION


# %% [markdown]
# ## Program 2: the accuracy


# %%
def share_of_all(counts):
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def accuracy(correct, total):
    """Return the share of right answers of all ranks, on every rank; rank 0 prints it."""
    counts = torch.tensor([correct, total], dtype=torch.float64)
    share = None
    if dist.get_rank() == 0:
        share = share_of_all(counts)
        print(f"accuracy {share:.1%}")
    dist.barrier()
    return share


# %% tags=["nbval-ignore-output"]
run(accuracy, lambda rank: [(8, 10), (15, 20), (3, 10)][rank])


# %%
def mended_accuracy(correct, total):
    """Return the share of right answers of all ranks, on every rank; rank 0 prints it."""
    # BEGIN SOLUTION program 2, with the value on every rank
    counts = torch.tensor([correct, total], dtype=torch.float64)
    share = share_of_all(counts)  # every rank
    if dist.get_rank() == 0:
        print(f"accuracy {share:.1%}")  # only the printing is rank 0's
    return share  # no barrier needed: all_reduce waits for all
    # END SOLUTION


# %% [markdown]
# ## Program 3: the gradients


# %%
def average_gradients(parameters):
    """Make each p.grad the mean over all ranks; one that is None on a rank counts as zeros."""
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# %% tags=["nbval-ignore-output"]
def two_parameters(unused):
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for p in parameters:
        p.grad = torch.ones_like(p)
    if unused:
        parameters[1].grad = None
    return parameters


run(average_gradients, lambda rank: (two_parameters(unused=rank == 2),))


# %%
def mended_average_gradients(parameters):
    """Make each p.grad the mean over all ranks; one that is None on a rank counts as zeros."""
    # BEGIN SOLUTION program 3, also for parameters that a rank has not used
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)  # bring zeros: the others wait for this rank
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    # END SOLUTION


# %% [markdown]
# ## Program 4: stop when a loss explodes


# %%
def train_until(losses, limit):
    """Return the mean loss over ranks of each step, up to the first one (not in it) in which some
    rank's loss is above the limit. All ranks have as many losses."""
    means = []
    for loss in losses:
        if loss > limit:
            break
        mean = loss.clone()
        dist.all_reduce(mean)
        means.append(mean.item() / dist.get_world_size())
    dist.barrier()  # all leave together
    return means


# %% tags=["nbval-ignore-output"]
calm, explodes = torch.tensor([1.0, 0.9, 0.8]), torch.tensor([1.0, 7.0, 9.0])
run(train_until, lambda rank: (explodes if rank == 1 else calm, 2.0))


# %%
def mended_train_until(losses, limit):
    """Return the mean loss over ranks of each step, up to the first one (not in it) in which some
    rank's loss is above the limit. All ranks have as many losses."""
    # BEGIN SOLUTION program 4, with one decision for all ranks
    means = []
    for loss in losses:
        stop = torch.tensor(float(loss > limit))
        dist.all_reduce(
            stop, op=dist.ReduceOp.MAX
        )  # 1 if any rank says so: the same on all
        if stop:
            break
        mean = loss.clone()
        dist.all_reduce(mean)
        means.append(mean.item() / dist.get_world_size())
    return means
    # END SOLUTION


# %% [markdown]
# ## Program 5: sums of metrics
#
# No error here. Look at the numbers: each rank brings a loss of 1, an accuracy of 50 and 1000 tokens.


# %%
def sum_metrics(metrics):
    """Return {name: sum over all ranks}, the same on each; all have the same names."""
    for name in metrics:
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}


# %% tags=["nbval-ignore-output"]
values = {"loss": 1.0, "accuracy": 50.0, "tokens": 1000.0}


def own_order(rank):
    names = ["tokens", "loss", "accuracy"] if rank == 2 else list(values)
    return ({name: torch.tensor(values[name]) for name in names},)


run(sum_metrics, own_order)


# %%
def mended_sum_metrics(metrics):
    """Return {name: sum over all ranks}, the same on each; all have the same names."""
    # BEGIN SOLUTION program 5, in an order that all ranks share
    for name in sorted(
        metrics
    ):  # a dict keeps the order in which this rank has filled it
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}
    # END SOLUTION


# %% [markdown]
# ## What you found


# %%
def find_the_hang(program):
    """Return (rank, line, mended function) for a program's name."""
    # BEGIN SOLUTION for each of the five names: the rank, the line as text, your function
    found = {
        "epoch_loss": (
            1,
            "for loss in losses:",
            mended_epoch_loss,
        ),  # its loop ends early
        "accuracy": (0, "share = share_of_all(counts)", mended_accuracy),  # only rank 0
        "average_gradients": (2, "dist.all_reduce(p.grad)", mended_average_gradients),
        "train_until": (1, "if loss > limit:", mended_train_until),  # by its own loss
        "sum_metrics": (
            2,
            "for name in metrics:",
            mended_sum_metrics,
        ),  # in its own order
    }
    return found[program]
    # END SOLUTION


# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time, on up to four ranks. It stops at the first thing that is wrong, so you can check after each program, if `find_the_hang` knows the ones you have.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("11_find_the_hang", find_the_hang)

# %% tags=["solution-only"]
assert report
for program in ("epoch_loss", "accuracy", "train_until"):
    assert isinstance(seen[program], HangError)
assert seen["average_gradients"].rank == 2
assert seen["sum_metrics"][0]["loss"] != 3.0

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The report has a line for each rank. Which of them is unlike the others? In program 5, compare what the ranks printed.
# </details>
#
# <details><summary>Hint 2</summary>
#
# A rank can only make another wait by *not calling*. Look for what decides whether a collective is called: a loop's end, an `if`, a `break`, an error. That decision must come out the same on
# all ranks: take it out of the way (programs 1, 2, 3), or make it together (program 4), with a collective of its own.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Program 4: `stop = torch.tensor(float(loss > limit))`, then `dist.all_reduce(stop, op=dist.ReduceOp.MAX)`, on every rank in every step. Program 3: leaving out what is `None` moves the hang to
# the next parameter.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# In program 3 it is tempting to skip what is not there. The error is gone, and the hang is there: the rank is now one collective ahead.


# %% tags=["solution-only", "nbval-ignore-output"]
def skips_what_is_missing(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def with_that(program):
    rank, line, mended = find_the_hang(program)
    return rank, line, skips_what_is_missing if program == "average_gradients" else mended


assert not check("11_find_the_hang", with_that, seed=1)
