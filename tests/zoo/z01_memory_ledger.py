"""Wrong and right answers to 01_memory_ledger: what each is told."""

import itertools

import torch

from ddp_course import memory

from . import answers

WRONG, RIGHT, wrong, right = answers()

STATES = {"sgd": 0, "momentum": 4, "adamw": 8}
STAGES = ["ddp", "zero1", "zero2", "zero3"]


def counts(model):
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def held(every, trained, precision, states, copy=None):
    each = 2 if precision == "bf16" else 4
    copy = 4 if copy is None else copy
    return [each * every, each * trained, ((precision == "bf16") * copy + states) * trained]


def shared(parts, strategy, world_size):
    stage = STAGES.index(strategy)
    return tuple(n / (world_size if 3 - k <= stage else 1) for k, n in enumerate(parts))


def solved(model, optimizer, precision, strategy, world_size):
    parts = held(*counts(model), precision, STATES[optimizer])
    return shared(parts, strategy, world_size)


@wrong("are these bits?")
def bits(*setting):
    return tuple(8 * n for n in solved(*setting))


@wrong("These are GB: bytes are asked for")
def gigabytes(*setting):
    return tuple(n / 1e9 for n in solved(*setting))


@wrong("These are GiB")
def gibibytes(*setting):
    return tuple(n / 2**30 for n in solved(*setting))


@wrong("it should return three numbers")
def one_number(*setting):
    return sum(solved(*setting))


@wrong("the weights alone are what *inference* takes")
def weights_alone(*setting):
    return solved(*setting)[0], 0, 0


@wrong("The optimizer keeps numbers of its own")
def no_optimizer(*setting):
    return *solved(*setting)[:2], 0


@wrong("AdamW remembers two numbers")
def one_moment(model, optimizer, precision, strategy, world_size):
    states = {"sgd": 0, "momentum": 4, "adamw": 4}[optimizer]
    return shared(held(*counts(model), precision, states), strategy, world_size)


@wrong("SGD with momentum remembers one number")
def two_for_momentum(model, optimizer, precision, strategy, world_size):
    states = {"sgd": 0, "momentum": 8, "adamw": 8}[optimizer]
    return shared(held(*counts(model), precision, states), strategy, world_size)


@wrong("Plain SGD remembers nothing")
def sgd_remembers(model, optimizer, precision, strategy, world_size):
    states = {"sgd": 4, "momentum": 4, "adamw": 8}[optimizer]
    return shared(held(*counts(model), precision, states), strategy, world_size)


@wrong("autocast (amp) keeps the weights in 32 bits")
def amp_is_16_bits(model, optimizer, precision, strategy, world_size):
    precision = "fp32" if precision == "fp32" else "bf16"
    return solved(model, optimizer, precision, strategy, world_size)


@wrong("autocast (amp) leaves the gradients in 32 bits")
def amp_gradients_of_16_bits(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    return weights, gradients / (2 if precision == "amp" else 1), states


@wrong("With amp the weights themselves are 32 bits: there is no copy")
def amp_keeps_a_copy(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    return weights, gradients, states + 4 * counts(model)[1] * (precision == "amp")


@wrong("It counts a copy of the weights where they are 32 bits already")
def a_copy_always(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    return weights, gradients, states + 4 * counts(model)[1] * (precision != "bf16")


@wrong("the optimizer also keeps the weights in 32 bits")
def no_copy(model, optimizer, precision, strategy, world_size):
    parts = held(*counts(model), precision, STATES[optimizer], copy=0)
    return shared(parts, strategy, world_size)


@wrong("What the optimizer remembers stays in 32 bits")
def states_of_16_bits(model, optimizer, precision, strategy, world_size):
    states = STATES[optimizer] // (2 if precision == "bf16" else 1)
    return shared(held(*counts(model), precision, states), strategy, world_size)


@wrong("It is all in 16 bits")
def all_in_16_bits(model, optimizer, precision, strategy, world_size):
    states = STATES[optimizer] // (2 if precision == "bf16" else 1)
    return shared(held(*counts(model), precision, states, copy=0), strategy, world_size)


@wrong("The optimizer's 32-bit copy is in it")
def copy_among_the_weights(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    copy = 4 * counts(model)[1] * (precision == "bf16")
    return weights + copy, gradients, states - copy


@wrong("A weight of 32 bits is 4 bytes")
def always_2_2_12(model, optimizer, precision, strategy, world_size):
    every, trained = counts(model)
    return shared([2 * every, 2 * trained, 12 * trained], strategy, world_size)


@wrong("With bf16 the weights are 16 bits")
def weights_of_32_bits(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    return weights * (2 if precision == "bf16" else 1), gradients, states


@wrong("With bf16 the gradients are 16 bits")
def gradients_of_32_bits(model, optimizer, precision, strategy, world_size):
    weights, gradients, states = solved(model, optimizer, precision, strategy, world_size)
    return weights, gradients * (2 if precision == "bf16" else 1), states


@wrong("A frozen parameter gets no gradient")
def all_get_gradients(model, optimizer, precision, strategy, world_size):
    every, _ = counts(model)
    parts = held(every, every, precision, STATES[optimizer])
    return shared(parts, strategy, world_size)


@wrong("The optimizer steps no frozen parameter")
def states_for_the_frozen(model, optimizer, precision, strategy, world_size):
    every, trained = counts(model)
    parts = held(every, every, precision, STATES[optimizer])
    parts[1] *= trained / every
    return shared(parts, strategy, world_size)


@wrong("The frozen weights are missing")
def no_frozen_weights(model, optimizer, precision, strategy, world_size):
    _, trained = counts(model)
    parts = held(trained, trained, precision, STATES[optimizer])
    return shared(parts, strategy, world_size)


@wrong("A tied weight is in it twice")
def tied_twice(model, optimizer, precision, strategy, world_size):
    every = sum(p.numel() for part in model.modules() for p in part.parameters(recurse=False))
    parts = held(every or counts(model)[0], counts(model)[1], precision, STATES[optimizer])
    return shared(parts, strategy, world_size)


@wrong("state_dict() has a tied weight under both of its names")
def from_the_state_dict(model, optimizer, precision, strategy, world_size):
    every = sum(t.numel() for t in model.state_dict().values())
    parts = held(every, counts(model)[1], precision, STATES[optimizer])
    return shared(parts, strategy, world_size)


@wrong("DDP shares out the samples; model, gradients and optimizer are on every rank")
def always_divides(model, optimizer, precision, strategy, world_size):
    return tuple(n / world_size for n in held(*counts(model), precision, STATES[optimizer]))


@wrong("the ledger of *one* rank is asked for")
def of_all_ranks(model, optimizer, precision, strategy, world_size):
    parts = solved(model, optimizer, precision, strategy, world_size)
    return tuple(world_size * n for n in parts)


@wrong("It is not shared out: zero1 shares out optimizer state")
def never_divides(model, optimizer, precision, strategy, world_size):
    return tuple(held(*counts(model), precision, STATES[optimizer]))


@wrong("zero1 shares out the optimizer state only, and this is on every rank")
def a_stage_too_far(model, optimizer, precision, strategy, world_size):
    stage = {"ddp": "ddp", "zero1": "zero2"}.get(strategy, "zero3")
    return solved(model, optimizer, precision, stage, world_size)


@wrong("It is not shared out: zero2 shares out gradients and optimizer state")
def a_stage_behind(model, optimizer, precision, strategy, world_size):
    stage = {"zero3": "zero2", "zero2": "zero1"}.get(strategy, strategy)
    return solved(model, optimizer, precision, stage, world_size)


@right
def parameter_by_parameter(model, optimizer, precision, strategy, world_size):
    weights = gradients = states = 0
    for parameter in model.parameters():
        size = parameter.numel()
        weights += size * (2 if precision == "bf16" else 4)
        if not parameter.requires_grad:
            continue
        gradients += size * (2 if precision == "bf16" else 4)
        if precision == "bf16":
            states += 4 * size
        if optimizer == "momentum":
            states += 4 * size
        elif optimizer == "adamw":
            states += 8 * size
    if strategy != "ddp":
        states /= world_size
    if strategy in ("zero2", "zero3"):
        gradients /= world_size
    if strategy == "zero3":
        weights /= world_size
    return weights, gradients, states


@right
def from_a_table(model, optimizer, precision, strategy, world_size):
    table = {"fp32": (4, 4, 0), "amp": (4, 4, 0), "bf16": (2, 2, 4)}
    weight, gradient, copy = table[precision]
    numbers, trained = counts(model)
    each = [weight * numbers, gradient * trained, (copy + STATES[optimizer]) * trained]
    whole = {"ddp": 3, "zero1": 2, "zero2": 1, "zero3": 0}[strategy]
    return each[:whole] + [part / world_size for part in each[whole:]]


@right
def with_the_packages_formula(model, optimizer, precision, strategy, world_size):
    every, trained = counts(model)
    options = {"precision": precision, "strategy": strategy, "gpus": world_size}
    moving = memory.training_memory(trained, optimizer=optimizer, **options)
    weights = memory.training_memory(every, optimizer=optimizer, **options).weights
    return weights, moving.gradients, moving.optimizer_state


@right
def in_tensors(model, optimizer, precision, strategy, world_size):
    numbers = torch.tensor([[p.numel(), p.numel() * p.requires_grad] for p in model.parameters()])
    every, trained = numbers.sum(0).float()
    copy = 4.0 * (precision == "bf16")
    each = 4.0 - copy / 2
    parts = torch.stack([each * every, each * trained, (copy + STATES[optimizer]) * trained])
    return [
        *(
            parts
            / torch.tensor([(world_size if STAGES.index(strategy) > k else 1) for k in (2, 1, 0)])
        )
    ]


@right
def from_nbytes_in_whole_bytes(model, optimizer, precision, strategy, world_size):
    half = 2 if precision == "bf16" else 1
    unique = {id(p): p for p in itertools.chain(*(m.parameters() for m in model.modules()))}
    full = dict.fromkeys((False, True), 0)
    for p in unique.values():
        full[p.requires_grad] += 4 * p.numel()
    states = full[True] * {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    states += full[True] if half == 2 else 0
    parts = [sum(full.values()) // half, full[True] // half, states]
    return [round(n) for n in shared(parts, strategy, world_size)]
