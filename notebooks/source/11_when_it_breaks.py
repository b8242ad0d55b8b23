# %% [markdown]
# # 11 · When it breaks
#
# **What you will do.** Start programs that hang, crash, or give wrong numbers in silence, and read what each of them says, line by line: first under
# plain `torchrun`, then with tools that say more.
#
# **What you will learn.** To go from "it stands still" to a rank and a line; which tool finds which fault, and what no tool finds.
#
# **What you need.** Lessons 02, 04 and 05. About 25 minutes.
#
# ---
# **The question.** Your job has printed nothing for ten minutes. Every GPU is at 100 %. Sixteen ranks, one of them is to blame. Which one, and in which line?

# %%
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import HangError, RankError, launch, plots, predict, report

# %% [markdown]
# ## 1. What plain PyTorch says
#
# Two scripts, as people run them. In the first, rank 0 has one batch more than rank 1. (Its time-out is 3 seconds; gloo's default is 30 minutes, NCCL's 10.)
# In the second, rank 1 raises an error, and rank 0 waits for it. Of each rank we print the last line of the script and the error, cut at 100 characters: the whole is several screens.

# %%
BEGIN = """import datetime, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={seconds}))
dist.barrier()
rank = dist.get_rank()
"""
ONE_BATCH_MORE = """for batch in range(3 if rank == 0 else 2):
    dist.all_reduce(torch.ones(4))
dist.barrier()
"""
RANK_1_RAISES = """if rank == 1:
    raise ValueError("the file for rank 1 is missing")
dist.all_reduce(torch.ones(4))
"""


def start(script, folder, seconds):
    """Start a script on two ranks under torchrun."""
    Path(folder, "script.py").write_text(BEGIN.format(seconds=seconds) + script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "script.py"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, stderr=subprocess.PIPE, text=True, env=env
    )


def errors_of(script):
    """Run a script; return the lines that say what went wrong, without the frames between."""
    with tempfile.TemporaryDirectory() as folder:
        errors = start(script, folder, seconds=3).communicate(timeout=90)[1]
    said = r"\[rank\d\]: +\w+Error.*|\[rank\d\]: .*, line \d+, in <module>"
    found = [line for line in errors.splitlines() if re.match(said, line)]
    short = [re.sub(r'File ".*/(\w+\.py)"', r"\1", line) for line in found]
    return [re.sub(r"/\S+/(?=\w+\.cc)", "", line)[:100] for line in short]


# %%
guess = predict.choose(
    "The script with one batch more: which rank will raise the error after 3 seconds?",
    ["rank 0", "rank 1", "both"],
)

# %% tags=["nbval-ignore-output"]
said = {}
for script in (ONE_BATCH_MORE, RANK_1_RAISES):
    print("two new Pythons import PyTorch …")
    said[script] = errors_of(script)
    print(*said[script], sep="\n")

# %% tags=["nbval-ignore-output"]
complain = sorted({line[1:6] for line in said[ONE_BATCH_MORE] if "RuntimeError" in line})
assert complain and not any("batch" in line for line in said[ONE_BATCH_MORE])
assert any("ValueError: the file for rank 1" in line for line in said[RANK_1_RAISES])
guess.compare("both" if len(complain) == 2 else f"rank {complain[0][4]}")

# %% [markdown]
# **Read it.** In the first, both ranks raise (if torchrun does not end the second before it can say so), each at a line of its own: rank 0 in line 6, the `all_reduce` (the four lines of `BEGIN` come first), rank 1 in line 7, the `barrier` after the loop. Each waits for somebody who does not come.
# Nobody says "rank 1 has no third batch": you have to compare the two lines yourself. With 16 ranks you have 16 to compare.
#
# In the second, one line is the cause. The other, if it is there, is a victim: rank 0 lost its connection to a rank that had gone.
#
# > A first rule: **"Connection closed by peer" and "Timed out" are never the cause.** Look for the rank that says something else, or nothing.
#
# ## 2. A hang, read line by line
#
# The same fault from a cell. `launch` looks at all ranks at once, and so it can say what no rank knows alone.


# %%
def one_batch_more():
    batches = 2 if dist.get_rank() == 1 else 3
    for _ in range(batches):
        dist.all_reduce(torch.ones(4))


def report_of(worker, **options):
    """Run a worker that fails; print and return its error."""
    try:
        launch(worker, **options)
    except (HangError, RankError) as error:
        print(f"{type(error).__name__}: {error}")
        return error
    raise AssertionError("it did not fail")


# %% tags=["nbval-ignore-output"]
hang = report_of(one_batch_more, nproc=3, timeout=60)
assert "rank 1 had returned" in str(hang) and "rank 1 never called it" in str(hang)

# %% [markdown]
# 1. **The first line** says how it ended: the ranks *can never go on*. (Past `timeout` it would say *no result after … s*.)
# 2. **One line a rank**: what it waits in, with type and shape, and where in *your* cell. Or that it had returned, or is busy at a line.
# 3. **The last line** is the conclusion: who never came.
#
# It never says that the `all_reduce` is wrong. The waiting ranks are where they ought to be. The fault is where the *absent* rank left the common path: rank 1's
# loop has ended. The exception carries more:

# %% tags=["nbval-ignore-output"]
print("the stack of rank 0:", hang.stacks[0], sep="\n")
for rank, calls in enumerate(hang.collectives):
    print(
        f"rank {rank}:", *(f"{call}{'' if call.done else ' (waits)'}" for call in calls)
    )
assert "in one_batch_more" in hang.stacks[0]
assert [len(calls) for calls in hang.collectives] == [3, 2, 3]
plots.waits(hang, "Rank 1 never came to the third all_reduce")

# %% [markdown]
# **Fix.** Equal numbers of batches: `DistributedSampler` pads (lesson 05), `Join` lets ranks with less data shadow the others (lesson 05), or move the
# collective out of the loop: add up locally, all-reduce once.
#
# ## 3. A collective inside `if rank == 0`
#
# Rank 0 saves a checkpoint. The author of `save` was careful: nobody should go on before the file is there.


# %%
def save(path, model):
    torch.save(model.state_dict(), path)
    dist.barrier()  # wait until the file is there


def train_and_save(path):
    model = DistributedDataParallel(nn.Linear(4, 1))
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            save(path, model.module)
        model(torch.ones(2, 4)).sum().backward()


# %%
guess = predict.choose(
    "Rank 0 calls save in step 2, rank 1 does not. Where does rank 1 wait?",
    ["in the barrier", "in the backward of step 2", "it does not wait, it ends"],
)

# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.pt")
    nested = report_of(lambda: train_and_save(path), timeout=60)
assert "rank 0 waits in barrier()" in str(nested)
assert "The ranks disagree about collective number" in str(nested)
guess.compare("in the backward of step 2")

# %% [markdown]
# Rank 0 waits in a `barrier`, rank 1 in an `all_reduce` that you never wrote: DDP's, in the backward. Both are stuck in the *same place of the order*: PyTorch matches the n-th
# collective of one rank with the n-th of the others, whatever they are. (The number is higher than our own steps: DDP called some collectives when it was built. The 5 numbers are the gradients of `Linear(4, 1)`.) The line it names is the `barrier` in `save`. The line to mend is the one that called `save`, and
# for that you read the stack, from the top:

# %% tags=["nbval-ignore-output"]
ours = [line for line in nested.stacks[0].splitlines() if "site-packages" not in line]
print(*ours[:6], sep="\n")
assert "save(path, model.module)" in nested.stacks[0]

# %% [markdown]
# **Fix.** All ranks call `save`; inside, only the writing is rank 0's:


# %%
def save_right(path, model):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()  # every rank


def saves_on_all(path):
    save_right(path, nn.Linear(4, 1))
    return os.path.exists(path)


with tempfile.TemporaryDirectory() as folder:
    assert launch(saves_on_all, os.path.join(folder, "model.pt")).values == [True, True]
print("saved, and every rank knows that the file is there")

# %% [markdown]
# ## 4. The ranks call different things
#
# Three more programs, each with both ranks in *some* collective at the same time:


# %%
def other_operation():
    x = torch.ones(4)
    dist.broadcast(x, src=0) if dist.get_rank() == 1 else dist.all_reduce(x)
    dist.barrier()


def other_shape():
    dist.all_reduce(torch.ones(100 if dist.get_rank() == 1 else 4))


def other_order():
    loss, accuracy = torch.tensor([1.0]), torch.tensor([100.0])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        dist.all_reduce(accuracy)
    else:
        dist.all_reduce(accuracy)
        dist.all_reduce(loss)
    return loss.item(), accuracy.item()


# %%
order = predict.order(
    "Which of these is the worst, for you who have to find it? Worst first.",
    ["another operation", "another shape", "another order"],
)

# %% tags=["nbval-ignore-output"]
operation = report_of(other_operation, timeout=60)
assert "rank 1 broadcast(float32[4])" in str(operation)

# %% tags=["nbval-ignore-output"]
shape = report_of(other_shape, timeout=60)
assert "differ in shape or type" in str(shape) or "disagree about" in str(shape)

# %% tags=["nbval-ignore-output"]
swapped = launch(other_order)
print(swapped.values[0])
assert swapped.values[0] == (101.0, 101.0)  # right: loss 2.0, accuracy 200.0
order.compare(["another order", "another operation", "another shape"])

# %% [markdown]
# * **Another operation** hangs. The report shows the two different calls.
# * **Another shape** ends a process from within C++ (SIGABRT): no Python error, no traceback of its own. The report says what it knows. Sometimes it hangs instead.
# * **Another order** is the worst: *it does not fail*. A loss was added to an accuracy, on both ranks, and the numbers look like numbers.
#
# (Only the first place is beyond doubt. We put a hang before a crash, since a crash is at least noticed; if you had these two the other way round, you are not wrong.)
#
# ### `TORCH_DISTRIBUTED_DEBUG=DETAIL`
#
# PyTorch can compare what the ranks are about to do before it does it, at the price of extra communication for each collective.
#
# > **Predict.** Which of the three will it find?


# %% tags=["nbval-ignore-output"]
def with_debug(level, worker):
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level  # the ranks inherit it
    try:
        return launch(worker, timeout=60).values
    except (HangError, RankError) as error:
        return error
    finally:
        del os.environ["TORCH_DISTRIBUTED_DEBUG"]


found = {}
for worker in (other_operation, other_shape, other_order):
    found[worker.__name__] = result = with_debug("DETAIL", worker)
    words = str(result).partition("Collectives differ")[2].splitlines()[:1]
    print(f"{worker.__name__:16} Collectives differ{words[0]}" if words else result)
assert "BROADCAST" in str(found["other_operation"])
assert "100" in str(found["other_shape"]) and found["other_order"] == swapped.values

# %% [markdown]
# Operation and shape are named at once. The swapped order passes even here: same operation, same shape, same type. Only the *line* differs from which each rank calls. `check_order`
# compares just that, from what PyTorch's *flight recorder* (section 9) kept, a list of each rank's last collectives:

# %% tags=["nbval-ignore-output"]
from ddp_course.errors import OrderError

ordered = None
try:
    launch(other_order, check_order=True)
except OrderError as error:
    ordered = error
    print(error)
assert "collective number 1 is not the same on all ranks" in str(ordered)

# %% [markdown]
# And if there is one line only, in a loop, over names that each rank has in an order of its own? This happens: a `set` of strings has another order in every process.


# %%
def in_a_loop():
    values = {"loss": torch.tensor([1.0]), "accuracy": torch.tensor([100.0])}
    names = list(values) if dist.get_rank() == 0 else list(values)[::-1]
    for name in names:
        dist.all_reduce(values[name])
    return {name: value.item() for name, value in values.items()}


print(launch(in_a_loop, check_order=True).values[0])
assert launch(in_a_loop, check_order=True).values[0]["loss"] == 101.0

# %% [markdown]
# Wrong, and nothing says so: not PyTorch, not DETAIL, not `check_order`. Only you can know which number should meet which. **Fix.** Whatever you all-reduce in a loop, go through it
# in an order that all ranks share: `for name in sorted(values)`.
#
# In the same way a decision that ends a loop must be taken *together*: all-reduce the wish to stop (`op=ReduceOp.MAX`) in every step, and all ranks stop in the same one.
#
# ## 5. One rank raises
#
# > **Predict.** Rank 1 of three raises in its second batch. Two kinds of news could reach you: rank 1's own error, or that the others wait for ever (or lost a connection). Which
# > one does `launch` show first?


# %% tags=["nbval-ignore-output"]
def reads_a_file():
    files = {0: [1.0, 2.0], 1: [1.0], 2: [1.0, 2.0]}[dist.get_rank()]
    total = torch.zeros(1)
    for number in range(2):
        total += files[number]
        dist.all_reduce(total)


raised = report_of(reads_a_file, nproc=3)
assert raised.rank == 1 and "files[number]" in raised.traceback
assert "IndexError" in raised.traceback and set(raised.others) == {0, 2}

# %% [markdown]
# `.rank` failed first, `.traceback` is its own, `.others` has one line for each of the others. Two victims, one cause.
#
# Under torchrun you get the first half of it, the failed rank's traceback, if the script tells torchrun: wrap `main` in `torch.distributed.elastic.multiprocessing.errors.record`, or use `process_group()` from this
# package, which does.
#
# ## 6. Parameters that were not used
#
# A model has two heads, and this batch uses one. DDP's buckets wait for a gradient that will never be there.


# %%
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, task):
        return (self.left if task == "left" else self.right)(self.body(x))


def two_steps(**options):
    model = DistributedDataParallel(TwoHeads(), **options)
    for _ in range(2):
        model(torch.ones(2, 4), "left").sum().backward()
    return model.module.right.weight.grad is None


# %%
guess = predict.choose(
    "The right head is never used. When is there an error?",
    ["in the first backward", "in the second forward", "never"],
)

# %% tags=["nbval-ignore-output"]
unused = report_of(two_steps)
assert "in forward" in unused.traceback and "parameters that were not used" in str(unused)
indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(unused))[
    1
].split()
guess.compare("in the second forward")

# %% [markdown]
# One step too late: DDP notices when the *next* forward begins and the last reduction has not ended. (Line 13 has both; the frame `in forward` says which.) The message gives indices. They count `model.parameters()`:

# %%
names = [name for name, _ in TwoHeads().named_parameters()]
print([names[int(index)] for index in indices])
assert [names[int(index)] for index in indices] == ["right.weight", "right.bias"]

# %% tags=["nbval-ignore-output"]
informed = with_debug("INFO", two_steps)
print(re.search(r"Parameters which did not receive grad.*", str(informed))[0])
assert "right.weight" in str(informed)  # INFO names them itself

detailed = with_debug("DETAIL", two_steps)
print("with DETAIL:", str(detailed).splitlines()[0])
print(str(detailed).partition("The process")[2].splitlines()[:1] or "the same error")
assert isinstance(detailed, RankError)

# %% [markdown]
# `INFO` writes the names. `DETAIL` should, too. Its first line means: *every rank failed alike*; the second says how, SIGSEGV. In the PyTorch of these outputs DETAIL crashes in C++ with this model
# (section 4 had no DDP). A debugger has bugs of its own: take the lowest level that answers your question.
#
# **Fix.** `find_unused_parameters=True` walks the graph in every step and marks what is missing as ready. If a head is *never* used, freeze it or leave it out: that costs nothing.

# %%
assert launch(two_steps, find_unused_parameters=True).values == [True, True]
print("two steps, and the unused head has no gradient")

# %% [markdown]
# ## 7. Dead, or only slow?
#
# If a rank is still computing, no tool can know whether it will ever come. Somebody has to say how long is too long.


# %% tags=["nbval-ignore-output"]
def reads_slowly():
    if dist.get_rank() == 1:
        time.sleep(1000)  # a file system that does not answer
    dist.all_reduce(torch.ones(4))


late = report_of(reads_slowly, timeout=3)
assert "no result after 3 s" in str(late) and "time.sleep(1000)" in str(late)

# %% [markdown]
# (*Never called it* means: not until now.) Three clocks can say it, each with its own words:
#
# | clock | whose | what it tells you |
# | --- | --- | --- |
# | `launch(…, timeout=)` | the notebook's | where every rank is |
# | `init_process_group(…, timeout=)`, `process_group(timeout=)` | each collective's | the victim's line: section 1 |
# | `dist.monitored_barrier(timeout=)` | one barrier's, gloo only | **who did not come** |


# %% tags=["nbval-ignore-output"]
def watched():
    if dist.get_rank() == 2:
        return "busy with something else"
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        return str(error).splitlines()[0]


told = launch(watched, nproc=3).values
for rank, words in enumerate(told):
    print(f"rank {rank}: {words[:100]}")
assert "Rank 2 failed to pass monitoredBarrier" in told[0]

# %% [markdown]
# Rank 0 collects the others one by one, so it knows who is missing (the first one; with `wait_all_ranks=True` all of them). That is slow, and too slow for every step, but right for a place where ranks have been apart: after
# loading data, before the first step. For a job whose ranks stay apart for longer (a first evaluation, a large checkpoint), raise the time-out; for all others keep it short: a hang
# costs you that time of all GPUs.
#
# ### It hangs before it begins
#
# All ranks must *meet* first. If one has not started, or looks at another address, the others wait at the store. Here one of two comes (below is the end of its message):


# %%
def one_of_two():
    wait = {"timeout": timedelta(seconds=1), "wait_for_workers": True}
    try:
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, **wait)
    except RuntimeError as error:
        return str(error)


words = launch(one_of_two, nproc=1).values[0]
print(words.partition("waiting")[2].strip())
assert "1/2 clients joined" in words

# %% [markdown]
# "1/2 clients joined": one is missing; look at *its* output. With gloo there is a second way to hang here. It asks for the address of this machine's own name, and on a laptop that moves
# between networks nothing may answer. `ddp-course doctor` tries it. Here we pretend that the name has no address, to see what it would say:

# %% tags=["nbval-ignore-output"]
from ddp_course import doctor

finding = doctor.hostname("my-laptop", resolves=False)
print(finding)
assert "/etc/hosts" in str(finding)

# %% [markdown]
# ## 8. Who is still there?
#
# A launcher that dies does not always take its ranks along. Here rank 0 waits in an `all_reduce` that rank 1 never calls, and torchrun is killed, as the system does when memory runs out.
#
# > **Predict.** Two seconds later, are the ranks gone?


# %%
WAITS_FOR_EVER = """open(f"pid{os.getpid()}", "w").close()
if rank == 0:
    dist.all_reduce(torch.ones(4))
time.sleep(600)
"""


def ranks_of(folder):
    return [int(path.name[3:]) for path in Path(folder).glob("pid*")]


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# %% tags=["nbval-ignore-output"]
left = None
if sys.platform == "linux":
    print("two new Pythons import PyTorch …")
    with tempfile.TemporaryDirectory() as folder:
        process = start(WAITS_FOR_EVER, folder, seconds=600)
        while len(ranks_of(folder)) < 2 and process.poll() is None:
            time.sleep(0.1)
        process.kill()  # SIGKILL: it can do nothing about it
        process.wait()
        time.sleep(2)
        left = [pid for pid in ranks_of(folder) if alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    print(
        f"torchrun is gone; {len(left)} of its 2 ranks still ran, with all their memory"
    )


# %%
def tells_and_sleeps():
    report(pid=os.getpid())
    time.sleep(600)


pids = []
slow = launch(
    tells_and_sleeps, wait=False, on_record=lambda record: pids.append(record["pid"])
)
while len(pids) < 2:
    time.sleep(0.1)
slow.stop()
assert not any(alive(pid) for pid in pids)
print("launch: stopped, and its ranks are gone")

# %% [markdown]
# On a machine with GPUs such a rank keeps its memory, and your next run fails with "out of memory". Look with `nvidia-smi` or `ps`, and end it by its number. `launch` holds a pipe to each rank: when the other end is
# gone, for whatever reason, the rank ends itself (`tests/test_kernel.py` kills a live kernel to prove it).
#
# ## 9. What finds what
#
# All that `launch` told you about collectives comes from this: PyTorch's **flight recorder**, a list in each process of the last collectives with their numbers, shapes and lines (`ddp_course/flight.py` reads and compares it). It works without a notebook as well: set
# `TORCH_FR_BUFFER_SIZE=2000`, and each rank can write its list; comparing the lists of all ranks is what finds the one that left the path.
#
# | symptom | first look at | tool |
# | --- | --- | --- |
# | stands still | who is *not* in the collective | `HangError`, flight recorder, `py-spy dump --pid` |
# | "Connection closed by peer", "Timed out" | the other ranks | `RankError`, torchrun with `@record` |
# | a process dies of SIGABRT | shapes and types | the shapes that `RankError` names; `TORCH_DISTRIBUTED_DEBUG=DETAIL`, unless it crashes itself (section 6) |
# | "Expected to have finished reduction" | unused parameters | `TORCH_DISTRIBUTED_DEBUG=INFO` |
# | numbers that cannot be | order of collectives | `check_order=True`, `sorted` |
# | hangs at the start | who has not joined | the store's "1/2 clients joined", `ddp-course doctor` |

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("11_when_it_breaks")

# %% [markdown]
# ## Exercise
#
# [11_find_the_hang](../exercises/11_find_the_hang.ipynb): five programs that hang, crash, or lie. Name the rank and the line, then mend them.
#
# ## How this looks on several GPUs and nodes
#
# A rank that waits in an NCCL collective keeps its GPU busy with waiting: `nvidia-smi` shows 100 %, and nothing is computed. With NCCL a collective only *starts* on the GPU when you call it, and Python goes on: the stack shows where Python waits, often a later line such as `.item()`. The flight recorder has the
# right one. NCCL's time-out is 10 minutes by default, and a watchdog thread ends the process when it is over; with `TORCH_NCCL_DUMP_ON_TIMEOUT=1` it first writes the flight recorder's list. `NCCL_DEBUG=INFO` says
# how ranks found each other. `monitored_barrier` is gloo's only: make a second group with `dist.new_group(backend="gloo")` for it.
#
# ## Where to read more
#
# * PyTorch documentation: *torch.distributed*, section "Debugging torch.distributed applications"; *DistributedDataParallel* on `find_unused_parameters`.
# * PyTorch tutorials: *Flight Recorder for Debugging Stuck Jobs*.
# * Li, Zhao, Varma and others: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (VLDB 2020), on unused parameters.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print("plain torchrun:", *complain, "complained, without saying of whom")
print("launch:", str(hang).splitlines()[-1])
print("swapped order: loss and accuracy on every rank", swapped.values[0])
print(
    "DETAIL finds another shape, not another order; check_order:", type(ordered).__name__
)
print("unused:", [names[int(index)] for index in indices])
if left is not None:
    print(f"ranks that outlived torchrun: {len(left)} of 2")
