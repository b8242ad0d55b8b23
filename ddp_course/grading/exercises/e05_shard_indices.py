"""05 · shard_indices(length, rank, world_size, epoch, seed, shuffle): who sees which sample."""

import math
import random
from collections import Counter

import torch

from ..compare import many
from ..exercise import Case, Exercise

PARAMETERS = ("length", "rank", "world_size", "epoch", "seed", "shuffle")


def _run(lengths, shuffle: bool):
    def run(fn, rank, world_size, seed):
        def dealt(length, epoch, seed):
            return _plain(fn(length, rank, world_size, epoch, seed, shuffle))

        before = torch.random.get_rng_state().tolist(), repr(random.getstate())
        epochs = ((length, epoch) for length in lengths for epoch in (0, 1, 2))
        parts = {f"{length} {epoch}": dealt(length, epoch, seed) for length, epoch in epochs}
        again, other = (dealt(lengths[-1], 1, number) for number in (seed, seed + 1))
        after = torch.random.get_rng_state().tolist(), repr(random.getstate())
        return {"parts": parts, "again": again, "other": other, "touched": before != after}

    return run


def _plain(dealt):
    """The student's indices, or text that says what it is instead."""
    try:
        return [int(index) for index in dealt]
    except (TypeError, ValueError):
        return "nothing" if dealt is None else repr(dealt)[:60]


def _judge(lengths, shuffle: bool):
    def judge(outputs, world_size, seed):
        for length in lengths:
            for epoch in (0, 1, 2):
                dealt = [output["parts"][f"{length} {epoch}"] for output in outputs]
                if wrong := _wrong_deal(dealt, length, world_size, shuffle):
                    return f"{many(length, 'sample')}, epoch {epoch}: {wrong}"
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
    for rank, part in enumerate(dealt):
        if isinstance(part, str):
            return f"rank {rank}: it returns {part}, where a list of indices is asked for."
    share, sizes = math.ceil(length / world_size), [len(part) for part in dealt]
    outside = [i for part in dealt for i in part if not 0 <= i < length]
    if outside:
        return f"index {outside[0]} does not exist: they go from 0 to {length - 1}."
    if len(set(sizes)) > 1:
        return _unequal(sizes, length, share * world_size)
    counts = Counter(i for part in dealt for i in part)
    missing = length - len(counts)
    if world_size > 1 and length > 1 and all(part == dealt[0] for part in dealt):
        return "every rank gets the same samples: the work is done several times over."
    if missing:
        told = f"missing on all ranks: {many(missing, 'sample')}."
        return f"{told} {_why_missing(sizes[0], length, world_size)}"
    if sizes[0] != share:
        return f"each rank gets {many(sizes[0], 'sample')}; {share} are enough to see all of them."
    most = math.ceil(share * world_size / length)
    if max(counts.values()) > most:
        index, times = counts.most_common(1)[0]
        return (
            f"sample {index} comes {times} times: pad with different samples, each as rarely as "
            "possible."
        )
    if shuffle:
        return (
            "the order is not shuffled." if length > 20 and sorted(dealt[0]) == dealt[0] else None
        )
    return _wrong_order(dealt, length, share * world_size)


def _unequal(sizes, length, places) -> str:
    told = (
        f"the ranks get {sizes} samples: a rank that runs out of batches leaves the others waiting"
    )
    if sum(sizes) == 2 * length < places:
        return (
            f"{told}.\nThe padding fell short: there are {places} places, and "
            f"{many(length, 'sample')} to fill them. Once more round is not enough: go round as "
            "often as it takes (itertools.cycle)."
        )
    return f"{told} in a collective. Pad, so that all get equally many."


def _why_missing(size, length, world_size) -> str:
    share = math.ceil(length / world_size)
    if size < share and size == length // world_size:
        return "The rest of the division is dropped. Pad instead."
    if size < share:
        return f"Each rank gets {size}, and needs {share}."
    return (
        "Others are on several: do all ranks cut the *same* shuffled order? The seed must not "
        "depend on the rank."
    )


def _wrong_order(dealt, length, places) -> str | None:
    """Name the first rank that does not get its cards, and say if only the padding is another."""
    order = [i % length for i in range(places)]
    for rank, part in enumerate(dealt):
        wanted = order[rank :: len(dealt)]
        if part == wanted:
            continue
        told = (
            f"without shuffling rank {rank} should get {_short(wanted)}, and it gets {_short(part)}"
        )
        if part[:-1] == wanted[:-1] and places > length:
            return (
                f"{told}: padding goes round to the beginning, to sample 0, and not with the last "
                "samples again."
            )
        return (
            f"{told}: r, r + world_size, r + 2 · world_size, … for rank r, as cards are dealt "
            "(dealt like cards)."
        )
    return None


def _short(part) -> str:
    return str(part) if len(part) <= 8 else f"[{', '.join(map(str, part[:8]))}, …]"


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
