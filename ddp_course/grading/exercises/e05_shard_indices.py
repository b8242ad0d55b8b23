"""05 · shard_indices(length, rank, world_size, epoch, seed, shuffle): who sees which sample."""

import math
import random
from collections import Counter

import torch

from ..exercise import Case, Exercise

PARAMETERS = ("length", "rank", "world_size", "epoch", "seed", "shuffle")


def _run(lengths, shuffle: bool):
    def run(fn, rank, world_size, seed):
        before = torch.random.get_rng_state().tolist(), repr(random.getstate())
        parts = {}
        for length in lengths:
            for epoch in (0, 1, 2):
                mine = fn(length, rank, world_size, epoch, seed, shuffle)
                parts[f"{length} {epoch}"] = [int(index) for index in mine]
        again = [int(i) for i in fn(lengths[-1], rank, world_size, 1, seed, shuffle)]
        other = [int(i) for i in fn(lengths[-1], rank, world_size, 1, seed + 1, shuffle)]
        after = torch.random.get_rng_state().tolist(), repr(random.getstate())
        return {"parts": parts, "again": again, "other": other, "touched": before != after}

    return run


def _judge(lengths, shuffle: bool):
    def judge(outputs, world_size, seed):
        for length in lengths:
            for epoch in (0, 1, 2):
                dealt = [output["parts"][f"{length} {epoch}"] for output in outputs]
                if wrong := _wrong_deal(dealt, length, world_size, shuffle):
                    return f"{length} samples, epoch {epoch}: {wrong}"
        long = lengths[-1]
        for rank, output in enumerate(outputs):
            first, second = output["parts"][f"{long} 0"], output["parts"][f"{long} 1"]
            if output["again"] != second:
                return (
                    f"rank {rank}: called again with the same arguments it deals differently: a "
                    "resumed run would see other data. Draw from a generator of your own, seeded."
                )
            if shuffle and first == second:
                return (
                    f"rank {rank}: epochs 0 and 1 have the same order: the epoch must change the "
                    "shuffle, as set_epoch does."
                )
            if shuffle and output["other"] == second:
                return f"rank {rank}: another seed gives the same order."
            if output["touched"]:
                return (
                    f"rank {rank}: it changes a global random generator, which the model and its "
                    "dropout draw from: use torch.Generator() or random.Random()."
                )
        return None

    return judge


def _wrong_deal(dealt, length, world_size, shuffle) -> str | None:
    share = math.ceil(length / world_size)
    sizes = [len(part) for part in dealt]
    outside = [i for part in dealt for i in part if not 0 <= i < length]
    if outside:
        return f"index {outside[0]} does not exist: they go from 0 to {length - 1}."
    if len(set(sizes)) > 1:
        return (
            f"the ranks get {sizes} samples: a rank that runs out of batches leaves the others "
            "waiting in a collective. Pad, so that all get equally many."
        )
    counts = Counter(i for part in dealt for i in part)
    missing = length - len(counts)
    if world_size > 1 and length > 1 and all(part == dealt[0] for part in dealt):
        return "every rank gets the same samples: the work is done several times over."
    if missing and sizes[0] * world_size < length:
        return (
            f"{missing} samples are on no rank: the rest of the division is dropped. Pad instead."
        )
    if missing:
        return (
            f"{missing} samples are on no rank, and others on several: do all ranks cut the *same* "
            "shuffled order? The seed must not depend on the rank."
        )
    if sizes[0] != share:
        return f"each rank gets {sizes[0]} samples; {share} are enough to see all of them."
    most = math.ceil(share * world_size / length)
    if max(counts.values()) > most:
        index, times = counts.most_common(1)[0]
        return (
            f"sample {index} comes {times} times: pad with different samples, each as rarely as "
            "possible."
        )
    if not shuffle:
        order = [i % length for i in range(share * world_size)]
        if any(part != order[rank::world_size] for rank, part in enumerate(dealt)):
            return (
                "without shuffling rank r should get r, r + world_size, r + 2 · world_size, … "
                f"(dealt like cards), and rank 0 gets {dealt[0][:4]} …"
            )
    elif length > 20 and sorted(dealt[0]) == dealt[0]:
        return "the order is not shuffled."
    return None


def _case(name, points, lengths, shuffle, worlds) -> Case:
    return Case(name, points, _run(lengths, shuffle), _judge(lengths, shuffle), worlds)


EXERCISE = Exercise(
    "05_shard_indices",
    "shard_indices",
    PARAMETERS,
    (
        _case("in order, dealt like cards", 2, (12, 24), False, (1, 2, 3)),
        _case("a length that does not divide", 3, (7, 13), False, (2, 3)),
        _case("shuffled", 3, (40, 43), True, (2, 3)),
        _case("fewer samples than ranks", 2, (1, 2), False, (3,)),
    ),
)
