"""02 · ring_all_reduce(x): the sum over all ranks, by sending to the right neighbour only."""

import contextlib

import torch
import torch.distributed as dist

from ..compare import is_times, many, off, tell
from ..exercise import Case, Exercise, calls, generator

SIZES = {"even": (12, 24), "ragged": (7, 10, 25), "small": (1, 2)}


def _own(seed: int, rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator(seed, rank, size), dtype=torch.float64)


@contextlib.contextmanager
def _listening(sent: list):
    """Note (peer, bytes) of what this rank sends, while the student's function runs."""
    import torch.distributed.distributed_c10d as c10d

    inside = []  # send calls isend: it is one message

    def noting(function):
        def send(tensor, dst=None, *args, **kwargs):
            peer = dst if dst is not None else kwargs.get("group_dst")
            if not inside:
                sent.append((peer, tensor.numel() * tensor.element_size()))
            inside.append(True)
            try:
                return function(tensor, dst, *args, **kwargs)
            finally:
                inside.pop()

        return send

    before = {name: getattr(c10d, name) for name in ("send", "isend")}
    try:
        for name, function in before.items():
            noted = noting(function)  # the same in both places: P2POp compares
            setattr(c10d, name, noted)
            setattr(dist, name, noted)
        yield
    finally:
        for name, function in before.items():
            setattr(c10d, name, function)
            setattr(dist, name, function)


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        results, sent, returned = {}, {}, False
        for size in SIZES[kind]:
            x, notes = _own(seed, rank, size), []
            called = len(calls())
            with _listening(notes):
                returned = fn(x) is not None or returned
            results[str(size)] = x
            sent[str(size)] = [[-1 if peer is None else peer, count] for peer, count in notes]
            if len(calls()) > called:
                return {"collective": calls()[called]}
        return {"results": results, "sent": sent, "returned": returned}

    return run


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            if "collective" in output:
                return (
                    f"rank {rank}: it calls {output['collective']}: build the sum from send and "
                    "receive alone."
                )
        for size in SIZES[kind]:
            own = [_own(seed, rank, size) for rank in range(world_size)]
            for rank, output in enumerate(outputs):
                if wrong := _wrong(output, size, rank, own):
                    return f"{many(size, 'element')}: {wrong}"
            first = outputs[0]["results"][str(size)]
            if any(not first.equal(output["results"][str(size)]) for output in outputs[1:]):
                return (
                    f"{many(size, 'element')}: the ranks' sums differ in the last bits: each chunk "
                    "should be added up once, and then be copied round."
                )
        return _judge_traffic(outputs, world_size) if kind == "even" else None

    return judge


def _wrong(output, size, rank, own) -> str | None:
    mine, total = output["results"][str(size)], sum(own)
    if mine.shape == total.shape and off(mine, total) is None:
        return None
    told = tell("x", rank, mine, total)
    if mine.shape != total.shape:
        return told
    messages = len(output["sent"][str(size)])
    if why := _not_written(mine, rank, own, messages, output["returned"]):
        return f"{told}\n{why}"
    return f"{told}\n{_misconception(mine, rank, own, total)}".rstrip()


def _not_written(mine, rank, own, messages, returned) -> str:
    """Say that what arrived was not written into x, if all of it or its last part was not."""
    world_size = len(own)
    unchanged = off(mine, own[rank]) is None
    if unchanged and (returned or not messages):
        return "x is what it was: replace it in place (x.copy_, x[…] = …); nothing is returned."
    if unchanged:
        return (
            "x is what it was, though chunks were sent. You replaced list entries (chunks[i] = …) "
            "or changed a copy; x itself was not changed. Write into its views: "
            "chunks[i].add_(arrived), chunks[i].copy_(arrived)."
        )
    ending = [sum(own[rank - k] for k in range(count)) for count in range(1, world_size + 1)]
    tensors = [tensor.tensor_split(world_size) for tensor in (mine, *ending)]
    chunks = zip(*tensors, strict=True)
    scattered = all(any(off(chunk, part) is None for part in parts) for chunk, *parts in chunks)
    if scattered and messages >= 2 * (world_size - 1):
        return (
            "x is as the reduce-scatter leaves it, though finished chunks were sent round: what "
            "arrives in the all-gather only replaces list entries (chunks[i] = arrived); x itself "
            "is not changed. Write into its views: chunks[i].copy_(arrived)."
        )
    return ""


def _misconception(mine, rank, own, total) -> str:
    world_size = len(own)
    if is_times(mine, total, 1 / world_size):
        return "It is the mean: an all-reduce gives the sum."
    right = (mine - total).abs() <= 1e-9
    wrong_part = (mine - total)[~right]
    if world_size == 2 and off(wrong_part, own[rank][~right]) is None:
        return "Some chunks were added once more in the all-gather: finished chunks are copied."
    if bool(right.any()):
        return (
            f"{int(right.sum())} of {len(total)} elements are right. After the reduce-scatter each "
            "rank has one finished chunk; the all-gather has to *copy* the finished chunks round, "
            "in another world_size − 1 steps."
        )
    for other in range(world_size):
        if world_size > 1 and off(mine, total - own[other]) is None:
            return f"Rank {other}'s part is missing: is there one step too few?"
    return ""


def _judge_traffic(outputs, world_size) -> str | None:
    for rank, output in enumerate(outputs):
        for size, sent in output["sent"].items():
            peers = {peer for peer, count in sent if count}
            if world_size > 2 and peers and peers != {(rank + 1) % world_size}:
                return (
                    f"rank {rank} sends to ranks {sorted(peers)}: in the ring it sends to its "
                    f"right neighbour alone, rank {(rank + 1) % world_size}."
                )
            least = 2 * (world_size - 1) * int(size) * 8 / world_size
            total = sum(count for _, count in sent)
            if total > 1.01 * least:
                return (
                    f"rank {rank} sends {total} bytes of a tensor of {int(size) * 8}; "
                    f"2 (N − 1) / N of it, {least:.0f} bytes, are enough: send one chunk a step, "
                    "not the whole tensor."
                )
    return None


_STUCK = (
    "Likely: all ranks wait in send (or all in recv) at the same moment. Send and receive at once: "
    "isend, then recv, then wait; or dist.batch_isend_irecv."
)
_ERRORS = {
    "'tuple' object does not support item assignment": "tensor_split gives a tuple, whose entries "
    "cannot be replaced. They are views of x: change them in place, with chunks[i].add_(arrived) "
    "or chunks[i].copy_(arrived).",
    "died of SIGABRT": "Likely: a rank receives into a tensor of another size than what is sent. "
    "The chunk that arrives is the one that the left neighbour sends in this step.",
}


def _case(name, points, kind, worlds) -> Case:
    return Case(name, points, _run(kind), _judge(kind), worlds, _STUCK, _ERRORS)


EXERCISE = Exercise(
    "02_ring_all_reduce",
    "ring_all_reduce",
    ("x",),
    (
        _case("two ranks", 2, "even", (2,)),
        _case("three and four ranks", 3, "even", (3, 4)),
        _case("a size that does not divide", 2, "ragged", (2, 3)),
        _case("fewer elements than ranks", 1, "small", (3,)),
        _case("alone", 1, "even", (1,)),
    ),
)
