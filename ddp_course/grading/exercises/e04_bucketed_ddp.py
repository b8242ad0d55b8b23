"""04 · bucketed_ddp(model, bucket_bytes) → finish: a DDP with hooks and buckets, by hand."""

import datetime

import torch
from torch import nn

from ..compare import off, tell
from ..exercise import Case, Exercise, calls, generator, same_calls
from . import buckets
from .buckets import AGAIN  # for `run`, which must not name the module of the judge

CAP = 400  # bytes
LATE = 5  # seconds that a late rank gives the others to end their backward: they need milliseconds
SOON = 0.5  # seconds after which a finish() that has not returned is taken to wait


# ---- the models


class _Net(nn.Module):
    """Three layers in a row; "mixed": frozen, tied, two types, buffers; "branches": side by side.

    Weights and buffers are each rank's own.
    """

    def __init__(self, kind: str, seed: int, rank: int):
        super().__init__()
        self.kind, mixed = kind, kind == "mixed"
        self.first = nn.Linear(4, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False) if mixed else nn.Identity()
        self.inner = nn.Linear(6, 6)
        if mixed:
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.inner.weight
            self.register_buffer("scale", torch.ones(6))
            self.register_buffer("count", torch.tensor(1 + rank))
        if kind == "branches":
            self.branches = nn.ModuleList(nn.Linear(6, 8, bias=False) for _ in range(3))
        self.last = nn.Linear(8 if kind == "branches" else 6, 3)
        self.double()
        if mixed:
            self.last.float()
        draw = generator(seed, rank)
        for tensor in [*self.parameters(), *self.buffers()]:
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
                tensor.data.copy_(drawn / 2)

    def forward(self, x, rank: int):
        x = torch.tanh(self.inner(torch.tanh(self.frozen(self.first(x)))))
        if self.kind == "mixed":
            x = (self.scale * torch.tanh(self.tied(x))).float()
        if self.kind == "branches":  # what is used last gets its gradient first
            x = sum(torch.tanh(self.branches[(k + rank) % 3](x)) for k in range(3))
        return self.last(x)


def _loss(model, seed, rank, step):
    x = torch.randn(3 + rank, 4, generator=generator(seed, rank, step), dtype=torch.float64)
    return model(x, rank).double().square().sum()


def _gradients(model) -> dict:
    there = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)
    return {name: "none" if grad is None else grad.clone() for name, grad in there}


# ---- on the ranks


def _run(kind: str, caps, steps: int = 1, late: bool = False):
    def run(fn, rank, world_size, seed):
        return {"tries": [_try(fn, kind, cap, steps, late, rank, seed) for cap in caps]}

    return run


def _try(fn, kind, cap, steps, late, rank, seed) -> dict:
    model = _Net(kind, seed, rank)
    finish = fn(model, cap)
    begun = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if not callable(finish):
        return {"returned": repr(finish)[:200]}
    done = []
    for step in range(steps):
        try:
            done.append(_step(model, finish, late, rank, seed, step))
        except Exception as error:
            if step:
                error.add_note(f"This is backward {step + 1}. {AGAIN}")
            raise
    moved = [n for n, tensor in model.state_dict().items() if not tensor.equal(begun[n])]
    return {"begun": begun, "steps": done, "moved": moved}


def _step(model, finish, late, rank, seed, step) -> dict:
    """Take a step; with `late`, rank 0 goes ahead, and the others look how far it gets alone."""
    told, reached, called = {}, [], len(calls())

    def watch(layer, inputs, output):  # its gradient comes before those of the layer's weights
        output.register_hook(lambda gradient: reached.append(len(calls()) - called))

    watching = model.first.register_forward_hook(watch)
    loss = _loss(model, seed, rank, step)
    watching.remove()
    if late and rank:
        told["held"] = not _heard("backward", LATE)
        told["early"] = not told["held"] and _heard("finish", SOON)
    loss.backward()
    in_backward = calls()[called:]
    if late and not rank:
        _store().set("backward", "has ended")
    finish()
    gradients = _gradients(model)
    if late and not rank:
        _store().set("finish", "has ended")
    collectives = calls()[called:]
    model.zero_grad(set_to_none=step % 2 == 0)
    told |= {"gradients": gradients, "reached": reached[0], "collectives": collectives}
    return told | {"in_backward": len(in_backward)}


def _store():
    return torch.distributed.distributed_c10d._get_default_store()


def _heard(word: str, seconds: float) -> bool:
    try:
        _store().wait([word], datetime.timedelta(seconds=seconds))
        return True
    except RuntimeError:  # not within this time
        return False


# ---- verdicts


def _judge(kind: str, caps):
    def judge(outputs, world_size, seed):
        for number, cap in enumerate(caps):
            wrong = _judge_try([o["tries"][number] for o in outputs], kind, cap, seed)
            if wrong:
                return f"bucket_bytes={cap}: {wrong}" if len(caps) > 1 else wrong
        return None

    return judge


def _judge_try(tries, kind, cap, seed) -> str | None:
    for told in tries:
        if "returned" in told:
            return f"it should return a function, to call after backward, not {told['returned']}."
    world_size = len(tries)
    own = [_Net(kind, seed, rank) for rank in range(world_size)]
    for rank, told in reversed(list(enumerate(tries))):
        if wrong := buckets.begun(
            told["begun"], rank, [model.state_dict() for model in own], own[0]
        ):
            return wrong
        if told["moved"]:
            return f"rank {rank}: a step moves {told['moved'][0]}: that is the optimizer's job."
    before = None
    for step in range(len(tries[0]["steps"])):
        outputs = [told["steps"][step] for told in tries]
        local = [_local(kind, seed, rank, step) for rank in range(world_size)]
        wrong = (
            _alone(outputs)
            or _wrong(outputs, local, before, own[0], cap)
            or same_calls(outputs)
            or buckets.messages(outputs[0], own[0], cap)
        )
        if wrong:
            return f"backward {step + 1}: {wrong}\n{AGAIN}" if step else wrong
        before = local
    return None


def _local(kind, seed, rank, step) -> dict:
    """Return the gradients of this rank's data at rank 0's weights."""
    model = _Net(kind, seed, 0)
    _loss(model, seed, rank, step).backward()
    return _gradients(model)


def _alone(outputs) -> str | None:
    """Say what rank 0 did while another rank had not begun its backward."""
    if not any(output["collectives"] for output in outputs) and len(outputs) > 1:
        return "no rank called a collective, in backward or in finish()."
    if any(output.get("held") for output in outputs):
        return (
            "rank 0 could not end its backward before rank 1 began its own: the hook waits for the "
            "other ranks. Start with async_op=True, and wait in finish()."
        )
    if any(output.get("early") for output in outputs):
        return (
            "on rank 0 finish() returned before rank 1 had begun its backward: it does not wait "
            "for what was started."
        )
    return None


def _wrong(outputs, local, before, model, cap) -> str | None:
    for rank, output in reversed(list(enumerate(outputs))):
        for name, mine in output["gradients"].items():
            own = [gradients[name] for gradients in local]
            mean = sum(own) / len(own)
            rtol = 1e-9 if mean.dtype == torch.float64 else 1e-5
            if isinstance(mine, str):
                return f"rank {rank}: {name} has no gradient after finish()."
            told = tell(f"the gradient of {name}", rank, mine, mean, rtol / 10)
            if mine.shape != mean.shape:
                return told
            if off(mine, mean, rtol, rtol / 10) is None:
                continue
            stale = [gradients[name] for gradients in before or ()]
            why = buckets.value(mine, mean, own, stale, rank, rtol)
            why = why or buckets.still_own(output["gradients"], local[rank], name, model, cap)
            return f"{told}\n{why or buckets.mixed_up(mine, local, model)}".rstrip()
    return None


_STUCK = (
    "Likely: the ranks send different buckets, or in different orders, or not equally many. What "
    "is sent, and in which order, must not depend on a rank's own gradients."
)
_HOOK = (
    "A frozen parameter gets no gradient and takes no hook. Leave it out of the buckets, but not "
    "out of the broadcast."
)
_ERRORS = {"cannot register a hook|(is not|doesn't) require.? grad": _HOOK}
_CAPS = (1, 216, 10**6)  # each its own, exactly three parameters, all in one


def _case(name, points, worlds, kind="plain", caps=(CAP,), **how) -> Case:
    run, judge = _run(kind, caps, **how), _judge(kind, caps)
    return Case(name, points, run, judge, worlds, _STUCK, _ERRORS)


EXERCISE = Exercise(
    "04_bucketed_ddp",
    "bucketed_ddp",
    ("model", "bucket_bytes"),
    (
        _case("two ranks, one of them late", 4, (2,), late=True),
        _case("step after step", 2, (1, 3), steps=3),
        _case("buckets of all sizes", 2, (2,), caps=_CAPS),
        _case("tied, frozen, and of two types", 3, (2, 3), "mixed", steps=2),
        _case("another order on each rank", 3, (2, 3), "branches"),
    ),
)
