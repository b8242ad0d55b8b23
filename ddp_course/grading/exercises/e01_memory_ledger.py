"""01 · memory_ledger(model, optimizer, precision, strategy, world_size): bytes on each rank."""

import torch
import torch.nn.functional as F
from torch import nn

from ..compare import off
from ..exercise import Case, Exercise, generator
from .ledger import ALLOWED, PARTS, RELATIVE, Counts, in_all_parts, name, right, sharing, thought

# ---- the models


class _Net(nn.Module):
    """Sizes from the seed; unless `plain`, with a frozen layer, a tied weight and a buffer."""

    def __init__(self, seed: int, plain: bool):
        super().__init__()
        numbers, width, labels = torch.randint(5, 40, (3,), generator=generator(seed, 1)).tolist()
        self.first = nn.Embedding(numbers, width)
        self.frozen = nn.Linear(width, width).requires_grad_(plain)
        self.register_buffer("scale", torch.ones(1 if plain else width))
        self.inner = nn.Linear(width, width)
        self.last = nn.Linear(width, labels if plain else numbers, bias=False)
        if not plain:
            self.last.weight = self.first.weight

    def forward(self, numbers):
        x = self.scale * self.frozen(self.first(numbers))
        return self.last(torch.relu(self.inner(x)))


def _gpt3(seed: int) -> nn.Module:
    """Parameters in the number and sizes of GPT-3's (biases left out), without memory."""
    width, draw = 12288, generator(seed, 2)
    vocabulary = int(torch.randint(50_000, 51_000, (1,), generator=draw))
    sizes = [(12 * width, width)] * 96 + [(vocabulary, width)]
    return nn.ParameterList(torch.empty(size, device="meta") for size in sizes)


def _model(kind: str, seed: int) -> nn.Module:
    return _gpt3(seed) if kind == "gpt3" else _Net(seed, plain=kind in ("plain", "shared"))


# ---- on the ranks

REAL = [
    ("sgd", "fp32", "ddp", 2),
    ("momentum", "fp32", "ddp", 2),
    ("adamw", "bf16", "ddp", 2),
    ("adamw", "fp32", "zero1", 2),
    ("adamw", "fp32", "zero3", 2),
]


def _settings(kind: str, seed: int) -> list[tuple]:
    """Return the (optimizer, precision, strategy, world_size) to ask for, simple ones first."""
    if kind == "real":
        return REAL
    if kind == "shared":
        sizes = torch.randint(2, 65, (3,), generator=generator(seed, 3)).tolist()
        strategies = ("ddp", "zero1", "zero2", "zero3")
        return [("adamw", "bf16", name, size) for name in strategies for size in sizes]
    precisions = {"plain": ("fp32",), "gpt3": ("amp", "bf16"), "mixed": ("fp32", "amp", "bf16")}
    optimizers = ("sgd", "momentum", "adamw")
    return [(name, bits, "ddp", 1) for bits in precisions[kind] for name in optimizers]


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        asked = _settings(kind, seed)
        told = {"ledgers": [_plain(fn(_model(kind, seed), *setting)) for setting in asked]}
        if kind == "real":
            told["measured"] = [_measured(seed, *setting[:3]) for setting in asked]
        return told

    return run


def _plain(answer):
    """The student's three numbers, or text that says what it is instead."""
    numbers = list(answer) if isinstance(answer, tuple | list) else [answer]
    if len(numbers) != 3 or not all(isinstance(n, int | float | torch.Tensor) for n in numbers):
        return repr(answer)[:200]
    return [float(number) for number in numbers]


def _measured(seed: int, optimizer: str, precision: str, strategy: str) -> list[int]:
    """Take a step with PyTorch's own, and add up the bytes of the tensors on this rank."""
    torch.manual_seed(seed)
    model = _model("real", seed).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    parallel = _wrapped(model, strategy)
    trained = [p for p in model.parameters() if p.requires_grad]
    copies = [p.detach().float() for p in trained] if precision == "bf16" else []
    steps = _optimizer(optimizer, copies or trained, strategy)
    numbers = torch.randint(5, (8,))
    F.cross_entropy(parallel(numbers).float(), numbers).backward()
    for copy, p in zip(copies, trained, strict=False):
        copy.grad = p.grad.float()
    steps.step()
    states = getattr(steps, "optim", steps).state.values()
    kept = [v for state in states for v in state.values() if v is not None and v.dim() > 0]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [sum(map(_here, held)) for held in (model.parameters(), gradients, kept + copies)]


def _wrapped(model, strategy):
    if strategy != "zero3":
        return nn.parallel.DistributedDataParallel(model)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _optimizer(name, parameters, strategy):
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adamw": torch.optim.AdamW}
    more = {"momentum": 0.9} if name == "momentum" else {}
    if strategy != "zero1":
        return kinds[name](parameters, lr=0.1, **more)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, kinds[name], lr=0.1, **more)


def _here(tensor) -> int:
    """Bytes on this rank: of a sharded tensor, its part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes


# ---- verdicts


def _judge(kind: str):
    def judge(outputs, world_size, seed):
        counts, settings = Counts(_model(kind, seed)), _settings(kind, seed)
        for output in outputs:
            if wrong := _wrong(output["ledgers"], settings, counts):
                return wrong
        return _allocated(outputs, settings, counts) if kind == "real" else None

    return judge


def _wrong(ledgers, settings, counts) -> str | None:
    for mine, setting in zip(ledgers, settings, strict=True):
        if not isinstance(mine, list):
            return (
                f"{name(setting)}: it should return three numbers, (weights, gradients, optimizer "
                f"state), not {mine}."
            )
    for mine, setting in zip(ledgers, settings, strict=True):
        wanted = [right(part, setting, counts) for part in range(3)]
        for part in range(3):
            if off(mine[part], wanted[part], RELATIVE, ALLOWED) is not None:
                told = (
                    f"{name(setting)}: {mine[part]:,.12g} bytes of {PARTS[part]} on a rank, where "
                    f"{wanted[part]:,.12g} are right ({ALLOWED} byte or a millionth is allowed)."
                )
                why = (
                    in_all_parts(mine, wanted, setting)
                    or thought(part, ledgers, settings, counts)
                    or sharing(part, mine[part], wanted[part], setting)
                    or thought(part, [mine], [setting], counts)
                )
                return f"{told}\n{why}".rstrip()
    return None


def _allocated(outputs, settings, counts) -> str | None:
    """Compare what is right with what the ranks allocated: then the ledgers equal that as well."""
    for setting, *measured in zip(settings, *(o["measured"] for o in outputs), strict=True):
        for part, held in enumerate(zip(*measured, strict=True)):
            mean, wanted = sum(held) / len(held), right(part, setting, counts)
            if abs(mean - wanted) > ALLOWED:
                told = f"the ranks held {mean:,} bytes of {PARTS[part]}, not {wanted:,}"
                return f"{name(setting)}: {told}."
    return None


EXERCISE = Exercise(
    "01_memory_ledger",
    "memory_ledger",
    ("model", "optimizer", "precision", "strategy", "world_size"),
    (
        Case("one process, 32 bits", 2, _run("plain"), _judge("plain"), (1,)),
        Case("GPT-3 in mixed precision", 3, _run("gpt3"), _judge("gpt3"), (1,)),
        Case("frozen and tied", 2, _run("mixed"), _judge("mixed"), (1,)),
        Case("shared out", 3, _run("shared"), _judge("shared"), (1,)),
        Case("what real ranks allocate", 2, _run("real"), _judge("real"), (2,)),
    ),
)
