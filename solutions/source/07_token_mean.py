# %% [markdown]
# # Exercise 07 · The mean over all tokens
#
# Sentences differ in length, and padding does not count. So micro-batches, windows and ranks hold unequal numbers of tokens, and there are three places to
# take a mean too early. **Write** `token_mean(ddp_model, window)`: every token of every micro-batch on every rank weighs the same.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with its own window; the process group is up |
# | `ddp_model` | a model in `DistributedDataParallel`; maps `x`, int64 `[N, T]`, to logits `[N, T, V]` |
# | `window` | a list of one or more `(x, y)`; `y`, int64 `[N, T]`, is −100 where there is nothing to predict. Ranks may have **unequal numbers of micro-batches**; a micro-batch, or all of a rank's, may have no token at all |
# | afterwards | `.grad` on every rank has grown by the gradient of the **mean** cross entropy over **all tokens** of all micro-batches of all ranks |
# | returns | that mean loss, the same on every rank: a number, or a tensor without a graph |
# | messages | all gradients cross once in a window; counts and losses may cross besides, but on all ranks equally often |
# | memory | one micro-batch at a time: its `backward()` before the next forward |
# | leaves alone | the weights; gradients that were there before |
#
# About 20 minutes. Lesson [07](../notebooks/07_gradient_accumulation.ipynb), sections 6 and 7, has all you need.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F


def token_mean(ddp_model, window):
    """Add the gradient of the mean over all tokens of all ranks to .grad; return that mean."""
    # BEGIN SOLUTION sum every loss, divide by what DDP's mean makes into the tokens of all ranks
    # Before the loop, and once: a rank may have more micro-batches than another.
    count = torch.tensor(sum(int((y != -100).sum()) for _, y in window))
    dist.all_reduce(count)
    # DDP divides by world_size once more, so we divide by so much less.
    divisor = count.item() / dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64)

    def backward(x, y):
        logits = ddp_model(x).flatten(0, 1)
        # A sum: 0 where there is no token, not 0/0. Targets of −100 are left out.
        loss = F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=-100)
        (loss / divisor).backward()  # also where it is 0: the others wait for this rank
        total.add_(loss.detach())

    with ddp_model.no_sync():
        for x, y in window[:-1]:
            backward(x, y)
    backward(*window[-1])
    dist.all_reduce(total)  # for the log only: an all-reduced loss gives no gradient
    return total.item() / count.item()
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A small GPT on two ranks, against one process that takes all sentences at once: the length of the gradient. The dots should lie in
# each other.

# %% tags=["nbval-ignore-output"]
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, models, plots

LENGTHS = {  # tokens of the sentences of rank 0's and of rank 1's micro-batches
    "all alike": [[[8, 8], [8, 8]], [[8, 8], [8, 8]]],
    "long and short": [[[8, 8], [8, 8]], [[1, 2], [8, 1]]],
    "more on rank 0": [[[8, 8], [8, 8], [2, 1]], [[1, 3]]],
    "padding on rank 1": [[[8, 5], [0, 0]], [[0, 0], [0]]],
}


def sentences(name, rank):
    numbers, window = torch.Generator().manual_seed(rank), []
    for lengths in LENGTHS[name][rank]:
        x, y = torch.randint(30, (2, len(lengths), 8), generator=numbers)
        y[torch.arange(8) >= torch.tensor(lengths)[:, None]] = -100
        window.append((x, y))
    return window


# %% tags=["nbval-ignore-output"]
def small_gpt():
    torch.manual_seed(0)
    return models.GPT(30, context=8, width=32, heads=2).double()


def length(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def on_ranks():
    lengths = {}
    for name in LENGTHS:
        model = small_gpt()
        token_mean(DistributedDataParallel(model), sentences(name, dist.get_rank()))
        lengths[name] = length(model)
    return lengths


mine, pairs = launch(on_ranks).values[0], {}
for name in LENGTHS:
    model = small_gpt()
    x, y = map(torch.cat, zip(*(sentences(name, 0) + sentences(name, 1)), strict=True))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    pairs[name] = (length(model), mine[name])
plots.prediction(
    pairs,
    unit="gradient norm: of all sentences at once (open) and yours (filled)",
    title="Is your gradient that of all sentences at once?",
    source="yours",
    guess="large batch",
)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("07_token_mean", token_mean)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# The mean over all tokens is (sum of losses) / (number of tokens), both over all ranks. The number is known before the first forward, from `y` alone, and
# one small `all_reduce` adds it up.
# </details>
#
# <details><summary>Hint 2</summary>
#
# DDP turns the ranks' gradients g₀, g₁, … into (g₀ + g₁ + …) / `world_size`. By what must each rank divide its summed loss, so that this is the sum over the
# number of *all* tokens?
# </details>
#
# <details><summary>Hint 3</summary>
#
# `F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=-100)`, divided by `count / world_size`. All but the last micro-batch in `ddp_model.no_sync()`,
# forward and backward. A rank with nothing but padding runs them too.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# "The loss must be the one of all ranks, so I all-reduce it, then call `backward`." The value is right, the gradient is not. `all_reduce` adds *numbers* up; autograd knows
# nothing of the other ranks, whose part DDP then adds, and divides by `world_size`:


# %% tags=["solution-only", "nbval-ignore-output"]
def all_reduces_the_loss(ddp_model, window):
    count = torch.tensor(sum(int((y != -100).sum()) for _, y in window))
    dist.all_reduce(count)
    total = 0.0
    for k, (x, y) in enumerate(window, 1):
        ddp_model.require_backward_grad_sync = k == len(window)
        loss = F.cross_entropy(ddp_model(x).flatten(0, 1), y.flatten(), reduction="sum")
        everybody = loss.detach().clone()
        dist.all_reduce(everybody)
        loss = loss - loss.detach() + everybody  # the value of all ranks
        (loss / count).backward()  # and the gradient of this one
        total += everybody.item()
    return total / count.item()


assert not check("07_token_mean", all_reduces_the_loss, seed=1)
