# %% [markdown]
# # Exercise 07 · One round of all-reduces for a window
#
# DDP all-reduces the gradients in every backward. In a window of micro-batches only their sum counts, so one round at the
# end is enough. **Write** `no_sync_window(ddp_model, window)`: the gradient of the large batch, and no message too many.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with its own window; the process group is up |
# | `ddp_model` | a model in `DistributedDataParallel`; maps `x` of shape `[N, 6]` to logits `[N, 3]` |
# | `window` | a list of one or more `(x, y)`. Micro-batches may differ in size, and ranks in how many they have; each rank's window holds **equally many samples** |
# | afterwards | `.grad` on every rank has grown by the gradient of the **mean** cross entropy over all samples of all ranks |
# | messages | all gradients cross **once** in a window, as in one ordinary backward |
# | memory | one micro-batch at a time: its `backward()` before the next forward |
# | leaves alone | the weights; gradients that were there before (clearing and clipping are the caller's job); and DDP synchronises again afterwards |
#
# What it returns does not matter. About 15 minutes. Lesson [07](../notebooks/07_gradient_accumulation.ipynb), sections 2 and 6,
# has all you need.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F


def no_sync_window(ddp_model, window):
    """Add the gradient of the global window's mean loss to .grad, with one round of all-reduces."""
    # BEGIN SOLUTION the gradient of the large batch over all ranks, all-reduced at the last micro-batch only
    samples = sum(len(y) for _, y in window)  # equal on all ranks: no need to ask them

    def loss(x, y):
        # Divided by this rank's samples only. DDP's all-reduce takes the mean over the ranks.
        return F.cross_entropy(ddp_model(x), y, reduction="sum") / samples

    with ddp_model.no_sync():
        for x, y in window[:-1]:
            # The forward is inside as well: it is there that DDP decides about the backward.
            loss(x, y).backward()
    # Outside: this backward all-reduces what has added up in .grad, not its own part alone.
    loss(*window[-1]).backward()
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Two ranks, a slow cable, a window of four micro-batches: yours beside one that does not care. Hooks in the model note when
# it computes; a dot is an all-reduce.

# %% tags=["nbval-ignore-output"]
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, models, plots, trace
from ddp_course.network import SlowLink, mbit


class Traced(models.MLP):
    """An MLP that records its forwards, and its backwards from the last layer to the first."""

    def forward(self, x):
        with trace.span("forward"):
            logits = super().forward(x)
        self.backward = trace.span("backward")
        logits.register_hook(lambda gradient: self.backward.__enter__())
        return logits

    def note_the_end(self):
        def end(parameter):
            self.backward.__exit__(None, None, None)

        self[0].weight.register_post_accumulate_grad_hook(end)
        return self


# %% tags=["nbval-ignore-output"]
def no_care(ddp_model, window):
    for x, y in window:
        (F.cross_entropy(ddp_model(x), y) / len(window)).backward()


def one_window(accumulate):
    bare = Traced(width=512, depth=4).note_the_end()
    model = DistributedDataParallel(bare, bucket_cap_mb=1)
    model.register_comm_hook(None, trace.recorded(SlowLink(mbit(400))))
    window = [(torch.randn(256, 64), torch.randint(10, (256,))) for _ in range(4)]
    for _ in range(3):  # DDP settles its buckets in the first
        dist.barrier()
        trace.clear()
        accumulate(model, window)
        model.zero_grad()
    return trace.spans()


plots.placements(
    {
        "no care": launch(one_window, no_care).values[0],
        "yours": launch(one_window, no_sync_window).values[0],
    },
    title="One round of all-reduces is enough. How many does yours take?",
)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("07_no_sync_window", no_sync_window)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `with ddp_model.no_sync():` switches the all-reduce off. Which micro-batches belong inside, and which one does not?
# </details>
#
# <details><summary>Hint 2</summary>
#
# DDP decides in the *forward* whether the next backward will all-reduce. So `ddp_model(x)` has to be inside too.
# </details>
#
# <details><summary>Hint 3</summary>
#
# `window[:-1]` inside, `window[-1]` after it. With one micro-batch `window[:-1]` is empty, and that is right. The loss of a micro-batch is its summed
# cross entropy over the samples of this rank's window; DDP does the division by the ranks.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# `no_sync` around `backward()` alone. It looks right, for it is the backward that all-reduces, and the gradient *is* right. But the forward has
# already decided: all four micro-batches all-reduce, and nothing is saved.


# %% tags=["solution-only", "nbval-ignore-output"]
import contextlib


def around_backward(ddp_model, window):
    samples = sum(len(y) for _, y in window)
    for k, (x, y) in enumerate(window, 1):
        loss = F.cross_entropy(ddp_model(x), y, reduction="sum") / samples
        with ddp_model.no_sync() if k < len(window) else contextlib.nullcontext():
            loss.backward()


assert not check("07_no_sync_window", around_backward, seed=1)

# %% [markdown] tags=["solution-only"]
# And the opposite: everything inside `no_sync`. It is quick, nothing fails, and every rank keeps its own gradient. After the next step there are as
# many models as ranks.


# %% tags=["solution-only", "nbval-ignore-output"]
def around_all(ddp_model, window):
    samples = sum(len(y) for _, y in window)
    with ddp_model.no_sync():
        for x, y in window:
            (F.cross_entropy(ddp_model(x), y, reduction="sum") / samples).backward()


assert not check("07_no_sync_window", around_all, seed=1)
