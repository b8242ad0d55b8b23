# %% [markdown]
# # Exercise 06 · A training loop for any number of ranks
#
# This loop trains in one process:
#
# ```
# generator = torch.Generator()
# loader = DataLoader(dataset, batch_size, shuffle=True, generator=generator.manual_seed(seed))
# optimizer = torch.optim.SGD(model.parameters(), learning_rate)
# for epoch in range(epochs):
#     for x, y in loader:
#         loss = F.cross_entropy(model(x), y)
#         loss.backward()
#         optimizer.step()
#         optimizer.zero_grad()
# ```
#
# **Write** `train_ddp(model, dataset, epochs, batch_size, learning_rate, seed)`, the loop for every rank. Together the ranks must
# learn what one process learns that takes each step's batches of all ranks as one.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with the whole data set; the process group is up |
# | `model` | maps `x` of shape `[N, 6]` to logits `[N, 3]`; one layer is frozen. Each rank's has **other weights**: rank 0's are the ones to begin with |
# | order | that of a `DistributedSampler`, shuffled with `seed`, another one in every epoch (the first is epoch 0); nothing is dropped |
# | `batch_size` | **per rank**; a rank's last batch of an epoch may be smaller, and trains too |
# | step | plain SGD with `learning_rate`, as it is given, on the mean cross entropy of all ranks' batches |
# | returns | `state_dict, losses`, the same on every rank |
# | `state_dict` | the trained weights, with the names of the network itself |
# | `losses` | for each epoch the mean loss over **all samples that all ranks processed** in it, as they were trained on; numbers, or tensors without a graph |
#
# About 25 minutes. Lesson [06](../notebooks/06_ddp_training_loop.ipynb), sections 2 and 3, has the loop; lesson
# [05](../notebooks/05_sharding_data.ipynb), sections 2 and 6, the order and the mean of unequal batches.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train_ddp(model, dataset, epochs, batch_size, learning_rate, seed):
    """Train on all ranks; return (state_dict, mean loss of each epoch), the same on all."""
    # BEGIN SOLUTION sampler, DDP, backward, step, and a loss that is the mean over all ranks
    # It asks the process group who we are. No shuffle in the loader: the sampler shuffles.
    sampler = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    ddp_model = DistributedDataParallel(model)  # sends rank 0's weights to all
    optimizer = torch.optim.SGD(ddp_model.parameters(), learning_rate)
    losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # or every epoch has the order of the first
        sums = torch.zeros(2, dtype=torch.float64)  # of the losses, of the samples
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x), y)  # through the wrapper
            loss.backward()  # DDP averages the gradients here
            optimizer.step()
            optimizer.zero_grad()
            # The last batch may be smaller: weigh by samples, and keep no graph.
            sums += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(sums)  # on every rank, after the loop: one message an epoch
        losses.append((sums[0] / sums[1]).item())
    return ddp_model.module.state_dict(), losses  # names without "module."
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Your loop on scans of digits: with one rank and batches of 64, and with two ranks and 32 each. The curves should lie on each other.

# %% tags=["nbval-ignore-output"]
from ddp_course import data, launch, models, plots


def try_it(batch_size):
    torch.set_num_threads(1)  # a small network
    torch.manual_seed(dist.get_rank())
    train_set, _ = data.digits()
    return train_ddp(models.MLP(width=64), train_set, 5, batch_size, 0.2, seed=0)


def by_epoch(losses, nproc):
    samples = 1437 + -1437 % nproc  # with what the sampler pads
    return [
        {"rank": 0, "step": epoch, "samples": samples, "loss": loss}
        for epoch, loss in enumerate(losses)
    ]


curves = {}
for nproc, batch_size in ((1, 64), (2, 32)):
    _, losses = launch(try_it, batch_size, nproc=nproc).values[0]
    print(f"{nproc} rank(s), {batch_size} each:", [f"{loss:.4f}" for loss in losses])
    curves[f"{nproc} rank(s), {batch_size} each"] = by_epoch(losses, nproc)
plots.compare(curves, x="samples", title="Your loss by epoch, with one rank and with two")

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("06_train_ddp", train_ddp)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Four things change: who picks the samples, what wraps the model, whose loss is told, what is returned. The step itself stays as it is.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `DistributedSampler(dataset, seed=seed)` goes into the `DataLoader` as `sampler`, *instead* of `shuffle`, and has to be told each epoch's number.
# </details>
#
# <details><summary>Hint 3</summary>
#
# For the loss of an epoch keep two numbers: the sum of `loss.item() * len(y)`, and of `len(y)`. After the epoch one `dist.all_reduce` of both, on every rank; then
# divide. The weights without `module.` in their names are `ddp_model.module.state_dict()`.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# The loop with everything in it but `set_epoch`. In one process `shuffle=True` shuffles anew by itself, so nobody misses the line; here every epoch has the order of
# the first. All ranks agree, the loss falls, and only the weights tell:


# %% tags=["solution-only", "nbval-ignore-output"]
def forgets_set_epoch(model, dataset, epochs, batch_size, learning_rate, seed):
    sampler = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
    ddp_model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp_model.parameters(), learning_rate)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = F.cross_entropy(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(mean_loss := loss.detach().clone(), op=dist.ReduceOp.AVG)
        losses.append(mean_loss)
    return ddp_model.module.state_dict(), losses


assert not check("06_train_ddp", forgets_set_epoch, seed=1)
