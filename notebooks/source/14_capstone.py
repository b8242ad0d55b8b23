# %% [markdown]
# # 14 · Capstone
#
# **What you will do.** Take a script that trains a small GPT in one process, and make it distributed: any number of ranks, any precision, stopped and started again.
# This lesson shows what "right" means for such a script and measures it; the exercise is yours.
#
# **What you will learn.** To know, with a handful of measurements, that a training script is right, before it runs for a week.
#
# **What you need.** Lessons 04 to 10. About 20 minutes for the lesson, an hour for the exercise.
#
# ---
# **The question.** You have changed forty lines of a script. It runs on eight GPUs and the loss goes down. Is it right?

# %%
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from ddp_course import data, flight, launch, models, plots, predict, report

# %% [markdown]
# ## 1. The script for one process
#
# A GPT reads the Python manual, 32 characters at a time, and learns which character comes next. `plan` holds all that can be chosen: a
# dataclass with `epochs`, `micro_batch`, `accumulation_steps`, `learning_rate`, `warmup_steps`, `max_norm`, `precision`, `init_scale`, `seed`, `checkpoint`. This script uses five of them.
# %%
from ddp_course.grading.exercises.capstone import Plan


def factor(step, warmup_steps, steps):
    """The learning rate's share of its peak: linear warm-up, then half a cosine to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * done))


def test_loss_of(model, test_set):
    total = tokens = 0
    with torch.no_grad():
        for x, y in DataLoader(test_set, 64):
            logits = model(x).flatten(0, 1)
            total += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
            tokens += y.numel()
    return total / tokens


# %%
def one_process(model, train_set, test_set, plan):
    loader = DataLoader(train_set, plan.micro_batch, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), plan.learning_rate)
    steps = plan.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(step, plan.warmup_steps, steps)
    )
    losses, tokens, begun = [], 0, time.perf_counter()
    for _ in range(plan.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            tokens += y.numel()
            report(step=len(losses) - 1, loss=losses[-1])
    tokens_per_s = tokens / (time.perf_counter() - begun)
    test_loss = test_loss_of(model, test_set)
    told = {"losses": losses, "test_loss": test_loss, "tokens_per_s": tokens_per_s}
    return told | {"weights": model.state_dict()}


# %% [markdown]
# What is a good loss here? Two marks, from counting alone: guess each character by its frequency, or by its frequency after the character before it.

# %%
text, test_text = data.characters(context=32)
size = len(text.vocabulary)


def loss_of(counts, numbers):
    shares = counts / counts.sum(-1, keepdim=True)
    before, after = numbers[:-1], numbers[1:]
    chance = shares[after] if counts.dim() == 1 else shares[before, after]
    return -chance.log().mean().item()


singles = torch.bincount(text.data, minlength=size) + 0.1
pairs = torch.full((size, size), 0.1)
one = torch.ones(len(text.data) - 1)
pairs.index_put_((text.data[:-1], text.data[1:]), one, accumulate=True)
by_frequency = loss_of(singles, test_text.data)
by_pair = loss_of(pairs, test_text.data)

# %% tags=["nbval-ignore-output"]
print(f"each character by its frequency:              loss {by_frequency:.2f}")
print(f"by its frequency after the one before it:     loss {by_pair:.2f}")
assert by_pair < by_frequency < math.log(size)

# %% tags=["nbval-ignore-output"]
from ddp_course import live

train_set, test_set = Subset(text, range(3840)), Subset(test_text, range(400))
plan = Plan(epochs=1, micro_batch=16, learning_rate=0.005, warmup_steps=10, max_norm=1.0)


def new_model(seed=0):
    torch.set_num_threads(1)  # a small network
    torch.manual_seed(seed)
    return models.GPT(size, context=32, width=64, layers=2)


def alone():
    return one_process(new_model(), train_set, test_set, plan)


with live.view() as view:
    baseline = launch(alone, nproc=1, on_record=view, timeout=120).values[0]

# %% tags=["nbval-ignore-output"]
print(f"test loss {baseline['test_loss']:.2f}, {baseline['tokens_per_s']:.0f} tokens/s")
assert baseline["test_loss"] < by_frequency

# %% [markdown]
# It has learned more than the frequency of characters, and about as much as the pairs tell. So expect no words yet. What it writes, one character at a time:


# %% tags=["nbval-ignore-output"]
def write(weights, start="The ", length=160):
    model = new_model()
    model.load_state_dict(weights)
    numbers, dice = text.encode(start), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(length):
            logits = model(numbers[None, -32:])[0, -1]
            following = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=dice)
            numbers = torch.cat([numbers, following])
    return text.decode(numbers)


print(write(baseline["weights"]))

# %% [markdown]
# ## 2. The first attempt
#
# Wrap the model in DDP, start it on every rank; in the script nothing else has changed. The exercise has nine checks; eight of them take a moment: one rank (windows, in a given order) · ranks together · the
# loss of each step · one all-reduce a window · the test loss · fp16 with overflows · stopped and started again · tokens per second. Some ask for what the script never
# had: windows, fp16, a checkpoint. **Predict** how many of the eight this passes.

# %%
guess = predict.number(
    "Checks that it passes, of eight", start=4, unit="checks", low=0, high=8
)


# %%
def first_attempt(model, train_set, test_set, plan):
    ddp_model = DistributedDataParallel(model)
    told = one_process(ddp_model, train_set, test_set, plan)
    return told | {"weights": model.state_dict()}  # without "module." in the names


# %% tags=["nbval-ignore-output"]
from ddp_course.grading.check import try_case
from ddp_course.grading.table import find

verdicts, stopped = {}, 0
for case in find("14_capstone").cases[:-1]:  # all but the one on real text
    wrong = try_case(case, first_attempt, seed=3)
    verdicts[case.name] = wrong is None
    stopped += "raises an error" in str(wrong) or "never ends" in str(wrong)
    said = "" if wrong is None else [line for line in wrong.splitlines() if line][-1]
    print("✓" if wrong is None else "✗", case.name, "\n    " + said if said else "")

passed = sum(verdicts.values())
assert passed <= 3
assert stopped == 0  # and yet it ran, on every rank, in every one of them

# %% tags=["nbval-ignore-output"]
guess.compare(passed, title="One line changed: how many of eight checks pass")

# %% [markdown]
# Some of these are things that are not there yet; they are easily noticed. The others are the trouble: every rank took all sequences, the test loss is another one, the gradients cross
# the wire in each micro-batch. And nothing stopped: no error, no warning, and a loss for every step.
# **A training loop that is wrong still trains.** So measure what a right one must keep.
#
# ## 3. What must hold
#
# | | invariant | lesson |
# | --- | --- | --- |
# | 1 | N ranks learn what one process learns from the global windows: same losses, same weights | 04, 07 |
# | 2 | all ranks hold the same weights, after every step | 04 |
# | 3 | the gradients are all-reduced once a window | 07 |
# | 4 | every sequence is trained on once an epoch (a few twice, where the sampler pads), and tested on exactly once | 05 |
# | 5 | an overflow on one rank skips the step on all; the schedule counts steps taken | 08, 09 |
# | 6 | stopped and started again, it ends where it would have ended | 09 |
# | 7 | tokens per second count all ranks' tokens and the slowest rank's time | 10 |
#
# The course's own loop, `train.train`, claims to keep them. Measure for it the losses of 1, the weights of 2 at the end, and 3, on one rank with micro-batches of 16 and on two ranks with 8. (`flight.log()`
# lists every collective of this rank with its tensors, as in lesson 09; the gradients are the one as long as the model.)

# %%
from ddp_course import train
from ddp_course.amp import MixedPrecision


def by_the_course(micro_batch, steps=40):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    model = DistributedDataParallel(new_model(seed=rank))  # rank 0's weights are sent
    loader = data.shard(train_set, micro_batch, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.005)
    amp = MixedPrecision("fp32", max_norm=1.0)
    schedule = train.warmup_then_cosine(optimizer, 10, 400)
    loop = train.train(
        model, loader, optimizer, amp, schedule, epochs=1, accumulation_steps=2
    )
    before, losses = len(flight.log()), []
    for record in loop:
        told = {name: record[name] for name in ("step", "loss", "samples_per_s")}
        report(**told)
        losses.append(record["loss"])
        if len(losses) == steps:
            break
    size = f"float32[{models.parameters_of(model)}]"  # all gradients, in one bucket
    reduced = sum(call.tensors == size for call in flight.log()[before:])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, weights, reduced


# %% tags=["nbval-ignore-output"]
runs = {n: launch(by_the_course, 16 // n, nproc=n, timeout=120) for n in (1, 2)}
plots.compare(
    {"1 rank": runs[1], "2 ranks": runs[2]}, title="One rank and two: the same losses"
)

# %% tags=["nbval-ignore-output"]
losses = {n: run.values[0][0] for n, run in runs.items()}
weights = [value[1] for value in runs[2].values]
apart = max(abs(a - b) for a, b in zip(losses[1], losses[2], strict=True))
reduced = runs[2].values[0][2] / len(losses[2])
print(f"1. losses of one rank and of two: at most {apart:.1g} apart")
print(f"2. weights of the two ranks: equal: {torch.equal(*weights)}")
print(f"3. gradients all-reduced {reduced:.2f} times a window of two micro-batches")
assert apart < 0.02  # 40 steps of Adam, sums in another order
assert torch.equal(*weights) and reduced == 1

# %% [markdown]
# Each of these is one cell, and takes seconds. Write them for your own script *before* you change it: on a small model, with a fixed seed, in `float64`. There rounding stays far below
# 1e-6, so that a larger difference is a mistake and not noise. (In `float32`, as above, 40 steps of Adam make more of it.)
#
# ## 4. What it brings
#
# A report on throughput names its ranks, its global batch, tokens per second over all ranks, and the **efficiency**: the speed-up divided by the ranks (lesson 10).
# In the course's loop a *sample* of text is one token. These are medians of steps, not the whole run as in section 1, and it steps once in two micro-batches.

# %% tags=["nbval-ignore-output"]
import statistics


def tokens_per_s(run):
    steps = [r["samples_per_s"] for r in run.records if r["rank"] == 0]
    return statistics.median(steps[5:])  # the first steps are slower: buffers, buckets


rates = {n: tokens_per_s(run) for n, run in runs.items()}
for n, rate in rates.items():
    efficiency = rate / rates[1] / n
    print(f"{n} rank(s) × micro_batch {16 // n} × accumulation 2: "
          f"{rate:7.0f} tokens/s, efficiency {efficiency:.0%}")  # fmt: skip

# %% [markdown]
# This is *strong* scaling: the global batch stays 32, so each rank's share of a step shrinks, and what does not shrink (the all-reduce, the optimizer, Python's own time) weighs more (lesson 10, section 3). On a GPU
# you would give each rank as many sequences as its memory holds, and let the learning rate follow (lesson 06).
#
# ## 5. The same script on eight GPUs, and on several nodes
#
# A function that asks the process group who it is runs anywhere. As a file it needs a few lines more, besides imports and a `plan`:
#
# ```python
# if __name__ == "__main__":
#     torch.manual_seed(0)
#     with process_group() as me:                      # from ddp_course: nccl on GPUs, gloo without
#         train_set, test_set = data.characters()
#         model = models.GPT(len(train_set.vocabulary)).to(me.device)
#         result = capstone(model, train_set, test_set, plan)
# ```
#
# and in the loop `x.to(me.device)`, `autocast("cuda", …)`, `GradScaler("cuda")`. The package's script has all of it; it differs from machine to machine by its flags:
#
# | where | command |
# | --- | --- |
# | two ranks here | `torchrun --standalone --nproc-per-node 2 -m ddp_course.train --task text --epochs 1 --accumulation-steps 2` |
# | eight GPUs | `torchrun --standalone --nproc-per-node 8 -m ddp_course.train --task text --precision bf16 --micro-batch 64` |
# | two nodes of eight | on each: `torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 -m ddp_course.train --task text --precision bf16 --checkpoint run.pt --resume`, with `run.pt` in a folder that both see |
# | a model that does not fit | the same with `--strategy fsdp` (lesson 13) |
#
# Such a line as a real run, on two ranks, with fp16 and the digits, which take a moment only:

# %% tags=["nbval-ignore-output"]
import subprocess
import sys

command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
command += ["--nproc-per-node=2", "-m", "ddp_course.train", "--epochs=3"]
command += ["--accumulation-steps=2", "--precision=fp16"]
done = subprocess.run(command, capture_output=True, text=True, timeout=120)
lines = done.stdout.splitlines()
print(*lines[:2], "…", *lines[-2:], sep="\n")
assert done.returncode == 0 and "test accuracy" in lines[-1]

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("14_capstone")

# %% [markdown]
# ## Exercise
#
# [14_capstone](../exercises/14_capstone.ipynb): write the script. Its nine checks are the invariants of section 3, a test loss on real text, and a throughput that is true.
#
# ## How this looks on several GPUs and nodes
#
# What you measured here on two cores holds on two thousand GPUs: the invariants do not depend on the machine. What does: speed. There the all-reduce runs beside the
# backward, on a few of the GPU's multiprocessors and the network cards, so efficiency is higher; and something breaks every day, so the checkpoint is what you will be most grateful for (lesson 12).
#
# ## Where to read more
#
# * Karpathy: *nanoGPT* (github.com/karpathy/nanoGPT, 2022): a training script for GPT-2 with DDP, accumulation and mixed precision, in one file.
# * Goyal, Dollár, Girshick and others: *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour* (2017): how a large run was checked against a small one.
# * Dubey and others: *The Llama 3 Herd of Models* (2024), section 3.3: what training on 16,000 GPUs takes, and what interrupted it.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"one process: test loss {baseline['test_loss']:.2f}; "
      f"{by_frequency:.2f} and {by_pair:.2f} by counting")  # fmt: skip
print(f"DDP around the model and nothing else: {passed} of {len(verdicts)} checks")
print(f"the whole loop: losses {apart:.1g} apart, {reduced:.0f} all-reduce a window")
print(f"two ranks: {rates[2] / rates[1]:.2f} times the tokens/s of one")
