"""Bytes of a ledger as they are right, and as they are often thought to be."""

from torch import nn

from ..compare import factor, off

PARTS = ("weights", "gradients", "optimizer state")
NUMBER = {"fp32": 4, "amp": 4, "bf16": 2}  # bytes of a weight, and of a gradient
COPY = {"fp32": 0, "amp": 0, "bf16": 4}  # of the copy that the optimizer keeps
STATES = {"sgd": 0, "momentum": 4, "adamw": 8}  # of what it remembers
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}  # how many parts are shared, from the last
ALLOWED = 1  # byte: it may be rounded
RELATIVE = 1e-6  # it may be counted in float32


class Counts:
    """Numbers of parameters: all, trained, and in two ways miscounted."""

    def __init__(self, model):
        parameters = list(model.parameters())
        names = model.named_parameters(remove_duplicate=False)
        state = {} if isinstance(model, nn.ParameterList) else model.state_dict()
        self.all = sum(p.numel() for p in parameters)
        self.trained = sum(p.numel() for p in parameters if p.requires_grad)
        self.by_name = sum(p.numel() for _, p in names)
        self.in_state = sum(tensor.numel() for tensor in state.values())


def name(setting: tuple) -> str:
    optimizer, precision, strategy, world_size = setting
    return f"{optimizer}, {precision}, {strategy}, world_size {world_size}"


def right(part: int, setting: tuple, counts: Counts) -> float:
    """Return the bytes of a part on one rank; a setting is (optimizer, precision, strategy, N)."""
    each = (_number, _number, lambda o, b: COPY[b] + STATES[o])[part]
    return _bytes(part, each, "trained" if part else "all", setting, counts)


def _bytes(part, each, count, setting, counts) -> float:
    optimizer, precision, strategy, world_size = setting
    shared = part >= 3 - STAGES[strategy]
    size = each(optimizer, precision) * getattr(counts, count)
    return size / world_size if shared else size


def _number(optimizer, precision):
    return NUMBER[precision]


# By part: bytes for each number by (optimizer, precision), which numbers, what to say to it.
THOUGHTS = (
    [
        (
            lambda o, b: 4 if b == "fp32" else 2,
            "all",
            "autocast (amp) keeps the weights in 32 bits: only the work is done in 16.",
        ),
        (
            lambda o, b: NUMBER[b] + COPY[b],
            "all",
            "The optimizer's 32-bit copy is in it: it belongs to the optimizer state.",
        ),
        (lambda o, b: 2, "all", "A weight of 32 bits is 4 bytes: 2 bytes are 16 bits."),
        (
            lambda o, b: 4,
            "all",
            "With bf16 the weights are 16 bits; their 32-bit copy belongs to the optimizer state.",
        ),
        (
            _number,
            "trained",
            "The frozen weights are missing: they are not trained, but forward needs them.",
        ),
        (
            _number,
            "by_name",
            "A tied weight is in it twice: it has two names, but is one tensor.",
        ),
        (
            _number,
            "in_state",
            "state_dict() has a tied weight under both of its names, and the buffers: go through "
            "model.parameters().",
        ),
    ],
    [
        (
            lambda o, b: 0,
            "trained",
            "Training keeps a gradient for each trained weight: the weights alone are what "
            "*inference* takes.",
        ),
        (
            lambda o, b: 4 if b == "fp32" else 2,
            "trained",
            "autocast (amp) leaves the gradients in 32 bits, like the weights they belong to.",
        ),
        (lambda o, b: 2, "trained", "A gradient of 32 bits is 4 bytes: 2 bytes are 16 bits."),
        (lambda o, b: 4, "trained", "With bf16 the gradients are 16 bits, like the weights."),
        (_number, "all", "A frozen parameter gets no gradient."),
    ],
    [
        (
            lambda o, b: STATES[o],
            "trained",
            "With bf16 the optimizer also keeps the weights in 32 bits: steps are too small for "
            "16.",
        ),
        (
            lambda o, b: COPY[b] + STATES[o] * NUMBER[b] / 4,
            "trained",
            "What the optimizer remembers stays in 32 bits, also when weights and gradients are "
            "16.",
        ),
        (
            lambda o, b: STATES[o] * NUMBER[b] / 4,
            "trained",
            "It is all in 16 bits: what the optimizer remembers is 32, and it keeps a 32-bit copy "
            "of the weights as well.",
        ),
        (
            lambda o, b: COPY[b] + min(STATES[o], 4),
            "trained",
            "AdamW remembers two numbers for each weight: a running mean of the gradient and one "
            "of its square.",
        ),
        (
            lambda o, b: COPY[b] + 2 * min(STATES[o], 4),
            "trained",
            "SGD with momentum remembers one number for each weight: two are AdamW's.",
        ),
        (
            lambda o, b: COPY[b] + max(STATES[o], 4),
            "trained",
            "Plain SGD remembers nothing.",
        ),
        (
            lambda o, b: STATES[o] + (0 if b == "fp32" else 4),
            "trained",
            "With amp the weights themselves are 32 bits: there is no copy.",
        ),
        (
            lambda o, b: STATES[o] + 4,
            "trained",
            "It counts a copy of the weights where they are 32 bits already: that is one too many.",
        ),
        (
            lambda o, b: COPY[b] + STATES[o],
            "all",
            "The optimizer steps no frozen parameter, and remembers nothing for it.",
        ),
        (
            lambda o, b: 0,
            "trained",
            "The optimizer keeps numbers of its own: AdamW two for each trained weight.",
        ),
    ],
)


def thought(part: int, ledgers: list, settings: list, counts: Counts) -> str:
    """Return what explains a part of all these ledgers, if there is such a thing."""
    for each, count, text in THOUGHTS[part]:
        guesses = [_bytes(part, each, count, setting, counts) for setting in settings]
        pairs = zip(ledgers, guesses, strict=True)
        if all(off(mine[part], guess, RELATIVE, ALLOWED) is None for mine, guess in pairs):
            return text
    return ""


def in_all_parts(mine: list, wanted: list, setting: tuple) -> str:
    """Say what is wrong with all three numbers alike."""
    times, (_, _, strategy, world_size) = factor(mine, wanted), setting
    if times is None:
        return ""
    if world_size > 1 and abs(times - world_size) < 1e-6:
        return f"It is what all {world_size} ranks hold: the ledger of *one* rank is asked for."
    if world_size > 1 and abs(times * world_size - 1) < 1e-6 and strategy == "ddp":
        return (
            f"All is divided by the {world_size} ranks. DDP shares out the samples; model, "
            "gradients and optimizer are on every rank, whole."
        )
    if abs(times - 8) < 1e-6:
        return "It is 8× too much in all parts: are these bits? A byte has 8 of them."
    for power, unit in ((1e9, "GB"), (2**30, "GiB"), (1e6, "MB"), (2**20, "MiB")):
        if abs(times * power - 1) < 1e-6:
            return f"These are {unit}: bytes are asked for."
    return f"All three are {times:.4g}× what is right."


def sharing(part: int, mine: float, wanted: float, setting: tuple) -> str:
    """Say whether a part is shared out that is not to be, or the other way round."""
    _, _, strategy, world_size = setting
    shared = " and ".join(PARTS[3 - STAGES[strategy] :]) if strategy != "zero3" else "all three"
    if world_size > 1 and off(mine, wanted * world_size, 1e-9) is None:
        return (
            f"It is not shared out: {strategy} shares out {shared}, so that each of the "
            f"{world_size} ranks holds a part of it."
        )
    if world_size > 1 and off(mine, wanted / world_size, 1e-9) is None:
        only = "DDP copies" if strategy == "ddp" else f"{strategy} shares out the {shared} only"
        return f"It is divided by the {world_size} ranks: {only}, and this is on every rank, whole."
    return ""
