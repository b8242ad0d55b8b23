"""12 · train_job(build, dataset, folder, epochs, global_batch, learning_rate): under torchrun."""

import contextlib
import os

import torch

from ..compare import is_times, off, tell, wrong_kind
from ..exercise import Case, Exercise, calls, same_calls
from .elastic import (
    BATCH,
    DIES_IN,
    EPOCHS,
    RATE,
    SAMPLES,
    Killed,
    Samples,
    as_torchrun,
    disks,
    empty_the_disk,
    fewer_ranks,
    fill_the_disk,
    gpus,
    kill,
    network,
    simulated,
    wrong_ways,
)

NAME = "train_job"


def _life(fn, folder, rank, seed, life, dataset) -> dict:
    """Call the function once; return what came of it as plain data."""
    used, per_node = [], int(os.environ["LOCAL_WORLD_SIZE"])

    def build(gpu):
        used.append(gpu)
        if gpu not in range(per_node):
            raise RuntimeError(
                f"invalid device ordinal: this node has {per_node} GPU(s), not {gpu}"
            )
        return network(seed, rank, life)

    called = len(calls())
    result = fn(build, dataset, str(folder), EPOCHS, BATCH, RATE)
    told = {"gpus": used, "collectives": calls()[called:]}
    if not isinstance(result, tuple | list) or len(result) != 2:
        return told | {"wrong": f"it returns {result!r:.60}, not (state_dict, losses)."}
    weights, losses = result
    if not hasattr(weights, "items") or not isinstance(losses, list | tuple):
        return told | {"wrong": "it returns something else than (state_dict, a list of losses)."}
    told["losses"] = [float(loss) for loss in losses]
    told["weights"] = {str(name): weight.detach().clone() for name, weight in weights.items()}
    return told


def _whole(fn, rank, world_size, seed):
    as_torchrun(rank, world_size, gpus(world_size))
    with disks(rank) as disk:
        told = _life(fn, disk.folder, rank, seed, 0, Samples(seed))
        return told | {"writers": disk.writers()}


def _killed(nodes_left: float):
    """A run that is killed in an epoch, and goes on with this share of its ranks."""

    def run(fn, rank, world_size, seed):
        per_node, left = gpus(world_size), max(1, int(world_size * nodes_left))
        as_torchrun(rank, world_size, per_node)
        death = (DIES_IN * SAMPLES + BATCH) // world_size + 1  # in the second step of that epoch
        with disks(rank) as disk:
            dying = Samples(seed, death, kill)
            with contextlib.suppress(Killed):
                _life(fn, disk.folder, rank, seed, 0, dying)
            writers = disk.writers()
            disk.restart()
            if left < world_size and not fewer_ranks(rank, left):
                return {"away": True}
            as_torchrun(rank, left, per_node)
            told = _life(fn, disk.folder, rank, seed, 1, Samples(seed))
            return told | {"writers": writers}

    return run


def _full_disk(fn, rank, world_size, seed):
    as_torchrun(rank, world_size, gpus(world_size))
    with disks(rank) as disk:
        dataset = Samples(seed, SAMPLES + 1, fill_the_disk)
        failed = False
        try:
            _life(fn, disk.folder, rank, seed, 0, dataset)
        except Exception:
            failed = True
        finally:
            empty_the_disk()
        try:
            told = _life(fn, disk.folder, rank, seed, 1, Samples(seed))
        except Exception as error:
            return {"lost": f"{type(error).__name__}: {error}"[:300]}
        return told | {"writers": disk.writers(), "failed": failed}


# ---- what is made of it


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        outputs = [output for output in outputs if "away" not in output]
        if "lost" in outputs[0]:
            return (
                "the disk was full in the middle of a save, and now the snapshot before it cannot "
                f"be loaded either ({outputs[0]['lost']}): write beside it, then os.replace."
            )
        return (
            _form_wrong(outputs, world_size)
            or _resume_wrong(outputs, kind)
            or _weights_wrong(outputs, kind, world_size, seed)
            or _losses_wrong(outputs, kind, world_size, seed)
            or same_calls(outputs)
        )

    return judge


def _form_wrong(outputs, world_size) -> str | None:
    per_node = gpus(world_size)
    for rank, output in enumerate(outputs):
        if output["gpus"] != [rank % per_node]:
            return (
                f"rank {rank} builds its network on {output['gpus'] or 'no GPU'}: once, on the one "
                f"of its LOCAL_RANK, {rank % per_node}."
            )
        if "wrong" in output:
            return f"rank {rank}: {output['wrong']}"
    writers = outputs[0]["writers"]
    if not writers:
        return "there is no snapshot in rank 0's folder: save one after every epoch."
    if writers != [0]:
        told = ", ".join(map(str, writers))
        return (
            f"ranks {told} write snapshots. On a shared disk they would write into one another's "
            "file: only rank 0 saves."
        )
    return None


def _resume_wrong(outputs, kind) -> str | None:
    counts = {len(output["losses"]) for output in outputs}
    if len(counts) > 1:
        return f"the ranks went through different numbers of epochs: {sorted(counts)}."
    (count,), wanted = counts, len(_epochs_of(kind, outputs))
    if count == wanted:
        return None
    if kind == "whole":
        return f"it returns {count} losses: one for each of the {EPOCHS} epochs."
    if count == EPOCHS:
        return (
            "killed and started again, it begins with epoch 0: no snapshot is loaded. If there is "
            "one in the folder at the start, go on from it."
        )
    if count > wanted:
        return (
            f"started again, it goes through {count} epochs where {wanted} are left: a finished "
            "epoch is done twice. Is the number in the snapshot that of the *next* epoch?"
        )
    return (
        f"started again, it goes through {count} epochs where {wanted} are left: the one that was "
        "interrupted has to be done anew."
    )


def _epochs_of(kind, outputs) -> range:
    """The epochs that the last life is to go through."""
    if kind == "full disk":
        return range(1 if outputs[0].get("failed") else EPOCHS, EPOCHS)
    return range({"whole": 0}.get(kind, DIES_IN), EPOCHS)


def _weights_wrong(outputs, kind, world_size, seed) -> str | None:
    right = simulated(seed, list(range(EPOCHS)))[0]
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["weights"]
        if set(mine) != set(right):
            return (
                f"rank {rank}: the state_dict has the names {sorted(mine)[:2]} …, not those of the "
                f"network itself, {sorted(right)[:2]} …"
            )
        for name, weight in right.items():
            if wrong_kind(mine[name], weight) or off(mine[name], weight) is not None:
                told = tell(f"{name} in the end", rank, mine[name], weight)
                return f"{told}\n{_misconception(outputs, mine, kind, world_size, seed)}".rstrip()
    return None


def _misconception(outputs, mine, kind, world_size, seed) -> str:
    for message, epochs, change in wrong_ways(kind, world_size):
        if _alike(mine, simulated(seed, epochs, **change)[0]):
            return message
    if not all(_alike(mine, output["weights"]) for output in outputs):
        if kind == "whole":
            return "The ranks end with different weights: are the gradients averaged (DDP)?"
        return (
            "The ranks end with different weights: *every* rank has to load the snapshot, also the "
            "optimizer's state, which DDP does not send to the others."
        )
    return "All ranks agree, on other weights than one process that takes the global batches."


def _alike(mine, weights) -> bool:
    return all(
        not wrong_kind(mine[name], weight) and off(mine[name], weight, 1e-7, 1e-8) is None
        for name, weight in weights.items()
    )


def _losses_wrong(outputs, kind, world_size, seed) -> str | None:
    epochs = _epochs_of(kind, outputs)
    right = simulated(seed, list(range(EPOCHS)))[1][epochs.start :]
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["losses"]
        if not right or off(torch.tensor(mine), torch.tensor(right), 1e-6, 1e-6) is None:
            continue
        told = tell("the loss of an epoch", rank, torch.tensor(mine), torch.tensor(right), 1e-6)
        steps = SAMPLES // BATCH
        if len({tuple(output["losses"]) for output in outputs}) > 1:
            return f"{told}\nEach rank tells its own loss: the mean over all ranks is asked for."
        for factor, message in (
            (len(outputs), "The ranks' losses were added up, not averaged."),
            (steps, "The steps' losses were added up, not averaged."),
            (1 / len(outputs), "It was divided by the world size once too often."),
        ):
            if is_times(torch.tensor(mine), torch.tensor(right), factor, 1e-5):
                return f"{told}\n{message}"
        return told
    return None


STUCK = (
    "Likely: a rank waits in a collective that another never calls, such as a barrier or DDP "
    "inside `if rank == 0`."
)
ERRORS = {
    "invalid device ordinal": "The number of a GPU is the LOCAL_RANK: each node counts its own "
    "from 0.",
    "twice": "The process group is up already, as between init_process_group and "
    "destroy_process_group in a script.",
}


def _case(name, points, run, kind, worlds) -> Case:
    return Case(name, points, run, _judge(kind), worlds, STUCK, ERRORS)


EXERCISE = Exercise(
    "12_torchrun_script",
    NAME,
    ("build", "dataset", "folder", "epochs", "global_batch", "learning_rate"),
    (
        _case("two nodes, from the start to the end", 3, _whole, "whole", (2, 4, 1)),
        _case("killed in an epoch, and started again", 4, _killed(1), "killed", (2, 4)),
        _case("killed, and started again on one node", 3, _killed(0.5), "halved", (4, 2)),
        _case("a disk that is full", 2, _full_disk, "full disk", (1,)),
    ),
)
