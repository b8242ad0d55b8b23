"""03 · ddp_step(parallel, x, y): a step of DataParallel, on ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from ..compare import is_times, off, tell, wrong_kind
from ..exercise import Case, Exercise, generator


class _Net(nn.Module):
    """Counts its forward passes, and notes which samples it sees: x[:, 0] is a sample's number."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen += x[:, 0].tolist()
        return self.layers(x)


def _batch(seed: int, samples: int):
    draw = generator(seed, samples)
    x = torch.randn(samples, 5, generator=draw, dtype=torch.float64)
    x[:, 0] = torch.arange(samples)
    return x, torch.randint(3, (samples,), generator=draw)


def _run(sizes):
    def run(fn, rank, world_size, seed):
        model = _Net(seed)
        with torch.no_grad():
            for p in model.parameters():
                p += rank  # DDP begins with rank 0's
        parallel = nn.parallel.DistributedDataParallel(model)
        return {"steps": [_step(fn, parallel, model, *_batch(seed, size)) for size in sizes]}

    return run


def _step(fn, parallel, model, x, y) -> dict:
    model.calls, model.seen = 0, []
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    loss = fn(parallel, x.clone(), y.clone())
    return {
        "calls": model.calls,
        "seen": model.seen,
        "gradients": _gradients(model),
        "moved": any(not a.equal(b) for a, b in zip(model.parameters(), before, strict=True)),
        "graph": isinstance(loss, torch.Tensor) and loss.requires_grad,
        "loss": loss.detach() if isinstance(loss, torch.Tensor) else loss,
    }


def _gradients(model) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }


def _judge(sizes):
    def judge(outputs, world_size, seed):
        for number, size in enumerate(sizes):
            wrong = _judge_step([o["steps"][number] for o in outputs], seed, size)
            if wrong:
                return f"{size} samples: {wrong}"
        return None

    return judge


def _judge_step(outputs, seed, size) -> str | None:
    for rank, output in enumerate(outputs):
        if output["moved"]:
            return f"rank {rank}: it changes the weights: stepping is the optimizer's job."
    if wrong := _scattered([o["seen"] for o in outputs], [o["calls"] for o in outputs], size):
        return wrong
    loss, gradients = _whole(seed, size)
    own = [_whole(seed, size, [int(n) for n in output["seen"]]) for output in outputs]
    for rank, output in enumerate(outputs):
        for name, wanted in gradients.items():
            if off(output["gradients"][name], wanted) is not None:
                told = tell(f"the gradient of {name}", rank, output["gradients"][name], wanted)
                mine = output["gradients"], gradients
                return f"{told}\n{_gradient(*mine, [g for _, g in own], rank, size)}".rstrip()
    for rank, output in enumerate(outputs):
        if wrong := _loss(output, loss, [value for value, _ in own], rank):
            return wrong
    return None


def _whole(seed, size, samples=slice(None)):
    """Return the mean loss over the batch, or over some of its samples, and its gradients."""
    model, (x, y) = _Net(seed), _batch(seed, size)
    loss = F.cross_entropy(model(x[samples]), y[samples])
    loss.backward()
    return loss.detach(), _gradients(model)


def _scattered(seen, calls, size) -> str | None:
    """Say what is wrong with who saw which samples."""
    world_size = len(seen)
    for rank, count in enumerate(calls):
        if not count:
            return (
                f"rank {rank}: the model's counter says 0 forwards. Was it a copy that ran? What a "
                "copy notes is lost, as with DataParallel's replicas."
            )
        if count > 1:
            return f"rank {rank}: the model ran {count} times: once, for its own part, is enough."
    most = -(-size // world_size)
    for rank, samples in enumerate(seen):
        if world_size > 1 and len(samples) == size:
            return (
                f"rank {rank} saw all {size} samples. Nobody scatters for DDP: each rank takes its "
                "own part of the batch, or all do the same work."
            )
        if len(samples) > most:
            return f"rank {rank} saw {len(samples)} of {size} samples, where {most} would do."
    everything = sorted(int(n) for samples in seen for n in samples)
    if missing := sorted(set(range(size)) - set(everything)):
        return f"samples {missing} were seen by no rank: they were dropped."
    if len(everything) > size:
        twice = sorted({n for n in everything if everything.count(n) > 1})
        return f"samples {twice} were seen by more than one rank."
    if not all(seen) and size >= world_size:
        return f"a rank saw no sample, though there are {size} for {world_size} ranks."
    return None


def _gradient(mine, wanted, own, rank, size) -> str:
    world_size, wanted, mine = len(own), _flat(wanted), _flat(mine)
    own = [_flat(gradients) for gradients in own]
    if not mine.any():
        return "It is zero: was backward() called, and nothing cleared after it?"
    if world_size > 1 and is_times(mine, wanted, 1 / world_size):
        return (
            f"It is {world_size}× too small. DDP divides the sum over the ranks by their number: "
            "if each loss is its part of the batch's mean, these are to be added up, not averaged."
        )
    if is_times(mine, wanted, size):
        return f"It is {size}× too large: the loss is the sum over the samples, not their mean."
    if is_times(mine, wanted, world_size):
        return f"It is {world_size}× too large: DDP has averaged already, nothing is to be summed."
    if off(mine, sum(own) / world_size) is None:
        return (
            "It is the mean of the ranks' means, in which a sample of a small part counts more. "
            "DataParallel takes one mean, over all gathered outputs: weigh each rank's loss by its "
            "samples."
        )
    if world_size > 1 and any(is_times(mine, own[rank], c) for c in (1, *_weights(own, size))):
        return (
            "It is that of this rank's own part: it was not averaged. Did the forward go through "
            "`parallel`, or around it, through .module?"
        )
    return "Do samples and labels of a rank belong together?"


def _weights(own, size):
    """What a rank's own mean may have been multiplied by."""
    return [n * len(own) / size for n in range(1, size)] + [n / size for n in range(1, size)]


def _loss(output, loss, own, rank) -> str | None:
    if output["graph"]:
        return "the returned loss still carries its graph: return loss.detach() or a number."
    if wrong_kind(output["loss"], loss):
        return f"it should return the batch's mean loss, not {output['loss']!r}."
    if off(output["loss"], loss) is None:
        return None
    told = tell("the returned loss", rank, output["loss"], loss)
    if off(output["loss"], own[rank]) is None:
        return f"{told}\nIt is that of this rank's part: the batch's is asked for, on every rank."
    if off(output["loss"], sum(own) / len(own)) is None:
        return f"{told}\nIt is the mean of the ranks' means: parts of any size count alike in it."
    if is_times(output["loss"], loss, len(own)) or is_times(output["loss"], loss, 1 / len(own)):
        return f"{told}\nIt is wrong by the number of ranks: what does all_reduce do to it?"
    return f"{told}\nThe gradients are right: only the number for the log is not the batch's mean."


def _flat(gradients: dict) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


_STUCK = (
    "Likely: not every rank runs forward and backward. DDP averages in backward, and waits for "
    "all; an all_reduce, too, is for every rank."
)
_ERRORS = {
    "index out of range": "Does each rank get a part? x.chunk(3) of 4 samples gives 2 parts; "
    "tensor_split always gives 3."
}


def _case(name, points, sizes, worlds, errors=()) -> Case:
    return Case(name, points, _run(sizes), _judge(sizes), worlds, _STUCK, dict(errors))


EXERCISE = Exercise(
    "03_dp_vs_ddp",
    "ddp_step",
    ("parallel", "x", "y"),
    (
        _case("a batch that divides", 3, (12, 6), (2, 3)),
        _case("a batch that does not", 3, (11, 7), (2, 3)),
        _case("four samples on three ranks", 1, (4,), (3,), _ERRORS),
        _case("alone", 1, (5,), (1,)),
    ),
)
