# %% [markdown]
# # 00 · Start here: real ranks on your machine
#
# **What you will do.** Look at what your machine can do, start real worker processes from a notebook cell, let them
# talk to each other, break them, and then train a real model on real data with all that this course is about.
#
# **What you will learn.** What a *rank* is; how this course starts ranks; how to read its output and its errors.
#
# **What you need.** Python, and one run of `make lab`. No GPU. About 15 minutes.
#
# ---
# **The question.** Training on several GPUs means one thing before all others: *several processes, each with its own copy
# of the model, that agree on what to do next*. What do these processes share, how do they agree, and what do you see when
# one of them does not? Here you watch it, on the machine in front of you.
#
# Run each cell with <kbd>Shift</kbd>+<kbd>Enter</kbd>. Before some of them you are asked to **predict**. Do it before you look at
# the output below: a wrong guess that you notice teaches more than a right sentence that you read. The outputs you find here
# are from the machine this course was built on; yours replace them. (*Edit ▸ Clear Outputs of All Cells* hides them first. After a
# kernel restart, *Run ▸ Run All Above Selected Cell* brings you back.)
#
# An `assert` line in a cell states what must come out; it is silent when it is right.

# %% [markdown]
# ## 1. What can this machine do?
#
# The doctor looks at your cores, memory, GPUs and settings; it measures for a few seconds. `ok` down to the last line is all
# you need, the words in it are explained in later lessons. Below a line that begins with `note` or `FAIL`, `fix:` says
# what to do, if anything. Nothing in this lesson depends on a GPU.

# %% tags=["nbval-ignore-output"]
print("looking at this machine …")
from ddp_course import doctor

healthy = doctor.main()
assert healthy == 0, "the lines marked above say what to fix before you go on"

# %% [markdown]
# ## 2. Hello from two ranks
#
# `launch` starts worker processes, runs your function in each of them, and brings back what it returned. Each process is
# called a **rank** and has a number, also called its rank: 0, 1, 2, … The number of ranks is the **world size**.
#
# > **Predict.** Two ranks print a line each. Will rank 0's line always come first? Run the cell a few times.

# %% tags=["nbval-ignore-output"]
import os

import torch
import torch.distributed as dist

from ddp_course import launch


def hello():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"hello, I am rank {rank} of {world_size}, process {os.getpid()}")
    return os.getpid()


run = launch(hello, nproc=2)

# %% [markdown]
# The order can change from run to run: nobody tells the ranks who speaks first. What the function returned is in
# `run.values`, in order of rank, whoever was faster. Now four ranks, and proof that each is a process of its own, and none of
# them the notebook's:

# %% tags=["nbval-ignore-output"]
pids = launch(hello, nproc=4).values
print("the notebook is process", os.getpid(), "and the ranks are", pids)
assert len({*pids, os.getpid()}) == 5  # four ranks and the notebook, all different

# %% [markdown]
# ## 3. Ranks share nothing
#
# > **Predict.** Four ranks each append to the list `notes`, which lives in the notebook. How long is the notebook's list
# > afterwards: 4, 1, or 0? And the list that each rank sees?

# %%
notes = []


def take_a_note():
    notes.append(f"rank {dist.get_rank()} was here")
    return len(notes)


run = launch(take_a_note, nproc=4)
print("notes in the notebook:", len(notes))
print("notes that each rank sees:", run.values)
assert len(notes) == 0
assert run.values == [1, 1, 1, 1]

# %% [markdown]
# Every rank got its own *copy* of the function and of all that the function uses. What a rank changes, only that rank
# sees. This is why distributed training needs communication: without it, four ranks train four unrelated models.
#
# ## 4. Ranks can talk
#
# A **collective** is an operation that all ranks take part in. `all_reduce` adds up a tensor over all ranks and gives each
# rank the sum.
#
# > **Predict.** Each of four ranks brings its own number: 0, 1, 2, 3. What does each rank hold afterwards?


# %%
def add_up():
    mine = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(mine)  # every rank must call it, and every rank waits for the others
    return mine.item()


sums = launch(add_up, nproc=4).values
print(sums)
assert sums == [6.0, 6.0, 6.0, 6.0]

# %% [markdown]
# ## 5. Break it: a rank that fails
#
# Sooner or later one of your ranks will raise an error while the others wait for it. Who failed, and where?
#
# > **Predict.** Rank 1 divides by zero before the collective. What does rank 0 do, and what will the message name?

# %% tags=["nbval-ignore-output"]
from ddp_course import RankError


def fail_on_one():
    number = torch.ones(1)
    if dist.get_rank() == 1:
        number = number / (1 // 0)
    dist.all_reduce(number)


error = None
try:
    launch(fail_on_one, nproc=2)
except RankError as caught:
    error = caught
    print(error)

assert error.rank == 1
assert "ZeroDivisionError" in error.traceback and "1 // 0" in error.traceback
assert "all_reduce" in error.others[0]

# %% [markdown]
# Rank 0 was innocent: it waited in `all_reduce` for a partner that never came. The message names the rank that failed
# *first*, its line in your cell, and in one line what each other rank was doing. Nothing keeps running: when a cell
# ends, however it ends, all its ranks are gone. (They come from one small helper process, which lives as long as the notebook's
# kernel.)
#
# ## 6. Break it: a rank that never comes
#
# > **Predict.** Only rank 0 calls the collective. What happens to it? How would you notice?

# %% tags=["nbval-ignore-output"]
from ddp_course import HangError


def forgotten():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


error = None
try:
    launch(forgotten, nproc=2)
except HangError as caught:
    error = caught
    print(error)

assert "rank 0 waits in all_reduce" in str(error)
assert "rank 1 had returned" in str(error)

# %% [markdown]
# No error, no output: as long as its partner is alive and does not call, rank 0 waits, by PyTorch's own time-out for half an
# hour on a CPU. This is a **hang**. `launch` noticed that the rank it waits for has returned.
# Where it cannot know, it ends the run after `timeout` seconds (300, if you do not say), and says where every rank was.

# %%
import inspect
from datetime import timedelta

from torch.distributed.constants import default_pg_timeout

half_an_hour = timedelta(minutes=30)
assert default_pg_timeout == half_an_hour  # for all backends but NCCL, which has its own
print("PyTorch waits for", default_pg_timeout)
assert inspect.signature(launch).parameters["timeout"].default == 300

# %% [markdown]
# ## 7. Why not simply `multiprocessing`?
#
# Python and PyTorch can start processes themselves. From a notebook that goes wrong in two ways that you should have
# seen once. **First way:** PyTorch's own `spawn` starts a new Python, which then looks for your function, and does not
# find it: the function is in this notebook, in no file.

# %% tags=["nbval-ignore-output"]
import torch.multiprocessing as mp


def count(rank):
    return rank + 1


print("spawn starts a new Python …")
try:
    mp.spawn(count, nprocs=1)
    spawned = True
except mp.ProcessExitedException as error:
    spawned = False
    print(f"spawn: {error}")

assert not spawned
counts = launch(lambda: count(dist.get_rank())).values  # launch sends the function itself
assert counts == [1, 2]
print("launch: fine")

# %% [markdown]
# (In JupyterLab, the red lines are the last words of the new Python.)
#
# **Second way:** `fork` copies the running notebook, so the function is there. But only the thread that forks is
# copied. If PyTorch has used its pool of threads before, as any tensor operation of some size does, the copy has a pool
# without threads, and waits for them for ever.
#
# > **Predict.** Below, the notebook squares a matrix and adds it up, then a forked process does the same. Does it finish?

# %% tags=["nbval-ignore-output"]
import multiprocessing
import sys
import warnings

torch.set_num_threads(max(2, torch.get_num_threads()))
square = torch.randn(400, 400)
loss = (square * square).sigmoid().sum()  # the notebook's thread pool is now in use

if sys.platform == "linux":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of exactly this
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (square * square).sigmoid().sum()
        )
        child.start()
    child.join(3)
    hung = child.is_alive()
    child.kill()
    child.join()
    print("the forked process", "hangs" if hung else "finished")
    assert hung

total = launch(lambda: float(torch.ones(400, 400).sigmoid().sum())).values
print("the ranks of launch finished")
assert total[0] == total[1]

# %% [markdown]
# `launch` has neither fault: it sends your function along, and its ranks come from a process that has imported PyTorch
# and done nothing else.
#
# A third trap waits in `DataLoader(num_workers=…)`: its workers are processes too. Where they begin with a new Python, as on
# Windows, on macOS, and on Linux from Python 3.14 on, a data set *class that you wrote in a cell* cannot be found, for the
# same reason as above.


# %% tags=["nbval-ignore-output"]
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index**2


def load(context):
    loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=context)
    return [int(batch) for batch in loader]


print("a worker starts …")
try:
    load("spawn")
    found = True
except Exception as error:
    found = False
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
assert not found

# %%
assert [int(batch) for batch in DataLoader(Squares())] == [0, 1, 4, 9]
print("without workers: fine")

# %% [markdown]
# With `num_workers=0`, PyTorch's default, a rank loads its data itself. Put the class into a `.py` file beside the notebook
# when you want workers.

# %% [markdown]
# ## 8. The whole course in one cell
#
# Now everything at once, and nothing of it need be clear yet. Two ranks train a small network on 1,437 real scans of
# handwritten digits:
#
# * **DDP**: each rank takes half of the data, and they average their gradients;
# * **gradient accumulation**: four small batches make one step;
# * **mixed precision**: the matrix products run in 16-bit floating point, with a *loss scale* that keeps small gradients
#   from vanishing. It starts too high on purpose. Watch what happens to it. (On a GPU this makes training faster. On a CPU it
#   need not: the doctor's `fp16` line above is what it measured on yours.)
#
# Before you start it: how well will it do?

# %%
from ddp_course import predict

my_guess = predict.number(
    "What share of digits it has never seen will the network get right?",
    start=80, unit="%", low=0, high=100,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
from ddp_course import live, train

settings = train.Settings(
    precision="fp16",
    init_scale=2.0**24,
    growth_interval=60,
    micro_batch=16,
    accumulation_steps=4,
    epochs=12,
)
with live.view() as view:
    run = launch(train.run, settings, nproc=2, on_record=view)

# %% [markdown]
# Read the picture from top to bottom.
#
# * **Loss.** The thin lines are the two ranks' own losses, each on its own half of the batch; the thick black line is their
#   mean, the one loss that counts.
# * **Loss scale.** At the red ✕ marks the gradients overflowed 16-bit floating point: the step was *skipped* on both ranks and
#   the scale halved. After 60 good steps in a row it doubles, and may overflow again: that is how it stays as high as it can.
# * **Throughput.** Samples per second over both ranks. The grey steps at the start are not counted in the median: there,
#   ranks are still warming up.
#
# Later, run that cell once more with `epochs=200` and press the stop button (■) in the toolbar: the ranks are gone at once,
# and the notebook goes on.
#
# The same, as statements about what was recorded. (They hold for the settings above. Change those as you like, and skip these.)

# %%
import itertools

result = run.values[0]
records = [record for record in run.records if record["rank"] == 0]
skipped = [record["step"] for record in records if record["skipped"]]
on_rank_1 = [r["step"] for r in run.records if r["rank"] == 1 and r["skipped"]]
assert on_rank_1 == skipped  # a skipped step is skipped on both ranks
changes = []
for before, after in itertools.pairwise(records):
    changes.append(after["loss_scale"] / before["loss_scale"])
    assert changes[-1] == 0.5 if before["skipped"] else changes[-1] in (1, 2)

assert records[-1]["loss"] < records[0]["loss"] / 10  # the loss fell
assert records[0]["skipped"]  # the scale began too high
assert 2 in changes  # and grew again later
assert result["accuracy"] >= 0.95  # on digits it had never seen
print("all of it is so")

# %% tags=["nbval-ignore-output"]
my_guess.compare(100 * result["accuracy"], title="Unseen digits that it got right")

# %% [markdown]
# And the claim that matters most. After all those steps, do the two ranks hold the same model, down to the last bit?

# %%
ours, theirs = run.values[0]["weights"], run.values[1]["weights"]
assert all(torch.equal(ours[name], theirs[name]) for name in ours)
count = sum(weight.numel() for weight in ours.values())
print(f"{count:,} weights, equal on both ranks, bit for bit")

# %% [markdown]
# ## 9. The loop behind it
#
# This is the loop that just ran, the package's own source. Do not try to understand it all: look for the three ideas, the
# *window* of small batches, the *backward* that averages, the *step* that may be skipped. The lessons take it apart.

# %%
from ddp_course import show

show.source(train.train)

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("00_start_here")

# %% [markdown]
# ## How this looks on several GPUs and nodes
#
# Run the same cells. With at least as many GPUs as ranks, `launch` gives each rank its own GPU and the ranks talk over NCCL,
# NVIDIA's library for it (tensors on the CPU still go over gloo); with fewer GPUs, ranks share them and `launch` says so.
# What the ranks do to each other does not change, the speeds do: CPU timings in this course say nothing of a GPU's.
#
# ## Where next
#
# **[01 · Why distributed?](01_why_distributed.ipynb)** asks what does not fit on one GPU. The README's course map lists all lessons.
#
# ## Where to read more
#
# S. Li and others, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020;
# the PyTorch documentation's page on `torch.distributed`.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- four ranks, four processes: {pids}
- a list in the notebook after four ranks appended to their copies: {len(notes)} lines
- all_reduce of 0, 1, 2, 3: {sums}
- rank 1 failed, rank 0 was innocent; a rank that never came made the other wait
- {len(records)} steps with DDP, accumulation and fp16, {len(skipped)} of them skipped
- {result["accuracy"]:.1%} of unseen digits right
- {count:,} weights, equal on both ranks""")
