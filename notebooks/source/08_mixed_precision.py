# %% [markdown]
# # 08 · Mixed precision
#
# **What you will do.** Look at numbers bit by bit; see a real gradient vanish in fp16 and come back; write a dynamic loss scaler by hand and
# find PyTorch's to be the same; then make the usual mistakes with it.
#
# **What you will learn.** What autocast casts and what it leaves; why fp16 needs a loss scale and bf16 does not; where clipping belongs.
#
# **What you need.** Lessons 00 and 06. About 35 minutes. No GPU: autocast and the scaler work on a CPU, with linear layers.
#
# ---
# **The question.** Half as many bits: half the memory, and on the right hardware several times the speed. What do the missing bits take away?

# %%
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import data, formats, launch, models, plots, predict, report, show

torch.set_num_threads(1)  # small tensors: threads would mostly wait for each other

step = predict.number(
    "The next number above 1 that bf16 has is 1 + how many thousandths?",
    start=0.1, unit="thousandths", low=0, high=20,
)  # fmt: skip

# %% [markdown]
# ## 1. Numbers, bit by bit
#
# A float is a sign, an exponent (how large) and a fraction (how exact). Type a value, or drag its size, and watch what each format makes
# of it. Try 0.1, then 70000, then 1e-6, then 1e-8: which format is nearest, and which has lost the number?

# %% tags=["nbval-ignore-output"]
formats.explorer(1.0)

# %% tags=["nbval-ignore-output"]
print("format    bits   largest  smallest normal  smallest   next above 1")
for kind in formats.FORMATS.values():
    above = formats.look(1.0, kind).above - 1
    print(f"{kind.name:9} {kind.bits:3} {kind.largest:10.3g} "
          f"{kind.smallest_normal:14.3g} {kind.smallest:12.3g} {above:12.3g}")  # fmt: skip

fp16, bf16 = formats.FORMATS["fp16"], formats.FORMATS["bf16"]
assert torch.finfo(torch.bfloat16).eps == formats.look(1.0, bf16).above - 1 == 2**-7
assert bf16.largest > 1e38 and fp16.largest == 65504  # range
assert torch.finfo(torch.float16).eps == 2**-10  # exactness
step.compare(1000 * 2**-7, title="In bf16 the next number above 1 is 1.0078")

# %% [markdown]
# Both have 16 bits and spend them differently. **bf16** has fp32's exponent: the same range, but only two to three decimal digits.
# **fp16** has eight times finer steps, but ends at 65,504, and below 0.00006 it runs out of digits, then of numbers.
#
# So bf16 is no place to keep *weights*. An update of less than half a step is rounded away:

# %%
weight, update = torch.tensor(1.0, dtype=torch.bfloat16), 1e-3
for _ in range(1000):
    weight -= update  # a thousand small steps
assert weight == 1.0  # and it has not moved
print("after 1,000 updates of 0.001 the bf16 weight is", weight.item())

weight = torch.tensor(1.0, dtype=torch.float16)
assert weight - 1e-4 == weight  # fp16 has finer steps; a ten-thousandth is lost there too

# %% [markdown]
# That is why it is *mixed* precision: weights stay in fp32, and the expensive operations work on 16-bit copies.
#
# ## 2. Real gradients against fp16
#
# A small network, trained for ten epochs in fp32. Then one backward pass over all its training data, and the gradients of its
# *activations*: these are what flows back through the layers, in 16 bits when the forward was in 16 bits (section 3 shows it).


# %%
def trained(epochs=10):
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def activation_gradients(model):
    """The gradients of all layers' outputs, and the loss."""
    hidden, outputs = images, []
    for layer in model:
        hidden = layer(hidden)
        hidden.retain_grad()
        outputs.append(hidden)
    loss = F.cross_entropy(hidden, labels)
    loss.backward()
    return [output.grad for output in outputs], loss.item()


# %%
lost = predict.number(
    "After ten epochs: which share of the activations' gradients is too small for fp16 "
    "and becomes 0?", start=1, unit="%", low=0, high=100,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
images, labels = data.digits()[0].tensors
model = trained()
gradients, loss = activation_gradients(model)
print(f"loss {loss:.4f}")
plots.gradient_histogram(gradients)

# %% tags=["nbval-ignore-output"]
everything = torch.cat([gradient.flatten() for gradient in gradients])
there = everything[everything != 0]


def share_lost(values, dtype):
    return (values.to(dtype) == 0).double().mean().item()


untrained = torch.cat([g.flatten() for g in activation_gradients(trained(0))[0]])
at_first = share_lost(untrained[untrained != 0], torch.float16)
flushed = share_lost(there, torch.float16)
print(f"lost before training {at_first:.1%}, after it {flushed:.1%}")
assert at_first < 0.1 and flushed > 0.2
assert share_lost(there, torch.bfloat16) < 1e-4  # bf16 has fp32's range
lost.compare(100 * flushed, title="Much of what flows back is too small for fp16")

# %% [markdown]
# The better the network gets, the smaller its gradients. Left of the first dotted line is what fp16 turns into zeros: no error, no warning, the
# backward pass just carries less. In bf16 nearly nothing is lost.
#
# ### Break it: fp16 without a scale
#
# Does that matter? The smallest are lost first, and the sum often hardly notices. But lesson 07 divides each loss by the number of *all*
# targets of a window, and a large language model takes windows of millions of tokens (GPT-3: 3.2 million).
#
# > **Predict.** 64 images as one micro-batch of such a window, in fp16: how much of the weights' gradient is missing?


# %%
def weight_gradient(dtype, loss_scale=1.0, divisor=64):
    """The weights' gradient of 64 images; the loss is scaled, and the scale undone."""
    model.zero_grad()
    with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits = model(images[:64])
        loss = F.cross_entropy(logits, labels[:64], reduction="sum") / divisor
    (loss * loss_scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) / loss_scale


def off_by(loss_scale, divisor):
    exact = weight_gradient(torch.float32, divisor=divisor)
    ours = weight_gradient(torch.float16, loss_scale, divisor)
    return ((ours - exact).norm() / exact.norm()).item()


# %% tags=["nbval-ignore-output"]
million = 3_200_000
alone, in_window = off_by(1.0, 64), off_by(1.0, million)
print(
    f"fp16 against fp32: mean over 64 {alone:.1%} off, over 3.2 million {in_window:.1%}"
)
assert alone < 0.1 and in_window > 0.3

# %% [markdown]
# **Symptom.** No error, and the loss is right; but a large part of the gradient is missing. **Cause.** What should flow back is smaller than
# fp16's smallest number.
#
# **The repair** (Micikevicius and others, 2018): multiply the *loss* by a large number. By the chain rule every gradient is multiplied by it, and
# the histogram slides to the right. Divide the weights' gradients by it before the step.

# %% tags=["nbval-ignore-output"]
plots.gradient_histogram(
    gradients, loss_scale=2.0**16, title="The same gradients, with a loss scale of 2^16"
)

# %% tags=["nbval-ignore-output"]
scaled = share_lost(there * 2.0**16, torch.float16)
print(f"lost without a scale {flushed:.1%}, with 2^16 {scaled:.2%}")
assert scaled < flushed / 20
assert (there * 2.0**16).abs().max() < fp16.largest  # and nothing overflows yet

repaired = off_by(2.0**16, million)
print(f"the micro-batch of the large window: {in_window:.0%} off, scaled {repaired:.1%}")
assert repaired < 0.1

# %% [markdown]
# ## 3. What autocast casts
#
# `torch.amp.autocast` decides per operation. Matrix products run in 16 bits, where they gain; losses in fp32, where they would lose; most of
# the rest in whatever arrives.

# %% tags=["nbval-ignore-output"]
linear, x = nn.Linear(64, 10), images[:8]
with torch.amp.autocast("cpu", dtype=torch.bfloat16):
    logits = linear(x)
    rows = {
        "linear": logits,
        "relu of that": F.relu(logits),
        "16 bits + 32 bits": logits + torch.ones(10),
        "softmax": logits.softmax(1),
        "cross_entropy": F.cross_entropy(logits, labels[:8]),
    }
logits.retain_grad()
rows["cross_entropy"].backward()
rows["gradient of linear"] = logits.grad
rows |= {"weight": linear.weight, "its gradient": linear.weight.grad}
for name, value in rows.items():
    print(f"{name:18} {value.dtype}")

# %%
assert rows["linear"].dtype == rows["relu of that"].dtype == torch.bfloat16
assert rows["16 bits + 32 bits"].dtype == rows["cross_entropy"].dtype == torch.float32
assert rows["gradient of linear"].dtype == torch.bfloat16  # what flows back
assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32
print("activations and their gradients are in bf16, the loss and the weights in fp32")

# %% [markdown]
# The model was never touched: weights and their gradients are fp32; the 16-bit copies come and go. Only forward and loss belong inside the
# `with`: backward uses the types of the forward by itself.
#
# Which operations are on the lists differs between devices and releases of PyTorch: `softmax` and sums run in fp32 on a GPU, and, as you see if
# its line says `bfloat16`, not on every CPU. Which *types* there are differs, too. What if one is missing?

# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    with torch.amp.autocast("cpu", dtype=torch.float64):
        result = linear(x)
print(str(heard[0].message).splitlines()[0])
print("linear:", result.dtype)
assert "Disabling autocast" in str(heard[0].message)
assert result.dtype == torch.float32

# %% [markdown]
# A warning, and everything runs in fp32. Older releases did the same with fp16 on a CPU. So look at the type of a result once, at the start:
# `ddp_course.amp` multiplies two small matrices and raises an error if the type is not the one that was asked for.
#
# ### Break it: cast the model yourself
#
# The obvious short cut is `model.half()`.

# %% tags=["nbval-ignore-output"]
error = None
short_cut = nn.Linear(64, 10).half()
optimizer = torch.optim.SGD(short_cut.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(short_cut(x.half()).float().mean()).backward()
try:
    scaler.unscale_(optimizer)
except ValueError as caught:
    error = caught
    print("ValueError:", error)
assert "Attempting to unscale FP16 gradients" in str(error)

# %% [markdown]
# **Symptom.** The scaler refuses. **Cause.** The weights are fp16 now, and so are their gradients: dividing them by the scale would flush them
# after all. **Fix.** Leave the model in fp32, and let autocast make the copies.
#
# ## 4. A loss scaler by hand
#
# How large should the scale be? As large as possible without an overflow: that changes during training, so it is searched all the time. Double it
# when nothing has overflowed for a while; when a gradient is inf or nan, skip that step and halve it.


# %%
class HandScaler:
    def __init__(self, scale, growth_interval):
        self.scale, self.interval, self.good = scale, growth_interval, 0

    def step(self, optimizer):
        """Unscale, step unless something overflowed, adapt the scale; did it step?"""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        for gradient in gradients:
            gradient /= self.scale
        finite = all(gradient.isfinite().all() for gradient in gradients)
        if finite:
            optimizer.step()
            self.good += 1
            if self.good == self.interval:
                self.scale, self.good = self.scale * 2, 0
        else:
            self.scale, self.good = self.scale / 2, 0
        return finite


# %%
def train_in_fp16(scaler_of, steps, interval=15):
    """Train on one rank; the scaler is ours or PyTorch's. Report scale and loss."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = scaler_of(interval)
    images, labels = data.digits()[0].tensors
    for step in range(steps):
        batch = slice(step * 32 % 1400, step * 32 % 1400 + 32)
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        scale = scaler.scale if isinstance(scaler, HandScaler) else scaler.get_scale()
        (loss * scale).backward()
        if isinstance(scaler, HandScaler):
            skipped = not scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            skipped = scaler.get_scale() < scale
        optimizer.zero_grad()
        report(step=step, loss=loss.detach(), loss_scale=scale, skipped=skipped)
    return model.module.state_dict()


# %%
skips = predict.number(
    "The scale starts at 2^24 and doubles after 15 good steps. How many of the first 120 "
    "steps are skipped?", start=1, unit="steps", low=0, high=120,
)  # fmt: skip


# %%
def by_hand(interval):
    return HandScaler(2.0**24, interval)


def by_pytorch(interval):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=interval)
    scaler.scale(torch.ones(()))  # it makes its scale at the first use
    return scaler


ours = launch(train_in_fp16, by_hand, 120, nproc=1)
print("trained with ours")
theirs = launch(train_in_fp16, by_pytorch, 120, nproc=1)


def history(run):
    return [(record["loss_scale"], record["skipped"]) for record in run.records]


assert history(ours) == history(theirs)
for name, value in ours.values[0].items():
    assert torch.equal(value, theirs.values[0][name])  # bit for bit
print("ours and PyTorch's: the same scales, the same skipped steps, the same weights")

# %% tags=["nbval-ignore-output"]
plots.loss_scale(ours, growth_interval=15)

# %% tags=["nbval-ignore-output"]
count = sum(record["skipped"] for record in ours.records)
assert count >= 2
skips.compare(count, title="A few steps are the price of the search")

# %% [markdown]
# **This is what an inf does to a GradScaler** (one of the course's four practice questions): the step is *skipped*, weights and optimizer state stay as
# they were (the next run checks it), and the scale is halved; after `growth_interval` good steps (2,000 by default) it doubles again. An occasional ✕ means that it works.
#
# In your own loops write it with PyTorch's:
#
# ```python
# scaler.scale(loss).backward()
# scaler.unscale_(optimizer)   # only if you look at gradients
# nn.utils.clip_grad_norm_(model.parameters(), max_norm)
# scaler.step(optimizer)       # skips if one is inf or nan
# scaler.update()
# ```
#
# ### On several ranks
#
# > **Predict.** Rank 1 alone gets an inf. Does rank 0 take its step?


# %%
def one_rank_overflows():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    before = model.module.weight.detach().clone()
    loss = model(torch.ones(2, 4)).mean()
    if dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return model.module.weight.equal(before), len(optimizer.state), scaler.get_scale()


values = launch(one_rank_overflows).values
for rank, (kept, states, scale) in enumerate(values):
    print(f"rank {rank}: weights unchanged: {kept}, momenta: {states}, scale {scale:.0f}")
assert values == [(True, 0, 2.0**15)] * 2

# %% [markdown]
# No: the all-reduce has carried the inf to everybody's gradients, so all ranks decide alike. Lesson 09 shows what happens when they do not.
#
# ## 5. Break it: four ways to use a scaler wrongly
#
# ### Clipping before unscaling
#
# > **Predict.** Gradients are clipped to a norm of 1, but before they are unscaled. The scale is 65,536. How long is what the optimizer gets?


# %%
def norms(unscale_first):
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(images[:64]), labels[:64])
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    seen = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).item()
    scaler.step(optimizer)  # unscales by itself if nobody has
    return seen, nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


# %% tags=["nbval-ignore-output"]
right, wrong = norms(unscale_first=True), norms(unscale_first=False)
print(f"unscaled first: clip saw {right[0]:.2f}, the optimizer got {right[1]:.2g}")
print(f"clipped first:  clip saw {wrong[0]:,.0f}, the optimizer got {wrong[1]:.2g}")
assert wrong[0] / right[0] > 60_000  # it saw the scale, 65536, not the gradient
assert wrong[1] < 1e-4 < 0.1 < right[1]

# %% [markdown]
# **Symptom.** Steps so short that training stands still, without an error. **Cause.** Clip saw gradients that were 65,536 times too long, cut
# them to 1, and then the scaler divided by 65,536. **Fix.** `unscale_`, then clip.
#
# ### Unscaling twice

# %% tags=["nbval-ignore-output"]
error = None
model = models.MLP(width=64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(F.cross_entropy(model(images[:64]), labels[:64])).backward()
scaler.unscale_(optimizer)
try:
    scaler.unscale_(optimizer)  # for instance: once to clip, once to log the norm
except RuntimeError as caught:
    error = caught
    print("RuntimeError:", error)
assert "unscale_() has already been called" in str(error)

# %% [markdown]
# Once a step, for each optimizer: `update` starts the next one. With accumulation that means once a *window*.
#
# ### The schedule that runs ahead
#
# The first scale is often too high, so the first step is often skipped. The schedule does not know.


# %%
def four_steps(careful):
    """How many of four steps were taken, and the learning rate that is left."""
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    taken = 0
    for _ in range(4):
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(images[:64]), labels[:64])
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepped = scaler.get_scale() >= before
        taken += stepped
        if stepped or not careful:
            schedule.step()
    return taken, schedule.get_last_lr()[0]


# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    taken, left = four_steps(careful=False)
famous = [str(w.message) for w in heard if "optimizer.step()" in str(w.message)]
print(famous[0].split(". ")[0])
print(f"{taken} of 4 steps taken, learning rate left {left:.3f}")
assert 0 < taken < 4 and left == 0

# %% [markdown]
# The warning is famous: *"Detected call of `lr_scheduler.step()` before `optimizer.step()`"*. It is not about the order of your lines: the scaler skipped
# the step, and the schedule counted it. **Fix.** Advance the schedule only when the scale did not go down, that is when a step was taken.

# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    taken, left = four_steps(careful=True)
print(f"{taken} of 4 steps taken, learning rate left {left:.3f}")
assert abs(left - 0.1 * (1 - taken / 4)) < 1e-9
assert not any("optimizer.step()" in str(warning.message) for warning in heard)

# %% [markdown]
# ### A scale that falls to nothing
#
# One bad sample, a nan in the data, that comes in every batch: *every* step counts as an overflow.
#
# > **Predict.** The scale starts at 65,536. What will it be in the end? Is there an error?

# %% tags=["nbval-ignore-output"]
scaler = torch.amp.GradScaler("cpu")
poisoned = images[:64].clone()
poisoned[0, 0] = float("nan")
scales = [scaler.get_scale()]
while scales[-1] > 0:
    scaler.scale(F.cross_entropy(model(poisoned), labels[:64])).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scales.append(scaler.get_scale())
print(f"loss scale after 17 skipped steps: {scales[17]}, after {len(scales) - 1}: 0")
assert scales[17] == 0.5 and all(scale > 0 for scale in scales[:-1])

# %% [markdown]
# **Symptom.** None: nothing was learned, and nobody said so. **Cause.** Halving cannot make a nan finite. **Fix.** Find the nan, and watch the
# scale: when it falls and falls, it is not searching any more. `ddp_course.amp` warns once when it gets below 1:

# %% tags=["nbval-ignore-output"]
from ddp_course.amp import MixedPrecision

amp = MixedPrecision("fp16")
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for _ in range(20):
        amp.backward(F.cross_entropy(model(poisoned), labels[:64]))
        amp.step(optimizer)
print(heard[0].message)
assert len(heard) == 1 and "loss scale fell below 1" in str(heard[0].message)

# %% [markdown]
# Here is its whole step; the order of its lines is what this section was about.

# %%
show.source(MixedPrecision.step)

# %% [markdown]
# ## 6. bf16 needs no scaler
#
# > **Predict.** The same training in fp32, bf16 and fp16. Which of the three losses ends highest?

# %% tags=["nbval-ignore-output"]
from ddp_course import train

runs = {}
for precision in ("fp32", "bf16", "fp16"):
    runs[precision] = launch(train.run, train.Settings(epochs=5, precision=precision))
    print(precision, "trained")
plots.compare(runs, title="Three precisions learn the same")

# %% tags=["nbval-ignore-output"]
accuracy = {name: run.values[0]["accuracy"] for name, run in runs.items()}
print({name: f"{value:.1%}" for name, value in accuracy.items()})
assert max(accuracy.values()) - min(accuracy.values()) < 0.02
assert {record["loss_scale"] for record in runs["bf16"].records} == {1.0}

# %% [markdown]
# The curves lie on each other. With bf16 there is no scale, no skipped step, nothing to clip at the wrong place: where the hardware has it, it is the
# default choice.
#
# Many scripts keep the `GradScaler` with bf16.
#
# > **Predict.** A bf16 gradient computed with a loss scale of 65,536, and one without: how far apart are they?

# %%
plain, with_scale = (weight_gradient(torch.bfloat16, scale) for scale in (1.0, 2.0**16))
assert torch.equal(plain, with_scale)
print("bf16 with a loss scale and without: the same bits")

# %% [markdown]
# A factor of 2^16 only adds 16 to each exponent, and bf16 has room for that. So the scaler does nothing for bf16, except that it makes every
# step look for inf, and that a nan, from wherever, is skipped in silence. Leave it out.
#
# Code that you will meet still says `torch.cuda.amp.autocast()` and `torch.cuda.amp.GradScaler()`. Both are deprecated:

# %% tags=["nbval-ignore-output"]
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    torch.cuda.amp.autocast(enabled=False)
    torch.cuda.amp.GradScaler(enabled=False)
for warning in heard:
    print(str(warning.message).splitlines()[0])
assert sum("deprecated" in str(warning.message) for warning in heard) == 2
assert issubclass(torch.cuda.amp.autocast, torch.amp.autocast)
assert issubclass(torch.cuda.amp.GradScaler, torch.amp.GradScaler)

# %% [markdown]
# They are the new ones with `"cuda"` filled in: write `torch.amp.autocast("cuda", …)` and `torch.amp.GradScaler("cuda")`, which take `"cpu"` as well.
#
# ## 7. What does it win?
#
# Memory first. Under autocast the activations that are kept for backward are the 16-bit ones.


# %%
def kept_for_backward(dtype):
    """MB that autograd keeps: of activations, and of 16-bit copies of weights."""
    model, kept = models.MLP(width=512, depth=4), {}
    weights = {p.data_ptr() for p in model.parameters()}
    sizes = {p.numel() for p in model.parameters()}

    def pack(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = (tensor.numel() in sizes, memory.nbytes() / 1e6)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = F.cross_entropy(model(images[:256].clone()), labels[:256])
        loss.backward()
    of_weights = sum(size for copy, size in kept.values() if copy)
    return sum(size for copy, size in kept.values() if not copy), of_weights


# %% tags=["nbval-ignore-output"]
kept = {dtype: kept_for_backward(dtype) for dtype in (torch.float32, torch.bfloat16)}
for dtype, (activations, copies) in kept.items():
    print(f"{dtype}: activations {activations:.2f} MB, copies of weights {copies:.2f} MB")
kept_share = kept[torch.bfloat16][0] / kept[torch.float32][0]
assert kept_share < 0.7
assert kept[torch.float32][1] == 0 < kept[torch.bfloat16][1]

# %% [markdown]
# Activations: about half. Weights, gradients and optimizer state are not smaller, they are still fp32, and the 16-bit copies of the weights come on
# top. So 16 bits save memory where activations are the larger part: with big batches, long sequences, deep networks.
#
# Then speed. It depends on the hardware: this is *this* processor, with *these* sizes.

# %%
guesses = {
    name: predict.number(
        f"Forward and backward of a wide network in {name}: how many times as long as in "
        "fp32 does it take here?", start=0.5, unit="times", low=0, high=4,
    )
    for name in ("bf16", "fp16")
}  # fmt: skip


# %%
def seconds(dtype, model, batch, clock=time.perf_counter, repeats=5):
    times = []
    for _ in range(repeats + 1):
        start = clock()
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model(batch).float().square().mean()
        loss.backward()
        times.append(clock() - start)
    return min(times[1:])  # the first prepares


# %% tags=["nbval-ignore-output"]
wide, batch = models.MLP(width=1024, depth=3), torch.randn(256, 64)
fp32_seconds = seconds(torch.float32, wide, batch)
longer = {
    "bf16": seconds(torch.bfloat16, wide, batch) / fp32_seconds,
    "fp16": seconds(torch.float16, wide, batch) / fp32_seconds,
}
predict.compare(
    {name: (guesses[name], longer[name]) for name in longer},
    unit="times as long as in fp32",
    title="What 16 bits cost or win on this processor",
)

# %% [markdown]
# Below 1 is a gain. A processor with matrix units for a format (Intel's AMX for bf16, say) can win with it; one without has to convert back and forth. NVIDIA's
# data-centre GPUs have such units since 2017 for fp16 (V100) and since 2020 for bf16 (A100), and there the gain is what everybody talks about. A number from your CPU
# says nothing about them.
#
# ### A trap: fp16 convolutions on a CPU
#
# One small layer, forward and backward.

# %% tags=["nbval-ignore-output"]
convolution, picture = nn.Conv2d(16, 16, 3), torch.randn(8, 16, 12, 12)
slow = seconds(torch.float16, convolution, picture, time.thread_time)
fast = seconds(torch.float32, convolution, picture, time.thread_time)
print(f"fp16 convolution on this CPU: {slow / fast:.1f} × the time of fp32")
assert slow > 2 * fast

error = None
try:
    MixedPrecision("fp16", "cpu").check_model(models.CNN())
except ValueError as caught:
    error = caught
    print("ValueError:", error)
assert "fp16 convolutions on a CPU" in str(error)

# %% [markdown]
# PyTorch has no fast backward for fp16 convolutions on a CPU, and takes a slow way round; on larger layers it is worse still. That is why this
# course trains its convolutional networks in bf16 or fp32 on a CPU, and why `ddp_course.amp` refuses the combination.
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("08_mixed_precision")

# %% [markdown]
# ## Exercises
#
# * [08_dynamic_scaler](../exercises/08_dynamic_scaler.ipynb): write the scaler of section 4 so that several optimizers and ranks can use it.
# * [08_amp_step](../exercises/08_amp_step.ipynb): put the lines of one training step in the right order, and tell the schedule what happened.
#
# ## How this looks on several GPUs and nodes
#
# The same code, with `"cuda"` for `"cpu"`. On GPUs of the Ampere generation and later use bf16; on older ones (V100, T4) fp16 with the scaler. DDP all-reduces
# the *weights'* gradients, which are fp32: mixed precision does not make them smaller. A communication hook can (lesson 10). Each rank has a scaler of its own, and they agree because the gradients do.
#
# ## Where to read more
#
# * Micikevicius, Narang, Alben and others: *Mixed Precision Training* (ICLR 2018). fp32 master weights and loss scaling.
# * Kalamkar, Mudigere, Mellempudi and others: *A Study of BFLOAT16 for Deep Learning Training* (2019).
# * Micikevicius, Stosic, Burgess and others: *FP8 Formats for Deep Learning* (2022).
# * PyTorch documentation: *Automatic Mixed Precision package – torch.amp*, and *Automatic Mixed Precision examples*.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"too small for fp16 after ten epochs: {flushed:.0%}; scaled by 2^16: {scaled:.2%}")
print(
    f"a gradient in a window of 3.2 million: {in_window:.0%} off, scaled {repaired:.1%}"
)
print(f"steps skipped while the scale was searched: {count} of 120")
print(f"clipping before unscaling saw {wrong[0] / right[0]:,.0f} × the gradient norm")
print(f"activations kept in bf16: {kept_share:.0%} of fp32's")
print("forward and backward on this CPU, against fp32:", end=" ")
print(", ".join(f"{name} {ratio:.1f} times" for name, ratio in longer.items()))
print("test accuracy", {name: f"{value:.1%}" for name, value in accuracy.items()})
