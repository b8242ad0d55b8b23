# %% [markdown]
# # Exercise 07 · One gradient from many micro-batches
#
# A batch that does not fit into memory is cut into micro-batches. Their gradients add up in `.grad`, and what they add up to
# must be the gradient of the whole batch, to rounding.
#
# **Write** `accumulate_window(model, window)`. No ranks are needed yet.
#
# | | |
# | --- | --- |
# | `model` | maps `x` of shape `[N, 6]` to logits `[N, 3]` |
# | `window` | a list of `(x, y)`; micro-batches may differ in size |
# | afterwards | `.grad` of every parameter has grown by the gradient of the **mean** cross entropy over **all samples** of the window |
# | returns | that mean loss, as a number or a tensor without a graph |
# | memory | one micro-batch's activations at a time: a forward for each, its `backward()` before the next forward |
# | leaves alone | the weights; gradients that were there before (clearing and clipping are the caller's job) |
#
# About 15 minutes. Lesson [07](../notebooks/07_gradient_accumulation.ipynb), its first three sections, has all you need.

# %%
import torch
import torch.nn.functional as F


def accumulate_window(model, window):
    """Add the gradient of the window's mean loss to .grad; return the mean loss."""
    # BEGIN SOLUTION backward for each micro-batch, so that .grad grows by the large batch's gradient
    samples = sum(len(y) for _, y in window)  # known before the first backward
    total = 0.0
    for x, y in window:
        # A sum divided by all samples, not a mean divided by the number of micro-batches: then a
        # small micro-batch weighs what its samples weigh.
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward()  # inside the loop: the graph of this micro-batch is freed here
        total += loss.item()  # a number: no graph lives on
    return total
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Two micro-batches against the batch they were cut from. The picture reacts to your code.

# %% tags=["nbval-ignore-output"]
from ddp_course import plots


def gradient_of(model, call):
    model.zero_grad()
    call()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


torch.manual_seed(0)
model = torch.nn.Linear(6, 3).double()
x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))
large = gradient_of(model, lambda: F.cross_entropy(model(x), y).backward())
cuts = {"6 + 6": (6, 6), "10 + 2": (10, 2), "4 + 4 + 4": (4, 4, 4)}
sizes = {}
for name, cut in cuts.items():
    window = list(zip(x.split(cut), y.split(cut), strict=True))
    mine = gradient_of(model, lambda window=window: accumulate_window(model, window))
    sizes[name] = (large.norm().item(), mine.norm().item())
plots.prediction(
    sizes,
    unit="gradient norm: of the large batch (open) and yours (filled)",
    title="Is your gradient as long as the large batch's?",
    source="yours",
    guess="large batch",
)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("07_accumulate_window", accumulate_window)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# `loss.backward()` *adds* to `.grad`. So if each micro-batch contributes its share of the large batch's gradient, the sum is right.
# </details>
#
# <details><summary>Hint 2</summary>
#
# The mean over all samples is (sum of losses) / (number of samples). Both can be had piece by piece: `reduction="sum"`, and the
# sizes of all micro-batches, which are known before the first forward.
# </details>
#
# <details><summary>Hint 3</summary>
#
# `F.cross_entropy(model(x), y, reduction="sum") / samples`, with `samples` counted over the window. Return a number: `loss.item()`.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# `loss = F.cross_entropy(model(x), y) / len(window)` is in most scripts. It is right as long as all micro-batches are equally
# large, and so passes the first check. With 10 + 2 samples the two weigh as much as the ten, and the gradient is that of no mean
# over these samples:


# %% tags=["solution-only", "nbval-ignore-output"]
def mean_of_means(model, window):
    for x, y in window:
        (F.cross_entropy(model(x), y) / len(window)).backward()


window = list(zip(x.split((10, 2)), y.split((10, 2)), strict=True))
theirs = gradient_of(model, lambda: mean_of_means(model, window))
assert (theirs - large).abs().max() > 1e-3
check("07_accumulate_window", mean_of_means, seed=1)
