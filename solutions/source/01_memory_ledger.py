# %% [markdown]
# # Exercise 01 · The memory ledger
#
# Will it fit? Before you ask for GPUs you can know, byte by byte, what each rank will hold. **Write** `memory_ledger(…)`, which goes
# through a model's parameters and says it.
#
# | | |
# | --- | --- |
# | `model` | has `.parameters()`; some may be tied, some frozen (`requires_grad` False: never trained) |
# | `optimizer` | `"sgd"`, `"momentum"` (SGD with momentum) or `"adamw"` |
# | `precision` | `"fp32"`, `"amp"` or `"bf16"`, as in section 3 of the lesson; the model you are given stands for its sizes only |
# | `strategy` | `"ddp"`, `"zero1"` (optimizer state shared out), `"zero2"` (gradients as well) or `"zero3"` (weights as well) |
# | `world_size` | the number of ranks |
# | returns | `(weights, gradients, optimizer_state)`: bytes on *one* rank, the mean over the ranks, during training |
# | counted | what the tensors of parameters, gradients and optimizer take; a 32-bit copy of the *trained* weights belongs to the optimizer state |
# | not counted | activations, buffers, the optimizer's step counters |
#
# It is checked with exact arithmetic, and against what PyTorch's optimizers, DDP, ZeRO-1 and FSDP allocate on real ranks. About 20 minutes. Lesson
# [01](../notebooks/01_why_distributed.ipynb), sections 1, 3 and 6, has all you need.


# %%
def memory_ledger(model, optimizer, precision, strategy, world_size):
    """Return the bytes of (weights, gradients, optimizer state) that one rank holds."""
    # BEGIN SOLUTION bytes of weights, gradients and optimizer state, on one rank
    # parameters() gives a tied weight once, as it lies in memory once.
    every = sum(p.numel() for p in model.parameters())
    # Who is not trained gets no gradient, and the optimizer remembers nothing for it.
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # autocast ("amp") leaves weights and gradients in 32 bits: only the work is in 16.
    number = 2 if precision == "bf16" else 4
    # Steps are too small for 16 bits: the optimizer takes them on a 32-bit copy.
    copy = 4 if precision == "bf16" else 0
    remembered = {"sgd": 0, "momentum": 4, "adamw": 8}[optimizer]  # always 32 bits
    held = [number * every, number * trained, (copy + remembered) * trained]
    # ZeRO shares out from the back: the largest part first. DDP shares out nothing.
    whole = {"ddp": 3, "zero1": 2, "zero2": 1, "zero3": 0}[strategy]
    return (*held[:whole], *(part / world_size for part in held[whole:]))
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A GPT of 6.7 billion parameters on eight GPUs. On the device `"meta"` tensors have sizes and no memory, so it can be built here. Which
# strategies stay to the left of the line?

# %% tags=["nbval-ignore-output"]
import torch

from ddp_course import memory, models, plots

with torch.device("meta"):
    gpt = models.GPT(50257, context=2048, width=4096, layers=32, heads=32)
print(f"{models.parameters_of(gpt):,} parameters")

ledgers = {
    f"{strategy}, 8 GPUs": memory.Memory(
        *memory_ledger(gpt, "adamw", "bf16", strategy, 8)
    )
    for strategy in ("ddp", "zero1", "zero2", "zero3")
}
plots.memory_ledger(ledgers)

# %% [markdown]
# ## Check it
#
# A few seconds, new sizes each time. The last check takes real steps on two ranks.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("01_memory_ledger", memory_ledger)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# First two counts: all parameters (`sum(p.numel() for p in model.parameters())`, in which a tied weight comes once), and those that are
# trained. Which of the three parts goes by which count?
# </details>
#
# <details><summary>Hint 2</summary>
#
# Then bytes for each. 32 bits are 4 bytes. SGD remembers nothing, momentum one number for each trained weight, AdamW two, always in 32 bits. Only `"bf16"`
# changes weights and gradients to 2 bytes, and it gives the optimizer a
# copy of 4 of the *trained* weights. With AdamW every precision comes to 16 bytes for a trained weight.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Last the ranks: divide a part by `world_size` if the strategy shares it out, else leave it. Under `"ddp"` nothing is divided.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# “GPT-3 has 175 billion parameters, in 16 bits these are 350 GB, and on eight ranks 44 GB each: that fits.” Two mistakes in one sentence. Weights are
# an eighth of what AdamW training keeps, and DDP divides nothing. The check names the first one it meets:


# %% tags=["solution-only", "nbval-ignore-output"]
def weights_only(model, optimizer, precision, strategy, world_size):
    weights = sum(p.nbytes for p in model.parameters())
    return weights / world_size, 0, 0


assert not check("01_memory_ledger", weights_only, seed=1)

# %% [markdown] tags=["solution-only"]
# The package has the same arithmetic for a number of parameters that are all trained:

# %% tags=["solution-only"]
count = models.parameters_of(gpt)
for strategy in ("ddp", "zero1", "zero2", "zero3"):
    said = memory.training_memory(count, strategy=strategy, gpus=8)
    assert said.total == ledgers[f"{strategy}, 8 GPUs"].total
    print(f"{strategy}: {said.total / 1e9:.1f} GB on each of 8 GPUs")
