# %% [markdown]
# # 07 · Gradient accumulation
#
# **What you will do.** Train with a batch that does not fit into memory, a few samples at a time; measure that it is the same gradient,
# and what it saves; then make the mistakes that most scripts make: the division, the last window, the clipping, `no_sync`, tokens,
# the schedule.
#
# **What you will learn.** What has to be divided by what, and when ranks have to talk.
#
# **What you need.** Lessons 00, 04 and 06. About 30 minutes.
#
# ---
# **The question.** A recipe says: batch 1024. You have 4 GPUs, and 64 samples fit into each. What now?

# %%
import contextlib
import itertools
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, launch, models, plots, predict, show

torch.set_num_threads(1)  # small tensors: threads would mostly wait for each other

steps_guess = predict.number(
    "4 ranks with micro-batches of 64: how many micro-batches does each rank add up for "
    "a global batch of 1024?", start=16, unit="micro-batches", low=1, high=32,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
micro_batch, accumulation_steps, world_size = 64, 4, 4
global_batch = micro_batch * accumulation_steps * world_size
print(f"{micro_batch} × {accumulation_steps} × {world_size} = {global_batch}")
assert global_batch == 1024
steps_guess.compare(accumulation_steps, title="64 × 4 × 4 = 1024", source="computed")

# %% [markdown]
# **Gradient accumulation**: run forward and backward on several *micro-batches* one after another, let their gradients add up in
# `.grad`, and step the optimizer once. The micro-batches of one step are a *window*. All of them count: over steps *and* ranks.
#
# ## 1. Is it the same gradient?
#
# `backward()` adds to `.grad`. So the loop needs no new machinery: only `step` and `zero_grad` move out of it. We compute in float64, so
# that rounding is small, and compare with the gradient of the whole batch at once.


# %%
def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def difference(ours, reference):
    """The relative difference of two gradients."""
    return ((ours - reference).norm() / reference.norm()).item()


images, labels = data.digits()[0].tensors
images = images.double()
torch.manual_seed(0)
model = models.MLP(width=64).double()

F.cross_entropy(model(images[:256]), labels[:256]).backward()
big_batch = gradient(model)

# %%
factor = predict.number(
    "Four micro-batches of 64, loss.backward() for each, nothing else. How many times "
    "the gradient of the 256 is in .grad?", start=1, unit="times", low=0, high=8,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
micro_batches = list(zip(images[:256].split(64), labels[:256].split(64), strict=True))

model.zero_grad()
for x, y in micro_batches:
    F.cross_entropy(model(x), y).backward()
undivided = gradient(model)
ratio = (undivided.norm() / big_batch.norm()).item()
assert abs(ratio - 4) < 1e-9

model.zero_grad()
for x, y in micro_batches:
    (F.cross_entropy(model(x), y) / 4).backward()
divided = difference(gradient(model), big_batch)
assert divided < 1e-12  # float64 rounding

print(f"divided by accumulation_steps: off by {divided:.0e}")
factor.compare(ratio, title="Without the division the gradient is too long")

# %% [markdown]
# `cross_entropy` takes the mean over its samples. Four means add up to four times the mean. So each loss is divided by the
# number of micro-batches. Forgetting it multiplies the learning rate by `accumulation_steps`, without a word.
#
# ## 2. Break it: the last window
#
# Here is the loop that you find in many scripts.


# %%
def classic_epoch(model, optimizer, batches, accumulation_steps, note):
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(model(x), y) / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            note(i)
            optimizer.step()
            optimizer.zero_grad()


taken = predict.number(
    "1,437 images, micro-batches of 64, accumulation over 4. How many of the images does "
    "an epoch of this loop use for a step?", start=1437, unit="images", low=0, high=1437,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
batches = list(zip(images.split(64), labels.split(64), strict=True))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.zero_grad()
noted = []
classic_epoch(model, optimizer, batches, 4, noted.append)
used = sum(len(y) for _, y in batches[: noted[-1] + 1])
left_over = gradient(model).norm().item()
print(f"{len(batches)} micro-batches, {len(noted)} steps, {used} of {len(labels)} images")
print(f"gradient that waits for the next epoch: norm {left_over:.2f}")
assert (len(batches), len(noted), used) == (23, 5, 1280)
assert left_over > 0
taken.compare(used, title="The ragged last window is dropped")

# %% [markdown]
# **Symptom.** None: training runs. **Cause.** 23 micro-batches are five windows of four and three left over. `(i + 1) % 4 == 0` is
# never true for those three, so no step is taken. Worse: their gradients stay in `.grad`, and the first window of the next
# epoch adds its own to them.
#
# The repair that comes to mind, to step at the end as well, divides three micro-batches by 4; and the very last one holds 29
# images, not 64. **Fix.** Count: *sum* the loss, and divide by the number of samples in the window.


# %%
def windows(batches, accumulation_steps):
    """Lists of up to accumulation_steps micro-batches; the last holds what is left."""
    batches = iter(batches)
    while window := list(itertools.islice(batches, accumulation_steps)):
        yield window


def accumulate_right(model, window):
    samples = sum(len(y) for _, y in window)
    for x, y in window:
        (F.cross_entropy(model(x), y, reduction="sum") / samples).backward()


def accumulate_by_number(model, window):
    for x, y in window:
        (F.cross_entropy(model(x), y) / 4).backward()


def accumulate_undivided(model, window):
    for x, y in window:
        F.cross_entropy(model(x), y).backward()


# %% [markdown]
# Two epochs, twelve windows. At each step the gradient of every way is compared with that of the whole window at once.


# %%
ways = {
    "summed, divided by samples": accumulate_right,
    "divided by 4, always": accumulate_by_number,
    "last window dropped": accumulate_by_number,
    "not divided": accumulate_undivided,
}


# %%
def compare_ways(epochs=2):
    torch.manual_seed(0)
    reference = models.MLP(width=64).double()
    copies = {name: models.MLP(width=64).double() for name in ways}
    found = {name: [] for name in ways}
    for window in itertools.chain(*(windows(batches, 4) for _ in range(epochs))):
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        F.cross_entropy(reference(x), y).backward()
        whole = gradient(reference)
        for name, accumulate_window in ways.items():
            copies[name].load_state_dict(reference.state_dict())
            accumulate_window(copies[name], window)
            dropped = name == "last window dropped" and len(window) < 4
            used = torch.zeros_like(whole) if dropped else gradient(copies[name])
            found[name].append(difference(used, whole))
            if not dropped:  # else its gradients leak into the next window
                copies[name].zero_grad()
        torch.optim.SGD(reference.parameters(), 0.1).step()
        reference.zero_grad()
    return found


# %% tags=["nbval-ignore-output"]
found = compare_ways()
plots.accumulated(
    found, rounding=1e-12, title="Done rightly it is the big batch, in every window"
)

# %%
right, by_number, dropped, not_divided = found.values()
assert max(right) < 1e-12  # float64 rounding
full = [
    step for step in range(12) if step not in (5, 11)
]  # 5 and 11 are the ragged windows
assert max(by_number[step] for step in full) < 1e-12
assert min(by_number[5], by_number[11]) > 0.1
assert dropped[5] == dropped[11] == 1 and dropped[6] > 0.1  # nothing, then a leak
assert min(not_divided) > 2
print("right in all", len(right), "windows: summed, divided by the number of samples")

# %% [markdown]
# The thick line stays at rounding. Dividing by 4 is right as long as all windows are alike, and wrong in the ragged ones. Dropping loses
# one window (a difference of 1: no gradient at all), *and* spoils the one after it.
#
# `ddp_course.accumulation` has `windows` for you. A window knows its samples:

# %%
from ddp_course import accumulation

show.source(accumulation.windows, accumulation.Window.__init__)

# %% [markdown]
# ## 3. Break it: clipping too early
#
# Clipping limits the length of the gradient that the optimizer gets. That gradient exists once a window.
#
# > **Predict.** Somebody clips after every `backward`. Which of the four micro-batches counts most in the end?


# %%
def clipped(every_micro_batch, max_norm=0.1):
    """The clipped gradient, and by what each micro-batch's part of it was multiplied."""
    torch.manual_seed(0)
    model, parts = models.MLP(width=64).double(), []
    for k, (x, y) in enumerate(micro_batches):
        (F.cross_entropy(model(x), y) / 4).backward()
        parts.append(1.0)
        if every_micro_batch or k == 3:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
            parts = [part * min(1, max_norm / norm) for part in parts]
    return gradient(model), parts


# %% tags=["nbval-ignore-output"]
torch.manual_seed(0)
model = models.MLP(width=64).double()
F.cross_entropy(model(images[:256]), labels[:256]).backward()
nn.utils.clip_grad_norm_(model.parameters(), 0.1)
for name, every in {"once a window": False, "after every backward": True}.items():
    clipped_gradient, parts = clipped(every)
    off = difference(clipped_gradient, gradient(model))
    print(f"clipped {name}: off by {off:.1%}, parts", [f"{part:.2f}" for part in parts])
    assert off > 0.01 if every else off < 1e-12
    assert parts == sorted(parts) and (parts[-1] > 2 * parts[0]) == every

# %% [markdown]
# Clipped after every backward, the first micro-batches are shortened again and again, the last one only once: it gets more than its
# share of the direction. Clip when the window is complete.
#
# ## 4. What is saved: memory
#
# Why do all this? Between forward and backward autograd keeps *activations*. They grow with the micro-batch; weights,
# gradients and optimizer state do not. PyTorch lets us watch what it keeps: `saved_tensors_hooks` sees every tensor that goes in.

# %%
import weakref
from collections import Counter


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


# %%
class Saved:
    """Bytes that autograd keeps for backward (weights aside): now, and at most."""

    def __init__(self, model):
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.copies, self.now, self.peak = Counter(), 0, 0

    def pack(self, tensor):
        memory, box = tensor.untyped_storage(), Box(tensor)
        if memory.data_ptr() not in self.weights:
            self.change(memory.data_ptr(), memory.nbytes(), 1)
            weakref.finalize(box, self.change, memory.data_ptr(), memory.nbytes(), -1)
        return box

    def change(self, place, nbytes, by):
        was = self.copies[place] > 0  # what is kept twice is there once
        self.copies[place] += by
        self.now += nbytes * ((self.copies[place] > 0) - was)
        self.peak = max(self.peak, self.now)

    def watch(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)


# %%
memory = predict.number(
    "256 images as four micro-batches of 64. What share of the activation memory of one "
    "batch of 256 is needed at the peak?", start=50, unit="%", low=0, high=100,
)  # fmt: skip


# %%
def peak(micro_batch, keep_graphs=False):
    """The most that autograd kept at once, in a window of 256 images."""
    model = models.MLP(width=512, depth=4).double()
    saved, total = Saved(model), 0
    parts = zip(
        images[:256].split(micro_batch), labels[:256].split(micro_batch), strict=True
    )
    with saved.watch():
        for x, y in parts:
            loss = F.cross_entropy(model(x.clone()), y, reduction="sum") / 256
            if keep_graphs:
                total = total + loss
            else:
                loss.backward()
        if keep_graphs:
            total.backward()
    return saved.peak


# %% tags=["nbval-ignore-output"]
peaks = {size: peak(size) for size in (256, 128, 64, 32, 16)}
for size, most in peaks.items():
    print(f"micro-batch {size:3d}: {most / 1e6:6.2f} MB of activations at the peak")
share = peaks[64] / peaks[256]
assert abs(share - 1 / 4) < 0.02
memory.compare(
    100 * share, title="A quarter of the micro-batch, a quarter of the activations"
)

# %% [markdown]
# Activations are proportional to the micro-batch; the gradient is the same, and as big as ever. Take the largest micro-batch that fits:
# smaller ones save memory that you do not need, and keep a GPU busy with smaller matrix products.
#
# ## 5. The exception: BatchNorm
#
# BatchNorm normalises over the samples that it sees *at once*, the micro-batch. It has no idea of windows.
#
# > **Predict.** Which of these layers keep the gradient of the whole batch: BatchNorm, LayerNorm, GroupNorm?


# %%
def accumulated_against_whole(norm, micro_batch=64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 10)).double()
    F.cross_entropy(model(images[:256]), labels[:256]).backward()
    whole = gradient(model)
    model.zero_grad()
    parts = (part[:256].split(micro_batch) for part in (images, labels))
    accumulate_right(model, list(zip(*parts, strict=True)))
    return difference(gradient(model), whole)


# %% tags=["nbval-ignore-output"]
with_norm = accumulated_against_whole(nn.BatchNorm1d(64))
of_four = accumulated_against_whole(nn.BatchNorm1d(64), micro_batch=4)
norms = {"none": nn.Identity(), "layer": nn.LayerNorm(64), "group": nn.GroupNorm(8, 64)}
without = max(accumulated_against_whole(norm) for norm in norms.values())
print(f"no norm, LayerNorm, GroupNorm: at most {without:.0e} off")
print(f"BatchNorm, micro-batches of 64: {with_norm:.0%} off; of 4: {of_four:.0%} off")
assert without < 1e-12 and 0.01 < with_norm < of_four

# %% [markdown]
# With BatchNorm, 4 × 64 is *another training* than 256, not necessarily a worse one. With micro-batches of 4 its statistics are those of four samples, and
# the gradient is another one altogether. LayerNorm and GroupNorm look at one sample at a time and are not concerned.
#
# ## 6. Under DDP: who must be quiet when
#
# DDP all-reduces in *every* backward. In a window only the sum counts, so all but the last all-reduce are for nothing.
# `model.no_sync()` switches them off. Where it stands matters. Four ways to write a window:

# %%
from ddp_course import trace
from ddp_course.network import SlowLink


def forward(model, x, y):
    with trace.span("forward"):
        return F.cross_entropy(model(x), y) / 4


def backward(loss):
    with trace.span("backward"):
        loss.backward()


def no_care(model, window):
    for x, y in window:
        backward(forward(model, x, y))


def around_backward(model, window):
    for k, (x, y) in enumerate(window):
        loss = forward(model, x, y)
        with model.no_sync() if k < 3 else contextlib.nullcontext():
            backward(loss)


# %%
def flag_after_forward(model, window):
    for k, (x, y) in enumerate(window):
        loss = forward(model, x, y)
        model.require_backward_grad_sync = k == 3  # what no_sync sets
        backward(loss)


def around_both(model, window):
    with model.no_sync():
        for x, y in window[:-1]:
            backward(forward(model, x, y))
    backward(forward(model, *window[-1]))


placements = {
    "no care": no_care,
    "no_sync around backward": around_backward,
    "flag set after forward": flag_after_forward,
    "no_sync around forward and backward": around_both,
}

# %%
quiet = predict.number(
    "DDP has four buckets here. How many all-reduces does a window of four micro-batches "
    "need with no_sync around backward only?", start=4, unit="all-reduces",
    low=0, high=20,
)  # fmt: skip

# %% [markdown]
# Every rank counts its all-reduces and times its windows. The cable is slow, so that the cost can be seen: sending all gradients
# takes five times as long as a micro-batch computes on this machine.


# %%
def traced_windows(accumulate_window, bandwidth, count=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=512, depth=4), bucket_cap_mb=1)
    model.register_comm_hook(None, trace.recorded(SlowLink(bandwidth)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    numbers = torch.Generator().manual_seed(dist.get_rank())  # other samples
    recorded = []
    for _ in range(count):
        x = torch.randn(4, 256, 64, generator=numbers)
        y = torch.randint(10, (4, 256), generator=numbers)
        dist.barrier()
        trace.clear()
        accumulate_window(model, list(zip(x, y, strict=True)))
        mine = gradient(model)
        dist.all_reduce(mean := mine.clone(), op=dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        recorded.append(trace.spans())
    return recorded[2:], difference(mine, mean)  # DDP settles its buckets in the first


def length(spans):
    return max(span["end"] for span in spans) - spans[0]["start"]


# %% tags=["nbval-ignore-output"]
perfect = launch(traced_windows, around_both, float("inf")).values[0][0]
compute = min(trace.seconds(spans, "forward", "backward") for spans in perfect) / 4
nbytes = 4 * models.parameters_of(models.MLP(width=512, depth=4))
bandwidth = nbytes / (5 * compute)
print(f"a micro-batch computes {1000 * compute:.0f} ms, cable {bandwidth / 1e6:.0f} MB/s")

# %% tags=["nbval-ignore-output"]
windows_of, unequal = {}, {}
for name, accumulate_window in placements.items():
    values = launch(traced_windows, accumulate_window, bandwidth).values
    windows_of[name] = min(values[0][0], key=length)  # rank 0's quickest
    unequal[name] = values[0][1]
    print(f"{name}: {1000 * length(windows_of[name]):.0f} ms a window; gradients of the "
          f"ranks differ by {unequal[name]:.0%}")  # fmt: skip
plots.placements(windows_of, title="no_sync helps only around forward and backward")

# %% tags=["nbval-ignore-output"]
sent = {
    name: sum(span["name"] == "all-reduce" for span in spans)
    for name, spans in windows_of.items()
}
print(sent)
assert list(sent.values()) == [16, 16, 4, 4]
equal = [gap < 1e-6 for gap in unequal.values()]
assert equal == [True, True, False, True]
slow, _, wrong_way, quick = (length(spans) for spans in windows_of.values())
assert slow > 1.15 * quick and wrong_way < slow
assert slow >= 4 * nbytes / bandwidth  # every micro-batch waits for the cable
quiet.compare(
    sent["no_sync around backward"], title="no_sync around backward does nothing"
)

# %% [markdown]
# Read the four lanes.
#
# * **No care**: right, and slow. Every micro-batch all-reduces every bucket and waits for the cable.
# * **no_sync around backward**: the same. **Cause.** DDP decides in its *forward* whether the next backward will talk. In backward it
#   is too late.
# * **Flag set after forward**: quick, and *wrong*: the ranks' gradients differ. Each forward sees the flag that the
#   micro-batch before it left behind. So the first micro-batch of a window talks, and the last, which should, does not. A well-known
#   tutorial had this line.
# * **Around forward and backward**: one all-reduce a bucket, at the end, of the sum.

# %%
starts = [
    span["start"]
    for span in windows_of["flag set after forward"]
    if span["name"] == "forward"
]
talks = [
    span["start"]
    for span in windows_of["flag set after forward"]
    if span["name"] == "all-reduce"
]
assert all(starts[0] < moment < starts[1] for moment in talks)
print("flag set after forward: only the first micro-batch of the window all-reduces")

# %% [markdown]
# The package's `accumulate` is the right placement as a loop. Forward and backward are both inside the `for`, so neither can be
# forgotten:

# %%
show.source(accumulation.accumulate)

# %% [markdown]
# ## 7. What is divided by what, on several ranks
#
# Back to what a mean is. In text, micro-batches have unequal numbers of *tokens*: sentences differ in length, and padding does
# not count. Ranks do too. Now there are three places to take a mean too early: in a micro-batch, in a window, over the ranks.


# %%
PAD = -100  # cross_entropy leaves such targets out


def sentences(rank, count=12):
    """x, y of one rank's window: 4 micro-batches of 3 sentences of unequal length."""
    numbers = torch.Generator().manual_seed(rank)
    text = torch.randint(30, (count, 17), generator=numbers)
    x, y = text[:, :-1], text[:, 1:].clone()
    lengths = torch.randint(1, 17, (count,), generator=numbers)
    y[torch.arange(16) >= lengths[:, None]] = PAD
    return list(zip(x.split(3), y.split(3), strict=True))


def token_loss(model, x, y, reduction):
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), reduction=reduction, ignore_index=PAD)


# %%
def tokens(y):
    return int((y != PAD).sum())


for rank in range(2):
    print(
        f"rank {rank}: tokens in its micro-batches",
        [tokens(y) for _, y in sentences(rank)],
    )


# %%
def small_gpt():
    torch.manual_seed(0)
    return models.GPT(30, context=16, width=32, heads=2).double()


def mean_of_means():
    model = DistributedDataParallel(small_gpt())
    window = sentences(dist.get_rank())
    for x, y in accumulation.accumulate(model, window):
        (token_loss(model, x, y, "mean") / len(window)).backward()
    return gradient(model)


def token_mean():
    model = DistributedDataParallel(small_gpt())
    window = accumulation.Window(sentences(dist.get_rank()), count=tokens)
    divisor = window.divisor()  # tokens of all ranks / world_size
    for x, y in accumulation.accumulate(model, window):
        (token_loss(model, x, y, "sum") / divisor).backward()
    return gradient(model)


# %% [markdown]
# > **Predict.** 1 %, 10 %, or more: how far off is the mean of the micro-batches' means?

# %% tags=["nbval-ignore-output"]
model = small_gpt()
x, y = (torch.cat(parts) for parts in zip(*(sentences(0) + sentences(1)), strict=True))
token_loss(model, x, y, "mean").backward()  # one process, all tokens at once
naive = difference(launch(mean_of_means).values[0], gradient(model))
exact = difference(launch(token_mean).values[0], gradient(model))
print(f"mean of micro-batch means: off by {naive:.0%}; sum over tokens: {exact:.0e}")
assert naive > 0.05 and exact < 1e-12

# %% [markdown]
# **Symptom.** None; the model is trained on another loss, in which a token of a short sentence weighs more. **Cause.** The mean of means is
# not the mean. **Fix.** Sum every loss, and divide by the number of tokens *of the whole window on all ranks*, over `world_size`,
# because DDP divides by `world_size` once more. It takes one small all-reduce, of a count:

# %%
show.source(accumulation.Window.divisor)

# %% [markdown]
# Two things people try instead. All-reducing the *loss* before `backward`: `all_reduce` adds up values, and autograd knows nothing of the
# other ranks, so not a bit of the gradient changes (PyTorch warns). And leaving out a micro-batch that holds padding only: under DDP every rank
# must run backward as often as the others, and the sum over no tokens is 0, with a gradient of 0.


# %% tags=["nbval-ignore-output"]
def loss_all_reduced(first):
    model = DistributedDataParallel(small_gpt())
    loss = token_loss(model, *sentences(dist.get_rank())[0], "sum")
    if first:
        dist.all_reduce(loss)
    loss.backward()
    return gradient(model)


assert torch.equal(
    *(launch(loss_all_reduced, first).values[0] for first in (True, False))
)

model = small_gpt()
x, y = sentences(0)[0]
loss = token_loss(model, x, torch.full_like(y, PAD), "sum")
loss.backward()
print(
    "padding only: loss",
    loss.item(),
    "largest gradient",
    gradient(model).abs().max().item(),
)
assert loss.item() == 0 and not gradient(model).any()

# %% [markdown]
# ## 8. Break it: a fix that eats the memory
#
# A repair that one meets: "I know the number of tokens only at the end, so I add up all losses, divide, and call `backward` once."
#
# > **Predict.** What does autograd keep then, for a window of 256 images in micro-batches of 64?

# %% tags=["nbval-ignore-output"]
kept = peak(64, keep_graphs=True)
print(f"backward for each micro-batch: {peaks[64] / 1e6:.2f} MB at the peak")
print(f"one backward for the summed loss: {kept / 1e6:.2f} MB")
print(f"one batch of 256: {peaks[256] / 1e6:.2f} MB")
assert kept > 3.5 * peaks[64]

# %% [markdown]
# Right gradient, and all that accumulation was for is gone: the summed loss keeps the graph of every micro-batch alive. **Fix.** The
# targets are there *before* the forward: count first, as `Window` does, and call `backward` for each micro-batch. And for the
# log add up `loss.detach()`, never `loss`.
#
# ## 9. Break it: the schedule
#
# The learning rate falls from 0.3 to 0 over 40 windows. Somebody calls `schedule.step()` where `backward()` is.


# %%
def scheduled(every_micro_batch, steps=40):
    """A record for each window: learning rate and loss."""
    torch.manual_seed(0)
    model, records = models.MLP(width=64).double(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        rate, total = optimizer.param_groups[0]["lr"], 0
        for x, y in micro_batches:
            loss = F.cross_entropy(model(x), y) / 4
            loss.backward()
            total += loss.item()
            if every_micro_batch:
                schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        if not every_micro_batch:
            schedule.step()
        records.append({"rank": 0, "step": step, "loss": total, "learning_rate": rate})
    return records


# %%
rate = predict.number(
    "40 windows of 4 micro-batches, schedule.step() after each backward. What is the "
    "learning rate in the last window?", start=0, low=-2, high=0.5,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings():  # PyTorch warns once: schedule before optimizer
    warnings.simplefilter("ignore")
    too_often, once_a_window = scheduled(True), scheduled(False)
plots.compare(
    {"after each window": once_a_window[:25], "after each backward": too_often[:25]},
    title="A schedule that counts micro-batches runs out, then climbs the loss",
)

# %% tags=["nbval-ignore-output"]
wrong_rates = [record["learning_rate"] for record in too_often]
print("windows with a learning rate of 0 or more:", sum(r >= 0 for r in wrong_rates))
assert min(record["learning_rate"] for record in once_a_window) > 0
assert wrong_rates[9] > 0 > wrong_rates[11] > wrong_rates[-1]
assert too_often[23]["loss"] > 1.1 * too_often[10]["loss"]  # uphill
assert not too_often[-1]["loss"] < 100  # and off, beyond the picture, or not a number
assert once_a_window[-1]["loss"] < once_a_window[10]["loss"]
rate.compare(wrong_rates[-1], title="Far below zero", unit="learning rate")

# %%
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.3)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
rates = []
for _ in range(4 * 40):
    optimizer.step()
    cosine.step()
    rates.append(cosine.get_last_lr()[0])
assert rates[39] < 1e-9 and abs(rates[79] - 0.3) < 1e-9 and rates[119] < 1e-9
print("a cosine for 40 steps, stepped 160 times: down, up to the full rate, down, up")

# %% [markdown]
# **Symptom.** The loss falls for a quarter of the run, then it rises: with a negative learning rate SGD walks uphill. (The picture stops
# before the loss leaves it.) With a cosine the rate goes down and up again instead, which is harder to see. **Fix.** One schedule step for each optimizer step; the schedule's
# length is counted in windows, the ragged ones too.
#
# ## 10. All of it, in one loop
#
# DDP, windows, divisor, a ragged end, unequal ranks; against one process that takes each global window at once.


# %%
def batches_of(rank):
    sizes = [[16, 16, 16, 16, 7], [16, 16, 16, 16, 3]][rank]
    x, y = (part[200 * rank :][: sum(sizes)] for part in (images, labels))
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def on_ranks(accumulation_steps=2):
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    mine = batches_of(dist.get_rank())
    for window in accumulation.windows(mine, accumulation_steps):
        divisor = window.divisor()
        for x, y in accumulation.accumulate(model, window):
            (F.cross_entropy(model(x), y, reduction="sum") / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


# %%
def alone():
    torch.manual_seed(0)
    model = models.MLP(width=64).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for pair in zip(windows(batches_of(0), 2), windows(batches_of(1), 2), strict=True):
        x, y = (torch.cat(parts) for parts in zip(*itertools.chain(*pair), strict=True))
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


# %% tags=["nbval-ignore-output"]
first, second = launch(on_ranks).values
apart = (first - alone()).abs().max().item()
print(f"three steps, the last window ragged: weights at most {apart:.0e} apart")
assert torch.equal(first, second) and apart < 1e-12

# %% [markdown]
# ## Quiz

# %%
from ddp_course import quiz

quiz.ask("07_gradient_accumulation")

# %% [markdown]
# ## Exercises
#
# * [07_accumulate_window](../exercises/07_accumulate_window.ipynb): one window, however ragged, whose gradient is that of the whole batch.
# * [07_no_sync_window](../exercises/07_no_sync_window.ipynb): the same under DDP, with one all-reduce for each bucket and window, and not one more.
# * [07_token_mean](../exercises/07_token_mean.ipynb): the exact token mean over micro-batches and ranks, without keeping graphs.
#
# ## How this looks on several GPUs and nodes
#
# The code is the same. Between GPUs of one node an all-reduce is cheap, and accumulation is for memory. Between nodes it is often the
# dearest part of a step; then `no_sync` with longer windows also buys *speed*, at the price of a bigger batch (lesson 06 on
# the learning rate). On a GPU watch `torch.cuda.max_memory_allocated()`. Sharded models (lesson 13) keep whole gradients in
# `no_sync`, which costs memory: there, test both.
#
# ## Where to read more
#
# * S. Li and others, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, on `no_sync`.
# * The PyTorch documentation: *DistributedDataParallel.no_sync*; *Automatic Mixed Precision examples*, on accumulation.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- four micro-batches against one batch: {divided:.0e} apart,
  undivided {ratio:.1f} times as long
- the classic loop used {used} of {len(labels)} images,
  and left a gradient of norm {left_over:.2f} behind
- activations at the peak with a quarter of the batch: {share:.0%},
  with all graphs kept: {kept / peaks[256]:.0%}
- BatchNorm: {with_norm:.0%} off, without it {without:.0e}
- all-reduces in a window, by placement: {list(sent.values())};
  no care took {slow / quick:.1f} times as long
- mean of micro-batch means: {naive:.0%} off; token mean {exact:.0e}
- a schedule stepped for each micro-batch ends at {wrong_rates[-1]:.2f}""")
