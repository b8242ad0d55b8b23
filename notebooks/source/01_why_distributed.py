# %% [markdown]
# # 01 · Why distributed?
#
# **What you will do.** Count, byte by byte, what one training step of a real small model keeps in memory. Turn the count into a
# formula, and the formula on models that no single GPU can train. Then measure on real ranks which strategies help.
#
# **What you will learn.** Why 350 GB of weights is not 350 GB of training; what sets the number of days; six ways to share
# the work out, what each of them splits and what it must send.
#
# **What you need.** Lesson 00. About 25 minutes. No GPU: bytes are bytes.
#
# ---
# **The question.** GPT-3 has 175 billion parameters. In 16-bit numbers its weights are 350 GB, and five GPUs with 80 GB each have
# 400 GB. Why can nobody train it on those five?

# %% [markdown]
# ## 1. What does a training step keep?
#
# > **Predict.** A weight in 32-bit floating point is 4 bytes. During training with the AdamW optimizer, how many bytes does
# > your memory hold *per weight*, without the activations? Set your number before you run the next cell.

# %%
from ddp_course import predict

bytes_per_weight = predict.number(
    "How many bytes per weight does training with AdamW hold?", start=4, unit="bytes"
)

# %% [markdown]
# No formula yet. Take one step with a real model, then ask every tensor that is still there how big it is.

# %%
import torch
import torch.nn.functional as F

from ddp_course import models

print("the first optimizer in a notebook loads more of PyTorch: some seconds …")
torch.manual_seed(0)
model = models.MLP(width=512)
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 64), torch.randint(10, (32,))

F.cross_entropy(model(x), y).backward()
optimizer.step()

weights = sum(p.nbytes for p in model.parameters())
gradients = sum(p.grad.nbytes for p in model.parameters())
states = [v for state in optimizer.state.values() for v in state.values()]
optimizer_state = sum(v.nbytes for v in states if v.dim() > 0)  # not the step counters

count = models.parameters_of(model)
print(f"{count:,} parameters")
print(f"weights          {weights:>10,} bytes")
print(f"gradients        {gradients:>10,} bytes")
print(f"optimizer state  {optimizer_state:>10,} bytes")

# %% tags=["nbval-ignore-output"]
measured = (weights + gradients + optimizer_state) / count
assert measured == 16
bytes_per_weight.compare(measured, title="AdamW holds four numbers for every weight")

# %% [markdown]
# Sixteen bytes, four numbers for each weight: the weight, its gradient, and two that AdamW remembers, a running mean of the gradient and
# one of its square. Nothing of it can be thrown away between steps, except the gradient. Two kinds of weights cost less. A *frozen* one
# (`requires_grad_(False)`) gets no gradient, so the optimizer remembers nothing for it. A *tied* one, the same tensor in two places, is one
# tensor and counts once:

# %%
frozen = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
free = torch.nn.Linear(64, 64, bias=False)
tied = torch.nn.Linear(64, 64, bias=False)
tied.weight = free.weight
both = torch.nn.Sequential(frozen, free, tied)
optimizer = torch.optim.AdamW(both.parameters())
both(torch.randn(8, 64)).sum().backward()
optimizer.step()

remembered = [p for p in both.parameters() if optimizer.state[p]]
assert frozen.weight.grad is None and len(remembered) == 1
assert models.parameters_of(both) == 2 * 64 * 64  # not three times
print(
    "of three layers:", models.parameters_of(both), "weights,", len(remembered), "state"
)

# %% [markdown]
# > **Predict.** Plain SGD remembers nothing. SGD with momentum remembers one number. Which order do you expect, from the least memory to the
# > most?

# %%
order = predict.order(
    "From the least memory per weight to the most?",
    ["AdamW", "SGD", "SGD with momentum", "inference, no training"],
)

# %%
from ddp_course import memory


def loss_of(model):
    return F.cross_entropy(model(x), y)


makers = {
    "SGD": lambda weights: torch.optim.SGD(weights, 0.1),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
held = {"inference, no training": weights / count}
for name, make in makers.items():
    counted = memory.measure(model, make(model.parameters()), loss_of)
    held[name] = (counted.total - counted.activations) / count
assert held == {
    "inference, no training": 4,
    "SGD": 8,
    "SGD with momentum": 12,
    "AdamW": 16,
}
order.compare(held, title="Bytes per weight", unit="bytes")

# %% [markdown]
# `memory.measure` is the counting of the cell above, made into a function, and one thing more: it also counts what `autograd` saved
# during the forward pass. Here is its source.

# %%
from ddp_course import show

show.source(memory.measure)

# %% [markdown]
# ## 2. Activations: what the batch costs
#
# To compute gradients, backward needs what forward saw: the input of every layer. Autograd keeps them, and PyTorch calls a hook
# for each tensor that it keeps. The hook above adds up their sizes.
#
# > **Predict.** You make the batch 16 times as large, 32 → 512 samples. How many times as large is all of the training memory, weights,
# > gradients, optimizer state and activations together?

# %%
growth = predict.number(
    "A batch 16 times as large: how many times the memory?", start=16, unit="times"
)


# %% tags=["nbval-ignore-output"]
def measured_with(samples):
    x, y = torch.randn(samples, 64), torch.randint(10, (samples,))
    optimizer = torch.optim.AdamW(model.parameters())
    return memory.measure(model, optimizer, lambda model: F.cross_entropy(model(x), y))


small, large = measured_with(32), measured_with(512)
print(f"batch of 32\n{small}\n")
print(f"batch of 512\n{large}")
assert (small.weights, small.optimizer_state) == (large.weights, large.optimizer_state)
assert abs(large.activations / small.activations - 16) < 0.01  # but for one shared number

# %% tags=["nbval-ignore-output"]
times = large.total / small.total
assert 1 < times < 2
growth.compare(
    times, title="A batch 16 times as large takes nothing like 16 times the memory"
)

# %% [markdown]
# The batch only makes *activations* grow. Here they are few: each weight of an MLP is used once for a sample. In a transformer every
# weight is used for every token of every sample, and activations can outgrow all the rest. There is a formula for them (Korthikanti
# and others, 2022). Are they more than all the rest in our own small GPT, and does the formula fit?

# %% tags=["nbval-ignore-output"]
shape = {"layers": 4, "width": 128, "heads": 4, "context": 64}
gpt = models.GPT(vocabulary=100, **shape)
tokens = torch.randint(100, (8, 64))


def gpt_loss(model):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


counted = memory.measure(gpt, torch.optim.AdamW(gpt.parameters()), gpt_loss)
formula = memory.activation_memory(**shape, micro_batch=8, recompute="selective")
print(formula, "in 16 bit, so twice that in the 32 bit used here")
print("measured / formula:", round(counted.activations / (2 * formula.value), 2))
assert 0.9 < counted.activations / (2 * formula.value) < 1.1
rest = counted.total - counted.activations
print("activations / all the rest:", round(counted.activations / rest, 2))
assert counted.activations > rest

# %% [markdown]
# Within a few percent, and more than weights, gradients and optimizer state together. (The factors before the 34 are the numbers
# that pass from layer to layer: layers × tokens × samples × width. For each of
# them, the paper counts, backward needs 34 bytes of what a layer computed. `"selective"` says that attention does not
# keep its matrix of all pairs of tokens: our GPT does not, like flash attention on a GPU. One that does keeps 5 × heads × tokens / width
# bytes more for each of these numbers.)
#
# ## 3. The ledger of a big model
#
# Now the same arithmetic for 175 billion parameters. In mixed precision as the large models were trained, weights and gradients are
# 16 bits, and the optimizer keeps a 32-bit copy of the weights besides its two numbers.
#
# > **Predict.** How many GPUs with 80 GB would it take to hold what training GPT-3 needs, without activations?

# %%
gpus = predict.number(
    "How many 80 GB GPUs hold what training GPT-3 keeps?", start=5, unit="GPUs"
)

# %% tags=["nbval-ignore-output"]
import math

gpt3 = memory.training_memory(175e9, precision="bf16", optimizer="adamw")
print(gpt3)
for_weights, for_training = math.ceil(gpt3.weights / 80e9), math.ceil(gpt3.total / 80e9)
print(f"GPUs for the weights: {for_weights}; for training: {for_training}")
assert (for_weights, for_training) == (5, 35) and gpt3.total == 8 * gpt3.weights
gpus.compare(
    for_training, title="Weights fit on 5 GPUs, training needs 35", source="computed"
)

# %% [markdown]
# **350 GB of weights is not 350 GB of training.** It is 16 bytes a parameter again, only cut differently: 2 for the weight, 2 for the
# gradient, 12 in the optimizer (Rajbhandari and others, 2020). You will find the 350 GB in many texts as the reason why one
# GPU does not suffice. It is true, and it understates the matter eight times. Then come the activations. For a single text of
# 2,048 tokens, in GPT-3's published sizes, with attention that keeps its matrices:

# %% tags=["nbval-ignore-output"]
from ddp_course import plots

sizes = {"layers": 96, "width": 12288, "heads": 96, "context": 2048}
activations = memory.activation_memory(**sizes, micro_batch=1)
print(activations)
gpt3 = memory.training_memory(175e9, activations=activations.value)
assert 2.8e12 < gpt3.total < 3.2e12
plots.memory_ledger(gpt3, limit=80e9)

# %% [markdown]
# Read it from top to bottom: each bar adds a part to the one above it. The dashed line is all that one GPU has. The weights alone
# burst it.
#
# Does 16-bit arithmetic at least halve the memory? Not of weights, gradients and optimizer:

# %%
for precision in ("fp32", "amp", "bf16"):
    one = memory.training_memory(1e9, precision=precision)
    parts = [f"{name} {value / 1e9:.0f}" for name, value in one.parts().items() if value]
    print(f"{precision}: {' + '.join(parts)} = {one.total / 1e9:.0f} bytes per parameter")
    assert one.total == 16e9

# %% [markdown]
# `amp` is what `torch.amp.autocast` does: weights stay in 32 bits, only the work is done in 16. All three take 16 bytes; what 16 bits
# save is *activations* and time (lesson 08).
#
# Now play. Which settings stay to the left of the line? (`zero3` is a strategy that shares all of it out over the GPUs: section 6. Without
# a live notebook, you see the start values only.)

# %% tags=["nbval-ignore-output"]
from ddp_course import calculators

calculators.training_memory("GPT-3 6.7 B", strategy="zero3", gpus=8, micro_batch=1)

# %% [markdown]
# ## 4. Days
#
# Memory is one reason. Time is the other. A multiplication with a weight and an addition are two floating point operations; forward does
# that once for each weight and token, backward twice. That makes about 6·N·D for N parameters and D tokens (Kaplan and others, 2020).
# PyTorch can count the operations of a real step. Does the rule hold?

# %% tags=["nbval-ignore-output"]
from torch.utils.flop_counter import FlopCounterMode

with FlopCounterMode(display=False) as counter:
    gpt_loss(gpt).backward()

rule = 6 * models.parameters_of(gpt) * tokens.numel()
print(f"counted / 6·N·D: {counter.get_total_flops() / rule:.2f}")
assert 0.9 < counter.get_total_flops() / rule < 1.1

# %% [markdown]
# > **Predict.** GPT-3 saw 300 billion tokens. An A100 GPU could do at most 312·10¹² operations a second (in 16 bits), and training keeps it busy
# > for, say, 40 % of that. How many *years* would a single one take, had it the memory?

# %%
years = predict.number("How many years on one GPU?", start=5, unit="years")

# %% tags=["nbval-ignore-output"]
alone = memory.training_time(175e9, 300e9, gpus=1, peak=312e12, utilisation=0.4)
many = memory.training_time(175e9, 300e9, gpus=1024, peak=312e12, utilisation=0.4)
print(alone, "\n")
print(many)
assert alone.value / many.value == 1024
years.compare(
    alone.value / 365.25, title="On one GPU it takes a lifetime", source="computed"
)

# %% [markdown]
# Move the sliders: how many GPUs do you need to be done within a week?

# %%
calculators.training_time()

# %% [markdown]
# The calculator's last line is too friendly: it divides by the number of GPUs as if they never waited for each other. Lesson 10 measures
# how much of it is true.
#
# ## 5. Bigger batches, and what they are called
#
# More GPUs work on more samples at once. Always say which batch you mean:
#
# $$\text{global batch} = \text{micro-batch} \times \text{accumulation steps} \times \text{world size}$$
#
# A *micro-batch* is what one rank pushes through the model at a time; it sets the activations. *Accumulation steps* is how many of them a
# rank adds up before the optimizer steps (lesson 07). *World size* is the number of ranks. The *global batch* is what the optimizer
# learns from.

# %%
calculators.global_batch(micro_batch=64, accumulation_steps=4, world_size=4)

# %% [markdown]
# **A worked example.** *A model trained with a batch of 32 fits into 16 GB. You train on 8 GPUs and keep 32 on each of them. How much
# memory is needed on each GPU, and in all?* Each GPU holds its own copy of weights, gradients and optimizer state, and activations for its
# own 32 samples: 16 GB each. In all, 8 × 16 = 128 GB. And the global batch has become 256. (Section 6 checks the copies on real ranks; the
# quiz asks it with other numbers.)
#
# ## 6. Break it: more ranks, and still too big
#
# Your model takes 16 bytes a parameter and does not fit. You have a second GPU, so you wrap the model in PyTorch's
# `DistributedDataParallel` (DDP), which trains it on several ranks at once.
#
# > **Predict.** Two ranks train together. How much does each of them hold, compared with one process alone?

# %%
share = predict.choose(
    "With DDP on two ranks, each rank holds …",
    ["half as much", "three quarters", "as much as one process alone"],
)

# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def prepared(strategy):
    torch.manual_seed(0)
    model = models.MLP(width=512)
    if strategy == "fsdp":  # shares out weights, gradients and optimizer state
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model][::2]:  # the linear layers
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())
    model = DistributedDataParallel(model)
    if strategy == "zero1":  # shares out the optimizer state
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    return model, torch.optim.AdamW(model.parameters())


# %%
def bytes_held(strategy):
    model, optimizer = prepared(strategy)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

    def here(tensor):  # of a sharded tensor, the part that this rank holds
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes

    states = getattr(optimizer, "optim", optimizer).state.values()
    return memory.Memory(
        sum(here(p) for p in model.parameters()),
        sum(here(p.grad) for p in model.parameters()),
        sum(here(v) for state in states for v in state.values() if v.dim() > 0),
    )


# %%
import functools

import ddp_course

# on the CPU, on a machine with GPUs too: the bytes are the same
launch = functools.partial(ddp_course.launch, backend="gloo")
alone = launch(bytes_held, "ddp", nproc=1).values[0]
on_each = launch(bytes_held, "ddp", nproc=2).values
print(f"one process: {alone.total:,} bytes")
print("two ranks:  ", *(f"{rank.total:,}" for rank in on_each), "bytes")
assert all(rank.total == alone.total for rank in on_each)
share.compare("as much as one process alone")

# %% [markdown]
# Not a byte less. **Cause.** DDP shares out the *samples*; model, gradients and optimizer are on every rank, whole. A model that is too
# big for one GPU is too big for DDP on a thousand. (DDP even adds buffers for its messages, which are not counted here.)
#
# **Fix.** Share out the state as well. ZeRO stage 1 shares out the optimizer state, stage 2 the gradients too, FSDP (ZeRO stage 3) all three. The code
# for 1 and 3 is above; lesson 13 explains it.

# %% tags=["nbval-ignore-output"]
bars = {"one process": alone}
for strategy in ("ddp", "zero1", "fsdp"):
    print(strategy, "…")
    for rank, value in enumerate(launch(bytes_held, strategy, nproc=2).values):
        bars[f"{strategy}, rank {rank}"] = value
plots.memory_ledger(
    bars, limit=None, title="DDP copies, ZeRO and FSDP share out (measured)"
)

# %%
for strategy in ("ddp", "zero1", "fsdp"):
    said = memory.training_memory(count, precision="fp32", strategy=strategy, gpus=2)
    ranks = [bars[f"{strategy}, rank {rank}"] for rank in range(2)]
    for part, value in said.parts().items():
        mean = sum(rank.parts()[part] for rank in ranks) / 2
        assert mean == value, (strategy, part)
    print(f"{strategy}: the formula says {said.total:,.0f} bytes a rank, and so it is")

# %% [markdown]
# The formula is right to the byte for the mean of the two ranks. (PyTorch's ZeRO-1 deals out whole tensors, so its two ranks differ.) For a
# big model, on eight GPUs, each with one text of 2,048 tokens:

# %% tags=["nbval-ignore-output"]
sizes = {"layers": 32, "width": 4096, "heads": 32, "context": 2048}  # GPT-3 6.7 B
saved = memory.activation_memory(**sizes, micro_batch=1, recompute="selective").value
strategies = {
    f"{name}, {gpus} GPU{'s' * (gpus > 1)}": memory.training_memory(
        6.7e9, strategy=name, gpus=gpus, activations=saved
    )
    for name, gpus in (("none", 1), ("ddp", 8), ("zero1", 8), ("zero2", 8), ("zero3", 8))
}
assert strategies["ddp, 8 GPUs"].total > 80e9 > strategies["zero1, 8 GPUs"].total
plots.memory_ledger(
    strategies, title="6.7 billion parameters: DDP does not fit 80 GB, ZeRO does"
)

# %% [markdown]
# ## 7. Six ways to share the work out
#
# | strategy | what is split | what is communicated | when it is used |
# | --- | --- | --- | --- |
# | **data** (DDP) | the samples of the global batch | gradients, averaged once an optimizer step | the model fits on one GPU: begin here |
# | **sharded data** (ZeRO, FSDP) | the samples, and also optimizer state, gradients, weights | weights gathered for the layer at work, gradients reduced to the rank that keeps that part | the model's state does not fit, a layer does |
# | **tensor** | the matrices inside each layer | activations, several times in every layer | one layer is too big or too slow; GPUs of one node with fast links |
# | **pipeline** | the layers, in stages | activations to the next stage, their gradients back | very deep models over many nodes; sends little, but stages wait at the start and the end |
# | **sequence, context** | the positions of each sequence | keys and values (or queries) in attention | sequences so long that their activations do not fit |
# | **expert** | the experts of a mixture-of-experts model | tokens to their experts and back | models with experts |
#
# They combine: tensor within a node, pipeline across nodes, data over all that is left.

# %% tags=["nbval-ignore-output"]
plots.strategies()

# %% [markdown]
# In each small picture, filled is what a rank holds. Look at *data*: the batch is halved, the model is twice there. In *tensor* it is the other way
# round. *Sharded data* halves both, and pays with weights that cross at every layer.
#
# ## Quiz

# %%
from ddp_course import quiz

quiz.ask("01_why_distributed")

# %% [markdown]
# ## Exercise
#
# [01_memory_ledger](../exercises/01_memory_ledger.ipynb): write the ledger yourself. Given a model, an optimizer and a number of ranks, say what each rank holds
# under DDP and under ZeRO's stages; it is checked against what real ranks allocate.
#
# ## How this looks on several GPUs and nodes
#
# The bytes are the same on a GPU, and some come on top: the CUDA context, buffers of NCCL and of DDP, and memory that PyTorch's
# allocator keeps for later. `torch.cuda.max_memory_allocated()` tells what tensors took at the peak, `nvidia-smi` what the process took
# in all. The days of section 4 are those of a data sheet and an assumed utilisation: nothing in this lesson timed your machine. On
# several nodes, what decides is what crosses: a strategy that sends at every layer (tensor) wants the fast links inside a node, one that
# sends once a step (data) or only between stages (pipeline) can live with the slower network between nodes.
#
# ## Where to read more
#
# *T. Brown and others*, Language Models are Few-Shot Learners, 2020: GPT-3's sizes. *S. Rajbhandari and others*, ZeRO: Memory
# Optimizations Toward Training Trillion Parameter Models, 2020: the 16 bytes, and how to share them out. *V. Korthikanti and others*,
# Reducing Activation Recomputation in Large Transformer Models, 2022: the activations. *J. Kaplan and others*, Scaling Laws for Neural
# Language Models, 2020: 6·N·D. *D. Narayanan and others*, Efficient Large-Scale Language Model Training on GPU Clusters Using
# Megatron-LM, 2021: strategies combined.
#
# ## What you measured and computed

# %%
print(f"""- AdamW holds {measured:.0f} bytes per weight, SGD {held["SGD"]:.0f}, without activations
- a batch 16 times as large took {times:.2f} times the memory of this MLP
- GPT-3: {for_weights} GPUs of 80 GB for the weights, {for_training} for training
- on 1,024 GPUs it takes {many.value:.0f} days, if they never wait
- each of two DDP ranks holds {on_each[0].total / alone.total:.0%} of one process's bytes
- each of two FSDP ranks: {bars["fsdp, rank 0"].total / alone.total:.0%}""")
