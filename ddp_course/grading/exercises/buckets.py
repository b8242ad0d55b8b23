"""Buckets as the brief has them, and what weights, messages and gradients tell of other answers."""

import math
import re

from ..compare import is_times, off

SENT = re.compile(r"all_?reduce\w*\((\w+)\[([\d, ]*)\]\)")  # type and shape


AGAIN = (
    "It did not happen in the backward before: empty what you keep of a backward (which gradients "
    "are there, what is under way) in finish()."
)


def greedy(model, cap, reverse=True, fits=lambda size, room, cap: size <= room, types=True):
    """Return buckets as the brief fills them; the options make those that are often made."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    buckets, room = [], 0
    for p in reversed(parameters) if reverse else parameters:
        other = types and buckets and buckets[-1][-1].dtype != p.dtype
        if not buckets or other or not fits(p.nbytes, room, cap):
            buckets, room = [*buckets, []], cap
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


def _sizes(buckets) -> list[int]:
    return [sum(p.numel() for p in bucket) for bucket in buckets]


def messages(output, model, cap) -> str | None:
    """Compare what was sent, and when, with the buckets of the brief."""
    found = [SENT.fullmatch(called) for called in output["collectives"]]
    if None in found:
        other = output["collectives"][found.index(None)]
        return f"it calls {other} in a step, where one all_reduce for each bucket is asked for."
    sent = [math.prod(map(int, filter(None, match[2].split(", ")))) for match in found]
    buckets = greedy(model, cap)
    wanted = _sizes(buckets)
    told = f"all-reduces of {sent} numbers, where buckets of {wanted} are asked for.\n"
    if sent != wanted:
        return told + _filled(sent, wanted, model, cap)
    kinds = [str(bucket[0].dtype).removeprefix("torch.") for bucket in buckets]
    if kinds != [match[1] for match in found]:
        return f"messages are of {[match[1] for match in found]}, their gradients of {kinds}."
    late = len(sent) - output["in_backward"]
    if late == len(sent):
        return "all buckets are sent in finish(), when backward has ended: nothing overlaps."
    if late:
        return (
            f"{late} of {len(sent)} buckets go in finish() only: a bucket is to go in backward, as "
            "soon as its last gradient is there."
        )
    first = set(model.first.parameters())
    ready = sum(not first & set(bucket) for bucket in buckets)
    if output["reached"] < ready and model.kind != "branches":
        return (
            f"when backward came to the first layer, {ready} of the buckets were full, and "
            f"{output['reached']} had been sent: they wait for the end of backward, and nothing "
            "overlaps."
        )
    return None


def _filled(sent, wanted, model, cap) -> str:
    """Say how buckets of these sizes come about."""
    total, each = sum(wanted), [p.numel() for p in model.parameters() if p.requires_grad]
    if sorted(sent) == sorted(each):
        return "That is one for each parameter: put small ones together, up to bucket_bytes."
    if sum(sent) < total:
        return f"They carry {sum(sent)} of {total} numbers: something was not sent."
    if sum(sent) > total:
        return (
            f"They carry {sum(sent)} numbers, and the gradients are {total}: send what a bucket "
            "holds, once, and no room that is left in it."
        )
    if sent == [total]:
        return (
            f"All gradients go in one message, of more than bucket_bytes ({cap}). Are its bytes "
            "counted (p.nbytes), not its elements?"
        )
    if sent == _sizes(greedy(model, cap, reverse=False)) or sent == wanted[::-1]:
        return (
            "They are filled in the order of registration, so that the first one waits for the "
            "gradient that comes last: go through the parameters in reverse."
        )
    if sent == _sizes(greedy(model, cap, fits=lambda size, room, cap: size < room)):
        return "A bucket may hold bucket_bytes exactly: at most, not less than."
    if sent == _sizes(greedy(model, cap, fits=lambda size, room, cap: room > 0)):
        return (
            f"Some are of more than bucket_bytes ({cap}): look whether a parameter fits *before* "
            "it is put in."
        )
    if sent == _sizes(greedy(model, cap, types=False)):
        return "Gradients of two types are in one message: another type begins a new bucket."
    return "Take the parameters in reverse, and begin a new bucket when the next one does not fit."


def begun(there, rank, states, model) -> str | None:
    """Say what is not rank 0's before the first forward."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    wrong = [name for name, tensor in states[0].items() if not there[name].equal(tensor)]
    if not wrong:
        return None
    name, mine = wrong[0], there[wrong[0]]
    what = f"rank {rank}: {name} is not rank 0's when training begins."
    if not mine.equal(states[rank][name]):
        if off(mine, sum(state[name] for state in states) / len(states), 1e-5) is None:
            return f"{what} It is the mean over the ranks: copy rank 0's, with a broadcast."
        return what
    if name not in parameters:
        return f"{what} It is a buffer, and this rank's own still: buffers are broadcast as well."
    if not parameters[name].requires_grad:
        return f"{what} It is frozen, and this rank's own still: what never moves must begin equal."
    return f"{what} It is this rank's own still: broadcast the weights before you train."


def value(mine, mean, own, stale, rank, rtol) -> str:
    """Say what a gradient looks like, from its numbers alone."""
    world_size = len(own)

    def same(value):
        return off(mine, value, rtol, rtol / 10) is None

    if world_size > 1 and is_times(mine, mean, world_size, rtol):
        return f"It is the sum, {world_size}× the mean: it was not divided by the world size."
    if world_size > 1 and is_times(mine, mean, 1 / world_size, rtol):
        return f"It is {world_size}× too small: it was divided by the world size twice."
    if world_size > 1 and same(own[rank] / world_size):
        return "It is this rank's own gradient, divided: it was never added up over the ranks."
    if rank and same(own[0]):
        return "It is rank 0's: a broadcast copies one rank's gradient, it does not average."
    if stale and same(sum(stale) / world_size):
        return "It is the average of the backward before."
    if stale and same(mean + sum(stale) / world_size):
        return "The backward before is in it once more: the bucket was not emptied."
    return ""


def still_own(gradients, local, name, model, cap) -> str:
    """Say which parameters were left out, if this one is the rank's own still."""
    there = {n: mine for n, mine in gradients.items() if not isinstance(mine, str)}
    same = {n: mine for n, mine in there.items() if mine.shape == local[n].shape}
    own = [n for n, mine in same.items() if off(mine, local[n], 1e-6) is None]
    if name not in own:
        return ""
    if len(own) == len(gradients):
        return "So are all: the averages were not put into p.grad, or nothing was sent."
    names = {p: n for n, p in model.named_parameters()}
    if not all(p.requires_grad for p in names):
        return (
            "It is this rank's own still: its bucket was never sent. Does it wait for the gradient "
            "of a frozen parameter?"
        )
    if set(own) == {names[p] for p in greedy(model, cap)[-1]}:
        return (
            "It is this rank's own still, like all of the last bucket: was that never sent, as it "
            "is not *full*? It goes when all gradients that belong to it are there."
        )
    return "It is this rank's own still: its bucket was never sent."


def mixed_up(mine, local, model) -> str:
    """Recognise branches that were sent in the order in which each rank's gradients came."""
    if model.kind != "branches":
        return ""
    for k in (2, 1, 0):
        names = [f"branches.{(k + rank) % 3}.weight" for rank in range(len(local))]
        parts = [gradients[name] for gradients, name in zip(local, names, strict=True)]
        if mine.shape == parts[0].shape and off(mine, sum(parts) / len(parts)) is None:
            told = ", ".join(f"{name} of rank {rank}" for rank, name in enumerate(names))
            return (
                f"It is the mean of {told}: each rank sent its buckets in the order in which they "
                "filled. Send them in one order on all ranks: a full one waits for those before it."
            )
    return ""
