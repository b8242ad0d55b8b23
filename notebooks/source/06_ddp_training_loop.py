# %% [markdown]
# # 06 · The DDP training loop
#
# **What you will do.** Take a training loop that works in one process, change the four lines that make it run on any number
# of ranks, and then break what people most often get wrong: the logged loss, the evaluation, the threads, the learning rate.
#
# **What you will learn.** The whole loop on real data; which loss is *the* loss; how batch size and learning rate go
# together; how the same file runs under `torchrun`.
#
# **What you need.** Lessons 00, 04 and 05. About 30 minutes. Two helpers come from lesson 05: `data.shard` gives each rank its
# part of the data for training, `data.exact_shard` gives it each item once, for evaluation.
#
# ---
# **The question.** You have a loop that trains well in one process. You get a second GPU tomorrow. Which lines change, and
# will the two of them still learn the same model?

# %% [markdown]
# ## 1. One process
#
# The starting point: a small network, real scans of digits, plain SGD. Nothing in it knows of ranks, except that its
# data order comes from a `DistributedSampler`, so that we can compare order by order later.

# %%
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import data, launch, models, plots, report, show


# %%
def one_process(epochs, batch, learning_rate):
    torch.set_num_threads(1)  # a small network (section 5 is about threads)
    torch.manual_seed(0)
    train_set, test_set = data.digits()
    sampler = DistributedSampler(train_set, num_replicas=1, rank=0)
    loader = DataLoader(train_set, batch, sampler=sampler)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(step=step, loss=loss)
            step += 1
    return model.state_dict()


# %%
alone = launch(one_process, epochs=3, batch=64, learning_rate=0.2, nproc=1)
first_loss, last_loss = alone.records[0]["loss"], alone.records[-1]["loss"]
print(f"{len(alone.records)} steps, loss {first_loss:.2f} → {last_loss:.2f}")

# %% [markdown]
# ## 2. Any number of ranks
#
# The same loop for every rank. Read it once, then look at the difference below it.


# %%
def every_rank(epochs, batch, learning_rate):
    torch.set_num_threads(1)  # a small network (section 5 is about threads)
    torch.manual_seed(0)
    train_set, test_set = data.digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch, sampler=sampler)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
            report(step=step, loss=mean_loss, local_loss=loss)
            step += 1
    return model.module.state_dict()


show.diff(one_process, every_rank)

# %% [markdown]
# Four changes, and no more:
#
# 1. the **sampler** asks the process group how many ranks there are, and deals each of them its own part;
# 2. **DDP** wraps the model: it copies rank 0's weights to all at the start, and averages the gradients during `backward`;
# 3. the **loss** to look at is averaged over ranks, because each rank only sees its own part;
# 4. what is **kept** is `model.module`, the network inside the wrapper: a file saved from the wrapper has `module.` before
#    every name.
#
# > **Predict.** 1,437 images, batches of 32 *on each of two ranks*. How many steps does an epoch have, when one process with
# > batches of 64 has 23? And how far apart are the losses of the two runs?

# %%
pair = launch(every_rank, epochs=3, batch=32, learning_rate=0.2, nproc=2)

first = [record for record in pair.records if record["rank"] == 0]
steps_per_epoch = len(first) // 3
print(f"{steps_per_epoch} steps an epoch on each rank")
assert steps_per_epoch == len(alone.records) // 3 == 23

# %% tags=["nbval-ignore-output"]
plots.compare(
    {"one process, batch 64": alone, "two ranks, 32 each": pair},
    title="Two ranks with half of the batch each learn what one process learns",
)

# %% tags=["nbval-ignore-output"]
gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(alone.records, first, strict=True)]
before_the_odd_image, gap = max(gaps[:22]), max(gaps)
print(f"steps 1 to 22: at most {before_the_odd_image:.0e} apart; all: at most {gap:.0e}")
assert before_the_odd_image < 1e-4  # float32 rounding
assert before_the_odd_image < gap < 0.05

# %% [markdown]
# The curves lie on each other. Two ranks with 32 images each *are* one process with 64: the sampler deals the same shuffled
# order out like cards, so in every step the two ranks together hold exactly the 64 images of the single process, and the
# mean of the two gradients is the gradient of the 64. What is left is rounding, until the last step of the first epoch: 1,437
# is odd, so the sampler deals one image twice there, and from then on the two runs differ a little.
#
# So nothing about *learning* changed; the work was shared. Whether it was also done sooner is another question. On CPU cores
# that the ranks share it would not be a fair one: two *GPUs* are twice the hardware. Lesson 10 measures when ranks pay.

# %% [markdown]
# ## 3. Break it: whose loss is this?
#
# Many training scripts print `loss.item()` on rank 0 and call it the loss.
#
# > **Predict.** Rank 0's loss comes from half of the batch. How far from the true loss is it, at most, in these 69 steps?

# %% tags=["nbval-ignore-output"]
plots.loss(pair, title="The loss of one rank scatters around the loss")

# %% tags=["nbval-ignore-output"]
off = max(abs(record["local_loss"] - record["loss"]) / record["loss"] for record in first)
print(f"in its worst step rank 0's own loss is off by {off:.0%}")
assert off > 0.10

halves = {}
for record in pair.records:
    halves.setdefault(record["step"], []).append(record)
for one, other in halves.values():
    assert one["loss"] == other["loss"]  # averaged: the same number on both ranks
    mean = (one["local_loss"] + other["local_loss"]) / 2
    assert abs(mean - one["loss"]) < 1e-5  # float32 rounding

# %% [markdown]
# The thin lines scatter around the thick one. Whoever reads rank 0's line as the loss, reads noise. The fix is the
# `all_reduce` in the loop. It costs a message, so long runs do it every so many steps. For the loss of a whole epoch, add up loss × samples and
# samples on each rank, and all-reduce the two sums once (lesson 05): the last batch may be smaller.

# %% [markdown]
# ## 4. Break it: evaluation on rank 0
#
# It looks thrifty: let rank 0 alone compute the accuracy. But somebody left an `all_reduce` in `accuracy`, as it should be
# when every rank evaluates its own part.
#
# > **Predict.** Two ranks, and only rank 0 calls `accuracy`. Error, wrong number, or something else?

# %%
from ddp_course import HangError


def accuracy(model, dataset):
    """The share of right answers over all ranks, each item counted once."""
    correct = torch.zeros(2)
    with torch.no_grad():
        for x, y in data.exact_shard(dataset, 128):  # items rank, rank + world_size, …
            correct += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(correct)
    return (correct[0] / correct[1]).item()


# %% tags=["nbval-ignore-output"]
def on_rank_0_only(weights):
    model = models.MLP(width=64)
    model.load_state_dict(weights)
    if dist.get_rank() == 0:
        print("accuracy", accuracy(model, data.digits()[1]))


error = None
try:
    launch(on_rank_0_only, pair.values[0])
except HangError as caught:
    error = caught
    print(error)

assert "rank 0 waits in all_reduce" in str(error)
assert "rank 1 had returned" in str(error)

# %% [markdown]
# A hang, which `launch` noticed because one rank waits and the other has returned. A collective
# needs *every* rank; inside `if rank == 0` it waits for ever. The same trap waits in a checkpoint
# that is saved "on rank 0 only" by a function with a `barrier` in it. **Fix:** all ranks call it; only the printing is
# left to rank 0.


# %% tags=["nbval-ignore-output"]
def on_every_rank(weights):
    model = models.MLP(width=64)
    model.load_state_dict(weights)
    return accuracy(model, data.digits()[1])


shares = {
    nproc: launch(on_every_rank, pair.values[0], nproc=nproc).values
    for nproc in (1, 2, 3)
}
assert len({value for values in shares.values() for value in values}) == 1
print(f"test accuracy {shares[1][0]:.1%}, the same with 1, 2 and 3 ranks")
assert shares[1][0] > 0.85

# %% [markdown]
# ## 5. Break it: every rank takes every core
#
# PyTorch gives each process as many threads as the machine has cores. Two ranks then have twice as many busy threads as
# there are cores.
#
# > **Predict.** With two ranks, what do you lose if each keeps all cores to itself, compared with sharing them out? Nothing, a
# > little, half? (The network is wider than before, so that its operations are worth more than one thread.)

# %%
from ddp_course import predict
from ddp_course.process_group import cores

my_time = predict.number(
    "Every rank takes all cores: how many times as long does a step take?",
    start=1.2, unit="times", low=0, high=10,
)  # fmt: skip
my_work = predict.number(
    "And how many times the processor time does it burn?",
    start=1.2, unit="times", low=0, high=10,
)  # fmt: skip


# %%
def seven_steps(threads):
    torch.set_num_threads(threads)
    model = DistributedDataParallel(models.MLP(width=1024))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    for step in range(10):
        if step == 3:  # the first steps are slow: they do not count
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - clock, time.process_time() - processor


# %% tags=["nbval-ignore-output"]
shared, greedy = max(1, cores() // 2), max(2, cores())
times = {shared: [], greedy: []}
for _ in range(2):  # taking turns, so that whatever else this machine does hits both
    for threads in times:
        times[threads].append(launch(seven_steps, threads).values[0])
        print(f"{threads} thread(s) a rank: 7 steps in {times[threads][-1][0]:.2f} s")

longer, more_work = (
    min(time[which] for time in times[greedy])
    / min(time[which] for time in times[shared])
    for which in (0, 1)
)
assert more_work > 1.2
predict.compare(
    {
        "time for a step": (my_time, longer),
        "processor time for a step": (my_work, more_work),
    },
    unit="times as much, if every rank takes all cores",
    title="Ranks that fight for cores burn time",
)

# %% [markdown]
# More threads than cores do not just fail to help. At the end of every operation the threads of a rank wait for each other, and
# they burn processor time while they wait, on cores that the other rank needs. So the cores must be shared out. `launch` does:

# %%
assert launch(torch.get_num_threads, nproc=2).values == [max(1, cores() // 2)] * 2
print("each of two ranks has half of the cores for its threads")

# %% [markdown]
# `torchrun` sets `OMP_NUM_THREADS=1` for its ranks if you have not set it; section 7 will show it. With GPUs the same holds for whatever
# the CPU does there, such as loading data.

# %% [markdown]
# ## 6. More ranks, bigger batch, which learning rate?
#
# So far two ranks *shared* one batch. Usually people keep the batch *per rank*, and the global batch grows with
# every rank:
#
# $$\text{global batch} = \text{micro-batch} \times \text{accumulation steps} \times \text{world size}$$
#
# Then an epoch has fewer steps. With the same learning rate, fewer steps of the same size lead less far.
#
# > **Predict.** One rank with batches of 32 and learning rate 0.05, against four ranks with 32 each (128 in all). After the
# > same number of *images*, with the same learning rate: whose loss is lower? And if the four ranks take 4 × 0.05?


# %%
def trained(learning_rate, warmup_steps=0, epochs=6):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_set, _ = data.digits()
    loader = data.shard(train_set, micro_batch=32)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    step = 0
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            warmth = min(1, (step + 1) / (warmup_steps + 1))
            optimizer.param_groups[0]["lr"] = learning_rate * warmth
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(mean_loss := loss.detach().clone(), op=dist.ReduceOp.AVG)
            report(step=step, loss=mean_loss, samples=len(x) * dist.get_world_size())
            step += 1


# %% tags=["nbval-ignore-output"]
runs = {}
for nproc, learning_rate in ((1, 0.05), (4, 0.05), (4, 0.2)):
    name = f"{nproc} rank{'s' * (nproc > 1)}, {learning_rate}"
    runs[name] = launch(trained, learning_rate, nproc=nproc)
    print(name, "ends at loss", round(runs[name].records[-1]["loss"], 3))

plots.compare(
    runs, x="samples", title="Four times the batch needs four times the learning rate"
)


# %%
def epoch_losses(run):
    """The mean loss of each of the six epochs."""
    losses = [record["loss"] for record in run.records if record["rank"] == 0]
    size = len(losses) // 6
    return [sum(losses[k * size : (k + 1) * size]) / size for k in range(6)]


one, same_rate, scaled = (epoch_losses(run)[-1] for run in runs.values())
assert same_rate > 3 * one  # four ranks with the old rate are far behind
assert 0.5 * one < scaled < 2 * one  # with four times the rate they are not

# %% [markdown]
# This is the **linear scaling rule** (Goyal and others, 2017): when the global batch grows k times, take k times the learning
# rate. The reason is simple arithmetic: k small steps in nearly the same direction lead about as far as one step that is k
# times as long. So it holds only while the weights change little within those k steps, and it ends somewhere:

# %% tags=["nbval-ignore-output"]
fine = epoch_losses(launch(trained, 0.4, nproc=1))[-1]
print(f"last epoch's mean loss: one rank at 0.4 {fine:.2f}")
too_far = epoch_losses(launch(trained, 1.6, nproc=4))[-1]
print(f"four ranks at 1.6 {too_far:.2f}")
assert fine < one  # 0.4 is a good rate for one rank
assert not too_far < 4 * scaled  # four times that is too much for four (or it is nan)

# %% [markdown]
# The rule is least true at the very start, Goyal and others found, when the network changes fast. Hence their **warm-up**: begin
# with a small rate and rise to the full one over the first steps. They needed it for batches of thousands of images.
#
# > **Predict.** Does a warm-up of 12 steps help our four ranks at learning rate 0.2?

# %% tags=["nbval-ignore-output"]
warm = launch(trained, 0.2, warmup_steps=12, nproc=4)
plots.compare(
    {"4 ranks, 0.2": runs["4 ranks, 0.2"], "with warm-up": warm},
    x="samples",
    title="Where it is not needed, a warm-up only costs time",
)

# %%
warmed = epoch_losses(warm)
assert warmed[0] > epoch_losses(runs["4 ranks, 0.2"])[0]  # behind: smaller steps
assert warmed[-1] < 2 * scaled  # and nearly there in the end

# %% [markdown]
# Here it only costs: this rate was safe from the first step. A warm-up is an insurance.
#
# One more trap of the same kind. DDP *averages* gradients over ranks. Code that *sums* them, by hand or by a loss that is
# multiplied by the world size, has changed its learning rate without saying so.
#
# > **Predict.** Train with the loss multiplied by the world size of 2 and learning rate 0.1. Which ordinary run ends with the same
# > weights?


# %% tags=["nbval-ignore-output"]
def summed(learning_rate, factor):
    torch.manual_seed(0)
    loader = data.shard(data.digits()[0], micro_batch=32)
    model = DistributedDataParallel(models.MLP(width=64).double())
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    for x, y in loader:
        (F.cross_entropy(model(x.double()), y) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


summed_weights = launch(summed, learning_rate=0.1, factor=2).values[0]
twice_the_rate = launch(summed, learning_rate=0.2, factor=1).values[0]
apart = (summed_weights - twice_the_rate).abs().max().item()
print(f"summing at rate 0.1 and averaging at rate 0.2: weights at most {apart:.0e} apart")
assert apart < 1e-12  # in float64 (hence .double()), so that rounding stays this small

# %% [markdown]
# ## 7. The same loop as a script
#
# A notebook is for learning; training runs are scripts. Here is a complete one in plain PyTorch: set up, wrap, train,
# evaluate, clean up. Of this course's package it only takes the data and the network. Three cells write it to a file beside this
# notebook, `train_digits.py`: first how a rank begins.

# %% tags=["nbval-ignore-output"]
# %%writefile train_digits.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import data, models


def setup():
    gpu = torch.cuda.is_available()
    # LOCAL_RANK chooses this node's GPU; RANK counts over all nodes
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    # finds the others by MASTER_ADDR and MASTER_PORT
    dist.init_process_group("nccl" if gpu else "gloo")
    return device


# %% [markdown]
# `-a` appends to the file. (To change something later, run these three cells again from the first, which begins the file anew.)

# %% tags=["nbval-ignore-output"]
# %%writefile -a train_digits.py


def evaluate(model, dataset, device):
    """The share of right answers, over all ranks; no item comes twice."""
    mine = range(dist.get_rank(), len(dataset), dist.get_world_size())
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y in DataLoader(dataset, 128, sampler=mine):
            right = (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
            sums += torch.tensor([right, len(y)], device=device)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


# %% tags=["nbval-ignore-output"]
# %%writefile -a train_digits.py


def main(epochs=3, batch=32, learning_rate=0.2):
    device = setup()
    torch.manual_seed(0)
    train_set, test_set = data.digits()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch, sampler=sampler)
    model = DistributedDataParallel(models.MLP(width=64).to(device))
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            if dist.get_rank() == 0:  # only the printing: all took part in the all_reduce
                print(f"loss {mean_loss.item() / dist.get_world_size():.6f}", flush=True)
    accuracy = evaluate(model.module, test_set, device)  # on every rank
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}, threads a rank: {torch.get_num_threads()}")
    dist.barrier()  # nobody leaves while another may still be talking


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main: its DDP model, which uses the group, is gone by now

# %% [markdown]
# `torchrun` starts the ranks, tells each its place through environment variables (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`,
# `MASTER_ADDR`, `MASTER_PORT`), and stops all if one fails. In a terminal (*File ▸ New ▸ Terminal*), in this notebook's folder and
# with the course's environment active, you would type
#
# ```
# torchrun --standalone --nproc-per-node 2 train_digits.py
# ```
#
# The cell below does the same, and takes some seconds to begin: two new Pythons import PyTorch.
#
# > **Predict.** This is another launcher and another file. Will its losses be those of section 2?

# %% tags=["nbval-ignore-output"]
import os
import subprocess
import sys

torchrun = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
]
with subprocess.Popen(
    [*torchrun, "train_digits.py"], stdout=subprocess.PIPE, text=True
) as process:
    *losses, last_line = process.stdout.read().splitlines()
printed = [float(line.split()[1]) for line in losses]

assert len(printed) == len(first)
gap_to_script = max(abs(a - b["loss"]) for a, b in zip(printed, first, strict=True))
assert gap_to_script < 1e-4  # printed digits, float32 rounding
print(f"{len(printed)} losses, the same as from the notebook; {last_line}")
assert last_line.endswith("threads a rank: 1") or "OMP_NUM_THREADS" in os.environ

# %% [markdown]
# `launch` sets the very same variables, and has the process group up when your function begins: what stands between `setup` and
# `destroy_process_group` moves between notebook and script unchanged. An older way you will see in tutorials is
# `torch.multiprocessing.spawn(main, nprocs=2)` with a number for `MASTER_PORT` in the script, which a second run at the same time
# finds in use. `--standalone` lets torchrun find a free one. You will also see `init_process_group("nccl", rank=rank, world_size=n)` and nothing else.
#
# > **Predict.** Rank and world size are given. What is missing?

# %%
bare = """import os, torch.distributed as dist
os.environ.pop("MASTER_ADDR", None)
dist.init_process_group("gloo", rank=0, world_size=1)"""
failed = subprocess.run([sys.executable, "-c", bare], capture_output=True, text=True)
assert "MASTER_ADDR expected, but not set" in failed.stderr
print(failed.stderr.splitlines()[-1].split(": ", 1)[1])

# %% [markdown]
# A meeting place: every rank must know where to find the others. torchrun and `launch` set it. And with GPUs `torch.cuda.set_device(local_rank)` is needed,
# as in `setup`: with the *rank* instead, a second node would look for a ninth GPU.

# %% [markdown]
# ## 8. The package's loop
#
# `ddp_course.train` is this loop with three more things in it, each of which has its lesson: windows of micro-batches (07),
# precision (08), and a schedule with resume (09). Compare its source with `every_rank` above: sampler, backward, step, the loss
# averaged over ranks.

# %%
from ddp_course import train

show.source(train.train)

# %% tags=["nbval-ignore-output"]
from ddp_course import live

with live.view() as view:
    run = launch(train.run, train.Settings(epochs=10), on_record=view)

# %%
result = run.values[0]
print("test accuracy of at least 96 %:", result["accuracy"] >= 0.96)
assert result["accuracy"] >= 0.96

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("06_ddp_training_loop")

# %% [markdown]
# ## Exercise
#
# [06_train_ddp](../exercises/06_train_ddp.ipynb): turn a loop for one process into one for any number of ranks that learns the same.
#
# ## How this looks on several GPUs and nodes
#
# The code does not change; the global batch does, and with it the learning rate (section 6): 32 images on each of 16 ranks are 512.
# One machine with eight GPUs: `torchrun --standalone --nproc-per-node 8 train_digits.py`. Two
# machines, on each, with the host name or address of one of them:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29400 train_digits.py
# ```
#
# There `RANK` runs from 0 to 15 and `LOCAL_RANK` from 0 to 7 on each: the GPU is chosen by the *local* rank. The throughput
# you saw here is that of a CPU whose cores the ranks share, and says nothing of GPUs.
#
# ## Where to read more
#
# *S. Li and others*, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020. *P. Goyal and others*,
# Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017: linear scaling and warm-up. The PyTorch documentation on
# `DistributedDataParallel` and on `torchrun`.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- one process with batch 64 and two ranks with 32 each: losses
  {before_the_odd_image:.0e} apart, {gap:.0e} after the image that comes twice
- rank 0's own loss was off by up to {off:.0%}
- a collective on rank 0 alone hangs
- every rank on all cores: a step took {longer:.1f} times as long,
  and {more_work:.1f} times the work
- last-epoch loss: one rank {one:.2f}; four ranks {same_rate:.2f};
  with 4 × the rate {scaled:.2f}; with warm-up {warmed[-1]:.2f}
- torchrun and the notebook gave the same {len(printed)} losses""")
