# %% [markdown]
# # Exercise 13 · ZeRO-1
#
# Adam remembers two numbers for each parameter, and under DDP every rank remembers all of them. **Write** `zero1_optimizer(parameters, settings)`: Adam on the mean gradient
# of all ranks, with the state shared out, for any model.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with equal parameters; later every rank calls the function that it returns |
# | `parameters` | what `model.parameters()` gives: it can be read **once**; some may be frozen (`requires_grad` False). All have one type. The model is *not* in DDP |
# | `settings` | keyword arguments for `torch.optim.Adam`, such as `{"lr": 0.001, "weight_decay": 0.1}` |
# | returns | a function `step()`, called after each backward |
# | `step()` | averages the gradients over the ranks, takes Adam's step, and leaves the same new weights on every rank, as plain Adam would to rounding |
# | a gradient that is None | counts as zeros: perhaps only this rank did not use the parameter |
# | Adam's state | is `torch.optim.Adam`'s own, and **each rank holds its share only**: of n numbers at most ⌈n / world size⌉ (twice, for two moments) |
# | any number of parameters | also one that the world size does not divide |
# | on the wire | the gradients once, the weights once, in a step |
# | gradients | the caller clears them |
#
# About 25 minutes. Lesson [13](../notebooks/13_beyond_ddp.ipynb), section 2, has all parts.

# %%
import torch
import torch.distributed as dist
from torch import nn


def zero1_optimizer(parameters, settings):
    """Return step(): Adam on the mean gradient, its state shared out over the ranks."""
    # BEGIN SOLUTION flatten and pad, Adam over this rank's share; step: reduce-scatter, step, all-gather
    # A list: a generator would be empty when it is read again. Frozen ones never move.
    parameters = [p for p in parameters if p.requires_grad]
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def flat(tensors):
        vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
        # Zeros at the end make the shares equally long; they have no gradient to speak of.
        return nn.functional.pad(vector, (0, -len(vector) % world_size))

    # Adam makes its state for what it is given: a share of the vector, a share of the state.
    share = nn.Parameter(flat(parameters).chunk(world_size)[rank].clone())
    adam = torch.optim.Adam([share], **settings)

    def step():
        gradient = flat(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        )
        share.grad = torch.empty_like(share)
        dist.reduce_scatter(share.grad, list(gradient.chunk(world_size)))
        share.grad /= world_size  # it adds up, DDP would average
        adam.step()
        shares = [torch.empty_like(share) for _ in range(world_size)]
        dist.all_gather(shares, share.detach())  # by rank, so in the order of the vector
        vector = torch.cat(shares)
        start = 0
        for p in parameters:
            # Into the parameter itself: the model holds this one, not a new one.
            p.data.copy_(vector[start : start + p.numel()].view_as(p))
            start += p.numel()

    return step
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A small GPT on real text, on one, two and four ranks. What each holds is counted at the optimizer that steps, after ten steps of yours. Weights and gradients stay; the
# optimizer state should be halved each time.

# %% tags=["nbval-ignore-output"]
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_course import data, launch, memory, models, plots, zero


def train():
    torch.manual_seed(0)
    text, _ = data.characters()
    model = models.GPT(len(text.vocabulary), width=32, layers=1)
    step, stepped = zero1_optimizer(model.parameters(), {"lr": 0.01}), []
    register_optimizer_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    batches = iter(data.shard(text, micro_batch=16 // dist.get_world_size()))
    for _ in range(10):
        x, y = next(batches)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        model.zero_grad()
        loss.backward()
        step()
    parameters = list(model.parameters())
    return memory.Memory(
        sum(p.nbytes for p in parameters),
        sum(p.grad.nbytes for p in parameters),
        zero.state_bytes(stepped[-1]),
    ), loss.item()


runs = {ranks: launch(train, nproc=ranks).values[-1] for ranks in (1, 2, 4)}
print({ranks: f"loss {loss:.2f}" for ranks, (_, loss) in runs.items()})
plots.memory_ledger(
    {f"{ranks} ranks": held for ranks, (held, _) in runs.items()}, limit=None
)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time, on up to three ranks. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("13_zero1_optimizer", zero1_optimizer)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Once: a list of the parameters to train, one flat vector of them, this rank's part of it as an `nn.Parameter`, and Adam for this one. Then `step()`, which
# uses all four.
# </details>
#
# <details><summary>Hint 2</summary>
#
# `vector.chunk(world_size)[rank]` is a share if the length is a multiple of the world size: put `-len(vector) % world_size` zeros at the end, of the
# gradients as well.
# </details>
#
# <details><summary>Hint 3</summary>
#
# `dist.reduce_scatter(mine, list_of_shares)` adds up over the ranks, and `mine` is this rank's share of the sum. `dist.all_gather(list_of_shares, mine)` is the way back. Then copy
# the vector, piece by piece, into `p.data`.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# To forget that `reduce_scatter` adds up. With Adam's usual `eps` of 1e-8 the training looks the same, since Adam divides each gradient by its own size:


# %% tags=["solution-only", "nbval-ignore-output"]
def moved_further(optimizer_class):
    """Train with the gradient, and with twice the gradient: how far apart do they end?"""
    ends = []
    for factor in (1, 2):
        torch.manual_seed(0)
        model = models.MLP(width=32)
        start = nn.utils.parameters_to_vector(model.parameters()).detach()
        optimizer = optimizer_class(model.parameters(), 0.001)
        x, y = data.digits()[0].tensors
        for batch in range(10):
            part = slice(100 * batch, 100 * batch + 100)
            optimizer.zero_grad()
            (factor * F.cross_entropy(model(x[part]), y[part])).backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach() - start)
    return ((ends[1] - ends[0]).norm() / ends[0].norm()).item()


hidden, seen = moved_further(torch.optim.Adam), moved_further(torch.optim.SGD)
print(f"twice the gradient: Adam ends {hidden:.1%} away, SGD {seen:.0%}")
assert hidden < 0.05 and seen > 0.5

# %% [markdown] tags=["solution-only"]
# So the check uses an Adam with a large `eps`, in which the size of a gradient counts, and finds it:


# %% tags=["solution-only", "nbval-ignore-output"]
def forgets_to_divide(parameters, settings):
    from ddp_course.zero import ShardedAdam

    optimizer = ShardedAdam(parameters, **settings)

    def step():
        for p in optimizer.parameters:
            if p.grad is not None:
                p.grad *= dist.get_world_size()  # undoes the division
        optimizer.step()

    return step


assert not check("13_zero1_optimizer", forgets_to_divide, seed=1)
