"""The nodes, the disks and the training of 12_torchrun_script, and all of it in one process."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from ..exercise import generator

SAMPLES, BATCH, RATE, MOMENTUM = 48, 12, 0.3, 0.9
EPOCHS, DIES_IN = 4, 2  # it is killed in epoch 2, counted from 0
SMALL_DISK = 1000  # bytes that a file may have when the disk is full


class Killed(BaseException):
    """The end of a process in the middle of a step; nobody should catch it."""


def gpus(world_size: int) -> int:
    """Return how many ranks, and so GPUs, a node has: two nodes, unless there is one rank only."""
    return max(1, world_size // 2)


def as_torchrun(rank: int, world_size: int, per_node: int) -> None:
    """Set the variables that torchrun sets, for a rank of nodes with so many ranks each."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % per_node}
    place |= {"LOCAL_WORLD_SIZE": per_node, "GROUP_RANK": rank // per_node}
    os.environ.update({name: str(value) for name, value in place.items()})


def network(seed: int, rank: int, life: int = 0) -> nn.Module:
    torch.manual_seed(seed + 10 * life + rank)  # each rank brings weights of its own, each time
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class Samples(Dataset):
    """Random samples; before the `number`-th that is asked for, `then` is called."""

    def __init__(self, seed: int, number: int | None = None, then=None):
        draw = generator(seed, SAMPLES)
        self.x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
        self.y = torch.randint(3, (SAMPLES,), generator=draw)
        self.number, self.then, self.asked = number, then, 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == self.number:
            self.then()
        return self.x[index], self.y[index]


def kill():
    raise Killed


class Disks:
    """A folder for each rank, as on a disk of its own; rank 0's are copied to all by `restart`."""

    def __init__(self, rank: int):
        box = [None]
        if rank == 0:
            box = [tempfile.mkdtemp(prefix="nodes-", dir=os.environ.get("TMPDIR"))]
        dist.broadcast_object_list(box)
        self.rank, self.root = rank, Path(box[0])
        self.folder = self.root / f"rank{rank}"
        self.folder.mkdir()
        dist.barrier()

    def writers(self) -> list[int]:
        """Return the ranks with files in their folder; every rank must call it."""
        dist.barrier()
        found = [int(path.name[4:]) for path in self.root.glob("rank*") if any(path.iterdir())]
        dist.barrier()
        return sorted(found)

    def restart(self) -> None:
        """Leave in each folder what rank 0 has written, and nothing else."""
        dist.barrier()
        if self.rank:
            shutil.rmtree(self.folder)
            shutil.copytree(self.root / "rank0", self.folder)
        dist.barrier()


@contextlib.contextmanager
def disks(rank):
    made = Disks(rank)
    try:
        yield made
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            made.root.rmdir()  # by the last


_kept = []  # process groups of earlier lives: a rank may still be talking through them


def fewer_ranks(rank: int, world_size: int) -> bool:
    """Set up a group of the first `world_size` ranks; return whether this rank is in it."""
    _kept.append(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    if rank >= world_size:
        return False
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    _kept.append(store)
    life = dist.PrefixStore("second life", store)
    dist.init_process_group("gloo", store=life, rank=rank, world_size=world_size)
    return True


def fill_the_disk():
    """Let no file grow beyond a few bytes from now on, where the system can do that."""
    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_DISK, hard))


def empty_the_disk():
    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def simulated(seed: int, epochs: list[int], **change) -> tuple[dict, list[float]]:
    """Return (weights, mean loss of each epoch) of one process that takes the global batches.

    `epochs`: the orders to go through. `change`: batch, rate, later (factors; later: of the batch
    in the second life), forget, afresh (the place in `epochs` at which momentum, or momentum and
    weights, are lost), shuffle.
    """
    samples, losses = Samples(seed), []
    model = optimizer = None
    for place, epoch in enumerate(epochs):
        if place in (0, change.get("afresh")):
            model, optimizer = network(seed, 0, life=int(place > 0)), None
        if optimizer is None or place == change.get("forget"):
            rate = RATE * change.get("rate", 1)
            optimizer = torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM)
        batch = BATCH * change.get("batch", 1) * (change.get("later", 1) if place >= DIES_IN else 1)
        losses.append(_epoch(model, optimizer, samples, _order(samples, epoch, change), int(batch)))
    return {name: w.detach() for name, w in model.state_dict().items()}, losses


def _order(samples, epoch, change) -> list[int]:
    sampler = DistributedSampler(samples, 1, 0, shuffle=change.get("shuffle", True))
    sampler.set_epoch(epoch)
    return list(sampler)


def _epoch(model, optimizer, samples, order, batch) -> float:
    total = 0.0
    for start in range(0, SAMPLES, batch):
        picked = order[start : start + batch]
        loss = F.cross_entropy(model(samples.x[picked]), samples.y[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(picked)
    return total / SAMPLES


def wrong_ways(kind, world_size):
    """Yield (what it looks like, the orders of its epochs, the change to the right training)."""
    every = list(range(EPOCHS))
    yield "Every epoch had the order of epoch 0: sampler.set_epoch(epoch).", [0] * EPOCHS, {}
    yield "The samples were not shuffled.", every, {"shuffle": False}
    if world_size > 1:
        yield (
            f"Each rank took batches of {BATCH}, the *global* batch: with {world_size} ranks its "
            "share is global_batch // world_size.",
            every,
            {"batch": world_size},
        )
        yield (
            f"The learning rate was {world_size} times the one that was given: it belongs to the "
            "global batch, which does not grow with the ranks.",
            every,
            {"rate": world_size},
        )
    if kind == "whole":
        return
    again = [*range(DIES_IN), *range(EPOCHS - DIES_IN)]
    yield "After the restart set_epoch counted from 0 again: give it the epoch's number.", again, {}
    lost = {
        "forget": "The optimizer's state (its momentum) was not in the snapshot, or not loaded.",
        "afresh": "After the restart it trained from new weights: those of the snapshot belong "
        "into the network.",
    }
    for change, message in lost.items():
        for place in (DIES_IN, 1):
            yield message, every, {change: place}
    yield (
        "After the restart the ranks kept the batches of before, and there are half as many: "
        "compute a rank's share from the world size of *now*.",
        every,
        {"later": 0.5},
    )
