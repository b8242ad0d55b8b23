# %% [markdown]
# # 12 · Many machines
#
# **What you will do.** Start two `torchrun`s that find each other, kill a rank, then a whole node, and watch the training go on from its checkpoint. Read a Slurm file. Compute what changes at 1,000 GPUs.
#
# **What you will learn.** Rendezvous; local and global rank; what a restart needs; how often to save.
#
# **What you need.** Lessons 06 and 09. About 25 minutes, three of them waiting: a dot is a second.
#
# ---
# **The question.** One process more is easy: same machine, same memory, same fate. What is different when the other ranks are on *another machine*, which has its own name, its own GPUs, and its
# own time to die?
#
# Here the "nodes" are two torchruns on this machine, which speak over the loopback network. All that torchrun does is real; what is not is a network in between. (`tests/test_hosts.py` runs the same with hosts
# that have network stacks of their own, and pulls their cables.)

# %%
import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from math import log2, sqrt
from pathlib import Path

import psutil
import torch

from ddp_course import launch, predict, show, train

# %% [markdown]
# ## 1. Two nodes, four ranks
#
# On every node you type the *same* line. The rendezvous is a meeting place, host and port, that one of the nodes keeps:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 train.py
# ```
#
# `start` does this for one node. `--local-addr` and `is_host` are for our small world only: with all nodes on one machine, torchrun cannot tell by its name whether it keeps the meeting place. The times behind
# `is_host` make it notice a death within seconds. You may skip the next two cells: `run_nodes(script)` starts two torchruns and returns what they printed.


# %%
scratch = tempfile.TemporaryDirectory()
FOLDER = Path(scratch.name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(node, port, log, script, nnodes="2", ranks=1, **env):
    """Start torchrun for one node; all that it prints goes into the file `log`."""
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--local-addr=127.0.0.1",  # on one machine only
        f"--rdzv-conf=is_host={int(node == 0)},last_call_timeout=6,"
        "keep_alive_interval=1,keep_alive_max_attempt=2",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nnodes}"]
    command += [f"--nproc-per-node={ranks}", "--max-restarts=3", *rendezvous, *script]
    # Without it ranks that start again may look for each other at old addresses (2.13).
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | env)


# %%
@contextlib.contextmanager
def ended_in_any_case(processes):
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
            process.wait()


def run_nodes(script, per_node=({}, {}), until=None, **options):
    """Run a script on two nodes, or until one prints something; return what they printed."""
    port, logs = free_port(), [FOLDER / f"node{node}.log" for node in (0, 1)]
    started = [
        start(node, port, logs[node], script, **options, **per_node[node])
        for node in (0, 1)
    ]
    with ended_in_any_case(started):
        clock = time.monotonic()
        while any(process.poll() is None for process in started):
            time.sleep(1)
            print(".", end="", flush=True)
            printed = [log.read_text() for log in logs]
            if until and re.search(until, "".join(printed)):
                break
            if time.monotonic() - clock > 100:
                raise TimeoutError("\n".join(printed))
    print()
    return [log.read_text() for log in logs]


# %% [markdown]
# > **Predict.** Two nodes with two ranks each. Rank 2 is the first rank of the second node. What is its `LOCAL_RANK`?

# %%
guess = predict.number("LOCAL_RANK of rank 2", start=2, unit="LOCAL_RANK", low=0, high=3)

# %% tags=["nbval-ignore-output"]
NAMES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
(FOLDER / "who.py").write_text(f"""import os
words = " ".join(os.environ[name] for name in {NAMES})
os.write(1, (words + "\\n").encode())  # a whole line at once
""")
print("two torchruns look for each other ", end="")
printed = run_nodes([str(FOLDER / "who.py")], ranks=2)
rows = sorted(re.findall(r"^\d .*", "\n".join(printed), re.MULTILINE))
print(*NAMES)
for row in rows:
    print("  ".join(f"{v:^{len(n)}}" for v, n in zip(row.split(), NAMES, strict=True)))
local = {int(row.split()[0]): int(row.split()[1]) for row in rows}
assert local == {0: 0, 1: 1, 2: 0, 3: 1}
guess.compare(local[2])

# %% [markdown]
# **Read it.** Each torchrun (an *agent*) went to the meeting place. When both were there, the ranks were dealt out: `RANK` counts over all nodes, `LOCAL_RANK` starts again at 0 on each, and `GROUP_RANK` is the
# node's number (both can be others after a restart: keep nothing by `RANK` on a node's own disk). `LOCAL_WORLD_SIZE`, not printed, says how many ranks the node has. `MASTER_ADDR` and `MASTER_PORT` are the same on all: there the ranks' process group meets. You chose one port, for the rendezvous, and none for the ranks.
#
# * **`RANK`** decides *what is yours of the whole*: which samples, who prints, who saves.
# * **`LOCAL_RANK`** decides *what is yours on this machine*: which GPU, which cores.
#
# ### The rank as GPU
#
# On one node `rank` and `local_rank` are the same, so a script with `torch.cuda.set_device(rank)` runs for months. Then it gets a second node with 8 GPUs. Without 16 GPUs we only count:

# %%
gpus = 8
for rank in (0, 7, 8, 12):
    found = rank if rank < gpus else "does not exist: invalid device ordinal"
    print(f"rank {rank:2}: cuda:{rank} {found if rank >= gpus else 'fine'}; "
          f"by local rank: cuda:{rank % gpus}")  # fmt: skip
lost = sum(rank >= gpus for rank in range(2 * gpus))
assert lost == gpus

# %% [markdown]
# All ranks of the second node fail. **Fix.** `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`. `process_group()` does so: `this_rank` reads `LOCAL_RANK`, and `set_device` gets its device.

# %%
from ddp_course import process_group

show.source(process_group)

# %% [markdown]
# ## 2. Can they train together? Ask before you queue
#
# Nodes that cannot reach each other hang, at the start or in the first collective. Nodes with other versions, or other data, train, and are wrong. `ddp-course doctor --cluster` is started like a training and looks at all of it:

# %% tags=["nbval-ignore-output"]
print("two nodes, one rank each ", end="")
report = "".join(
    run_nodes(
        ["-m", "ddp_course", "doctor", "--cluster"], until="Link .*\n|fix: .*node 1"
    )
).replace(socket.gethostname(), "laptop")
lines = re.findall(r"^(?:ok|FAIL|note) .*|^ +fix: .*", report, re.MULTILINE)
print(*[re.sub(r"; it has .*", "", line) for line in lines], sep="\n")
assert "2 ranks on 2 host(s)" in report and "Data" in report
assert all("Address" in line for line in lines if line.startswith("FAIL"))

# %% [markdown]
# If you see `FAIL Address` here, the doctor is right: this machine's own name leads to 127.0.0.1, and it *offers* that address to others. Between our two "nodes" on one machine it happens to work. From another machine it would lead
# nowhere. The line below it says what to set: `NAME` is the network's name, as `ip addr` lists it (such as `eth0`). If you see `Link` instead, the address was good, and the link was measured: on a cluster, that is the number to compare with what you were promised.
#
# Data is compared by its contents, not by the file's name. Clocks matter when you compare logs.
#
# ## 3. A rank is killed
#
# One process is killed in the middle of a step: by the system, because memory ran out, or by a broken GPU. The script trains with `train.run` of lesson 09 and saves after every epoch. On its first attempt one
# of its ranks kills itself with SIGKILL, which no `try` can catch. `VICTIM` says on which node; `NODE_TOO` kills the torchrun above it as well, and `ranks=2` waits for section 4 too.

# %%
print(
    (FOLDER / "survive.py").write_text("""import os, signal, torch
from ddp_course import process_group, train

torch.set_num_threads(1)
died = os.environ["FILE"] + ".died"  # says to the next attempt that it is not the first
attempt = 1 + os.path.exists(died)
settings = train.Settings(
    epochs=2, micro_batch=96, ranks=2, checkpoint=os.environ["FILE"], resume=True
)
with process_group() as me:
    def tell(step, loss, **_):
        if me.rank == 0:
            words = f"attempt {attempt} ranks {me.world_size} step {step} loss {loss:.6f}"
            os.write(1, (words + "\\n").encode())
        if step == 11 and attempt == 1 and "VICTIM" in os.environ:
            open(died, "w").close()
            if "NODE_TOO" in os.environ:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    train.run(settings, tell)
"""),
    "characters written",
)

# %%
guess = predict.number(
    "8 steps an epoch, a checkpoint after each; dead in step 11 (from 0). "
    "With which step does the second attempt begin?",
    start=12, unit="step", low=0, high=16,
)  # fmt: skip


# %% tags=["nbval-ignore-output"]
def steps_of(printed):
    """{attempt: {step: loss}}, and how many ranks each attempt had."""
    pattern = r"attempt (\d) ranks (\d) step (\d+) loss ([\d.]+)"
    losses, ranks = {}, {}
    for attempt, count, step, loss in re.findall(pattern, "\n".join(printed)):
        losses.setdefault(int(attempt), {})[int(step)] = float(loss)
        ranks[int(attempt)] = int(count)
    return losses, ranks


print("two nodes train, one rank dies, they start again ", end="")
file = {"FILE": str(FOLDER / "rank.pt")}
killed, ranks = steps_of(
    run_nodes([str(FOLDER / "survive.py")], per_node=(file, file | {"VICTIM": "1"}))
)
for attempt, losses in killed.items():
    print(
        f"attempt {attempt}, {ranks[attempt]} ranks: steps {min(losses)} to {max(losses)}"
    )
assert ranks == {1: 2, 2: 2} and list(killed[2]) == list(range(8, 16))
guess.compare(min(killed[2]))

# %% [markdown]
# The torchrun above it saw its process die. Both agents ended their ranks, met again, and started the script from its first line. The script found the checkpoint. Steps 8 to 11 were done twice.
#
# > **Predict.** Is the result that of a run which was never killed?


# %% tags=["nbval-ignore-output"]
def undisturbed():
    torch.set_num_threads(1)
    settings = train.Settings(epochs=2, micro_batch=96, ranks=2)
    losses = []
    train.run(settings, lambda loss, **_: losses.append(loss))
    return losses


never_killed = launch(undisturbed).values[0]
survived = killed[1] | killed[2]  # what was done twice: the second time counts
gap = max(abs(survived[step] - loss) for step, loss in enumerate(never_killed))
print(f"16 losses, at most {gap:.0e} apart (they were printed with six digits)")
assert len(survived) == 16 and gap < 1e-4

# %% [markdown]
# It is. torchrun gives you the *restart*; that the restart is right is your checkpoint's doing (lesson 09: model, optimizer, schedule, epoch, random generators). A script without `--resume` would begin with step 0 at every restart;
# and one that dies every time is given up after three of them: `--max-restarts 3`.
#
# ## 4. A node is lost
#
# Now the whole second node goes: its torchrun and its rank. Nobody is left there to start again. With `--nnodes 2` the first node would wait for another (for ten minutes, by default); with `--nnodes 1:2` it may go on alone.
#
# > **Predict.** On half of the ranks: what happens to the global batch, and with it to the learning rate that fits it?

# %% tags=["nbval-ignore-output"]
print("two nodes train, one goes dark, the other goes on ", end="")
file = {"FILE": str(FOLDER / "node.pt")}
dark = file | {"VICTIM": "1", "NODE_TOO": "1"}
lost, ranks = steps_of(
    run_nodes([str(FOLDER / "survive.py")], per_node=(file, dark), nnodes="1:2")
)
for attempt, losses in lost.items():
    print(
        f"attempt {attempt}, {ranks[attempt]} rank(s): steps {min(losses)} to {max(losses)}"
    )
assert ranks == {1: 2, 2: 1} and list(lost[2]) == list(range(8, 16))
apart = max(abs(lost[2][step] / never_killed[step] - 1) for step in range(8, 16))
print(f"losses of the second epoch: at most {apart:.1%} from those of two ranks")
assert apart < 0.05

# %% [markdown]
# Half of the ranks, and the same steps with the same losses (but for one sample: 1,437 is odd, and two ranks pad it to 1,438). That is not torchrun's doing. With `ranks=2` (`--ranks 2` on the command line) the settings say for how many ranks
# `accumulation_steps` is meant; one rank then takes twice as many micro-batches for a step:

# %%
show.source(train.Settings.window)

# %%
settings = train.Settings(micro_batch=96, ranks=2)
for world_size in (2, 1):
    micro_batches = settings.window(world_size)
    print(
        f"{world_size} rank(s) × {micro_batches} × 96 = {world_size * micro_batches * 96}"
    )
    assert world_size * micro_batches * 96 == 192

# %% [markdown]
# Without it the global batch would be 96 and the steps twice as many, with a learning rate that was chosen for 192 (lesson 06). Nothing would fail.
#
# ## 5. Slurm
#
# On a cluster you do not log in to nodes: you hand in a file that says what you need, and the scheduler runs it when it is there. Slurm starts *one task on each node*, that task is torchrun, and the rest is as above.

# %%
BATCH = Path(train.__file__).with_name("train.sbatch")
print(BATCH.read_text())
assert subprocess.run(["bash", "-n", BATCH]).returncode == 0

# %% [markdown]
# Three lines to look at. `--ntasks-per-node=1`: with 8, eight torchruns would start eight ranks each. `scontrol show hostnames` turns `node[07-08]` into names, and the first becomes the meeting place. `--rdzv-id` keeps two jobs apart that
# meet at one node. (`tests/test_slurm.py` runs this file with stand-ins for `srun` and `scontrol`, on one node. On a real cluster it has not run yet: partition, account and modules are yours to add.)
#
# ## 6. What changes at 1,000 GPUs
#
# Of all the above nothing; but three numbers. **First: how often something breaks.** Training Llama 3 on 16,384 GPUs was interrupted unexpectedly 419 times in 54 days (Llama team, 2024).

# %%
hours_between = 54 * 24 / 419
hours_per_gpu = hours_between * 16_384
print(
    f"one failure in {hours_between:.1f} hours; of one GPU: in {hours_per_gpu / 8766:.1f} years"
)
for gpus in (8, 64, 1_000, 16_384):
    print(f"{gpus:6} GPUs: a failure every {hours_per_gpu / gpus:7.1f} hours")

# %% [markdown]
# (All interruptions, whatever their cause, shared out over the GPUs.) A GPU that fails once in some years is reliable. A thousand of them are not.
#
# **Second: how often to save.** Save often, and you pay for saving. Save rarely, and each failure costs you what came after the last checkpoint, half an interval on average. With $\tau$ for the training time between two saves, $\delta$ for the time of a save and $M$ for the mean time between failures, the
# lost share is about $\delta/\tau + \tau/2M$, smallest at Young's interval (1974)
#
# $$\tau = \sqrt{2\,\delta M}$$

# %%
save = 1 / 60  # hours: a minute, in which nobody trains
guess = predict.number(
    "1,000 GPUs, a save takes a minute. After how many minutes of training should you save?",
    start=600, unit="minutes", low=1, high=1000,
)  # fmt: skip


# %%
def lost_share(interval, between, save=save):
    return save / interval + interval / (2 * between)


best = {gpus: sqrt(2 * save * hours_per_gpu / gpus) for gpus in (8, 64, 1_000, 16_384)}
for gpus, interval in best.items():
    between = hours_per_gpu / gpus
    print(f"{gpus:6} GPUs: save every {60 * interval:5.0f} minutes, "
        f"{lost_share(interval, between):.1%} lost; "
          f"every 24 hours: {min(1, lost_share(24, between)):.1%}")  # fmt: skip
guess.compare(60 * best[1_000], source="computed")

# %% [markdown]
# (100% is where the formula ends: it holds while $\tau$ is much shorter than $M$.) Is the formula right? A simulation (random failures, no GPUs): how much of the time is *work that is kept*, for intervals around Young's?


# %%
def kept(interval, between, hours=50_000, seed=0):
    """Simulated: the share of time that went into work which a checkpoint has saved."""
    draw, now, work = random.Random(seed), 0.0, 0.0
    failure = draw.expovariate(1 / between)
    while now < hours:
        if now + interval + save <= failure:  # an interval and its save, undisturbed
            now, work = now + interval + save, work + interval
        else:  # all since the last save is lost
            now, failure = failure, failure + draw.expovariate(1 / between)
    return work / now


between, young = hours_per_gpu / 1_000, best[1_000]
shares = {factor: kept(factor * young, between) for factor in (0.1, 0.5, 1, 2, 10)}
for factor, share in shares.items():
    predicted = 1 - lost_share(factor * young, between)
    print(
        f"{factor:4} × Young's interval: {share:.1%} kept, the formula says {predicted:.1%}"
    )
assert shares[1] == max(shares.values()) or max(shares.values()) - shares[1] < 0.003
assert abs(shares[1] - (1 - lost_share(young, between))) < 0.01

# %% [markdown]
# The optimum is flat: half or twice the interval costs little, a tenth or ten times costs much. (At a tenth the save is no longer short beside the interval, and the formula counts it too high. The restart itself, some minutes for all GPUs, comes on top, and no interval helps against it.)
#
# **Third: how long an all-reduce takes.** A ring has $2(n-1)$ steps, each with its latency $\alpha$; a tree has $2\log_2 n$. Both move about twice the bytes over each link, if the message goes through the tree in pieces. With 10 µs and 50 GB/s, *assumed*, not measured:


# %%
alpha, bandwidth = 10e-6, 50e9  # seconds for a step; bytes a second


def ring(n, size):
    return 2 * (n - 1) * alpha + 2 * (n - 1) / n * size / bandwidth


def tree(n, size):
    return 2 * log2(n) * alpha + 2 * size / bandwidth


for size in (1e6, 1e9):
    for n in (8, 1_024, 16_384):
        print(f"{size / 1e6:5.0f} MB, {n:6} GPUs: ring {1e3 * ring(n, size):7.2f} ms, "
              f"tree {1e3 * tree(n, size):6.2f} ms")  # fmt: skip
assert ring(16_384, 1e6) > 100 * tree(16_384, 1e6)
assert ring(8, 1e9) < tree(8, 1e9) * 1.01

# %% [markdown]
# In a ring of thousands, latency is all. So libraries choose, trees where latency counts and rings where bytes do, and buckets are large; and each GPU's share of work has to stay large enough to hide what is left.
#
# The rest is care that a small run does not need: a thousand processes that open one Python file at the same second, logs from one rank only, time-outs long enough for the slowest to come, and spare nodes, so that `--nnodes 120:128` finds somebody (with a global batch that 120 to 128 nodes can share out, section 4).

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("12_many_machines")

# %% [markdown]
# ## Exercise
#
# [12_torchrun_script](../exercises/12_torchrun_script.ipynb): the `main` of a script that trains on several nodes, is killed, and goes on.
#
# ## How this looks on several GPUs and nodes
#
# **Windows.** `torchrun` there can stop with *use_libuv was requested but PyTorch was built without libuv support*: some builds for Windows lack that library for the rendezvous' store. The variable `USE_LIBUV=0` chooses the older store. We have not been
# able to run this course's GPU or Windows parts ourselves.
#
# This lesson is that. What changes: `FIRST_NODE:29400` for the endpoint and no `is_host`, no `--local-addr`; `--nproc-per-node 8`; a checkpoint on a file system that *all* nodes see. If a node has several networks, `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name
# the one to use. With PyTorch 2.13, set `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on all nodes, as `start` does: otherwise ranks that start again can look for each other at the addresses of the attempt before.
#
# ## Where to read more
#
# * PyTorch documentation: *torchrun (Elastic Launch)*, *Rendezvous*.
# * Young: *A First Order Approximation to the Optimum Checkpoint Interval* (Communications of the ACM, 1974); Daly: *A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps* (2006).
# * Llama team: *The Llama 3 Herd of Models* (2024), section on reliability.
# * Slurm documentation: *sbatch*, *srun*.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"local rank of rank 2: {local[2]}")
print(f"a rank killed: again from step {min(killed[2])}, losses at most {gap:.0e} apart")
print(f"a node lost: on with {ranks[2]} rank, losses at most {apart:.1%} apart")
print(
    f"1,000 GPUs: a failure every {between:.0f} hours, save every {60 * young:.0f} minutes"
)
scratch.cleanup()
