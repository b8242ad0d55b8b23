# %% [markdown]
# # Exercise 12 · A script for several nodes, which may die
#
# **Write** `train_job(build, dataset, folder, epochs, global_batch, learning_rate)`: what stands in a script between `init_process_group` and `destroy_process_group`. torchrun starts it on several nodes; it may be killed at any moment, and
# started again from its first line, perhaps with fewer ranks. It must end with the weights of a run that was never disturbed.
#
# | | |
# | --- | --- |
# | who calls it | every rank; the process group (gloo) is up, the environment is torchrun's: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
# | `build(gpu)` | returns a new network on this node's GPU of that number; each node has `LOCAL_WORLD_SIZE` of them (simulated: the network is on the CPU). Other weights on each rank and at each start |
# | `folder` | a folder that exists. At a start each rank finds in it what **rank 0** had written before. What other ranks write is not wanted, and lost |
# | snapshot | after every epoch, in a form of your own; if a save fails half-way (a full disk), the one before it can still be loaded |
# | at the start | if there is a snapshot, go on from it: with the first epoch that is not finished |
# | order | that of a `DistributedSampler` (its own default seed), another in every epoch |
# | step | SGD, `learning_rate`, momentum 0.9, on the mean cross entropy of `global_batch` samples **over all ranks**, however many there are now: by a larger or smaller batch per rank, without accumulation. It can be divided by their number, and everything comes out even |
# | returns | `state_dict, losses`, the same on every rank: the network's own weights (names without `module.`), and the mean loss over all ranks' samples of each epoch that **this** start went through, as they were trained on |
#
# About 30 minutes. Lessons [12](../notebooks/12_many_machines.ipynb), sections 1, 3 and 4, and [09](../notebooks/09_all_together.ipynb), section 4, have all you need.

# %%
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train_job(build, dataset, folder, epochs, global_batch, learning_rate):
    """Train, or go on; return (state_dict, the mean loss of each epoch of this start)."""
    # BEGIN SOLUTION GPU by local rank, snapshot, sampler, the global batch, one loss for all
    network = build(int(os.environ["LOCAL_RANK"]))  # rank counts over all nodes
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), learning_rate, momentum=0.9)
    path, done = os.path.join(folder, "snapshot.pt"), 0
    if os.path.exists(path):
        # Every rank: DDP has sent the weights of rank 0, and sends no optimizer's state.
        state = torch.load(path)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    # The world size of now: with fewer ranks each takes more, the step stays the same.
    share = global_batch // dist.get_world_size()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, share, sampler=sampler)
    losses = []
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)  # by its number, also after a restart
        total = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        if dist.get_rank() == 0:
            parts = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            # `epoch` is finished: the next start begins with the one after it.
            torch.save(parts | {"done": epoch + 1}, path + ".tmp")
            os.replace(path + ".tmp", path)  # the old one or the new one, nothing between
    return network.state_dict(), losses
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Your function in a real script under a real torchrun: two ranks, and in the fourth epoch rank 1 kills itself. torchrun starts both again. Then the same without a death, for comparison. Keep helpers and
# further imports inside `train_job`: only its text goes into the script.

# %%
import inspect
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FRAME = """
import os, signal, sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from ddp_course import data, models

class Deadly(Dataset):
    def __init__(self, images):
        self.images, self.left = images, 3.5 * 704 if DIES else float("inf")
    def __len__(self):
        return 1408  # 22 global batches
    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0 and os.environ["RANK"] == "1" and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[index]

DIES = sys.argv[1] == "dies"
torch.set_num_threads(1)
torch.manual_seed(int(os.environ["RANK"]))
dist.init_process_group("gloo")
try:
    images = Deadly(data.digits()[0])
    _, losses = train_job(lambda gpu: models.MLP(width=64), images, ".", 6, 64, 0.05)
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)
    dist.barrier()
finally:
    dist.destroy_process_group()
"""


# %% tags=["nbval-ignore-output"]
def under_torchrun(dies):
    """Run the script; return the losses that it tells in the end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.py").write_text(FRAME.replace("\nDIES", f"\n{source}\nDIES", 1))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "--max-restarts=1", "job.py", dies]
        env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        print(f"torchrun, {dies} …")
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=100,
        )
    told = re.search(r"^losses (.*)", done.stdout, re.MULTILINE)
    if not told:
        said = re.findall(r"\[rank0\]: (\w+Error.*)", done.stderr)
        raise RuntimeError(said[0] if said else done.stderr[-2000:])
    return [float(loss) for loss in told[1].split()]


source = inspect.getsource(train_job)
whole, rest = under_torchrun("lives"), under_torchrun("dies")
print("never killed:", [f"{loss:.4f}" for loss in whole])
print(f"the second start went through {len(rest)} epochs")

# %% tags=["nbval-ignore-output"]
from ddp_course import plots

curves = {
    name: [
        {"rank": 0, "step": 6 - len(losses) + n, "loss": loss}
        for n, loss in enumerate(losses)
    ]
    for name, losses in (("never killed", whole), ("killed in epoch 3", rest))
}
gap = max(abs(a - b) for a, b in zip(whole[-len(rest) :], rest, strict=True))
title = (
    "Killed, and the same in the end" if gap < 1e-6 else "Killed, and another run since"
)
plots.compare(curves, title=title)

# %% [markdown]
# (A step in this picture is an epoch.)
#
# ## Check it
#
# A few seconds, new numbers each time, on up to four ranks, as on two nodes.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("12_torchrun_script", train_job)

# %% tags=["solution-only"]
assert gap < 1e-6 and len(rest) == 3
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Go through the table: who am I (GPU, share of the batch), where do I start (snapshot, epoch), what belongs to all (loss, weights), who writes. Each has one line.
# </details>
#
# <details><summary>Hint 2</summary>
#
# *Loading* is for every rank, *saving* for rank 0. DDP sends rank 0's weights to all when it is built, but not the momentum. What is in the snapshot as the epoch's number: the finished one, or the next?
# </details>
#
# <details><summary>Hint 3</summary>
#
# `torch.save(state, path + ".tmp")`, then `os.replace(path + ".tmp", path)`. A rank's share of a step is `global_batch // dist.get_world_size()`; the learning rate stays.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# "The epoch goes into the snapshot": `{"done": epoch}`. The next start then trains a finished epoch again. No error, a loss that even looks a little better, and the run is no longer the same.


# %% tags=["solution-only", "nbval-ignore-output"]
exec(source.replace("epoch + 1", "epoch").replace("train_job", "repeats_an_epoch"))
assert not check("12_torchrun_script", repeats_an_epoch, seed=1)  # noqa: F821
