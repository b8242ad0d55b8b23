"""06 · train_ddp(model, dataset, epochs, batch_size, learning_rate, seed): the whole loop."""

from ..compare import off, tell, wrong_kind
from ..exercise import Case, Exercise, calls, same_calls
from .training import BATCH, EPOCHS, RATE, SAMPLES, Samples, Simulated, model_of, shuffle_seed


def _run(kind: str):
    def run(fn, rank, world_size, seed):
        model, dataset = model_of(seed, rank), Samples(seed, SAMPLES[kind])
        called = len(calls())
        result = fn(model, dataset, EPOCHS, BATCH[kind], RATE, shuffle_seed(seed))
        told = {"asked": len(dataset.asked), "collectives": calls()[called:], "graph": False}
        if not isinstance(result, tuple | list) or len(result) != 2:
            kinds = "nothing" if result is None else f"a {type(result).__name__}"
            return told | {"wrong": f"it returns {kinds}: return state_dict, losses."}
        weights, losses = result
        if not hasattr(weights, "items"):
            return told | {"wrong": f"the weights are a {type(weights).__name__}, no state_dict."}
        if not hasattr(losses, "__len__") or isinstance(losses, dict):
            return told | {"wrong": f"the losses are a {type(losses).__name__}, no list."}
        told["graph"] = any(getattr(loss, "requires_grad", False) for loss in losses)
        told["losses"] = [float(x.detach() if hasattr(x, "detach") else x) for x in losses]
        told["weights"] = {str(name): weight.detach().clone() for name, weight in weights.items()}
        return told

    return run


def _judge(kind, what):
    def judge(outputs, world_size, seed):
        for rank, output in enumerate(outputs):
            if "wrong" in output:
                return f"rank {rank}: {output['wrong']}"
        expected = Simulated(seed, kind, world_size)
        return what(outputs, expected) or same_calls(outputs)

    return judge


# ---- the weights


def _wrong_weights(outputs, expected) -> str | None:
    wanted = expected.weights(0)
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["weights"]
        if set(mine) != set(wanted):
            wrapped = any(name.startswith("module.") for name in mine)
            return f"rank {rank}: the state_dict has the names {sorted(mine)[:2]} …" + (
                " They are the wrapper's: return that of the bare network, ddp_model.module."
                if wrapped
                else f" instead of {sorted(wanted)[:2]} …"
            )
        for name, weight in wanted.items():
            if wrong_kind(mine[name], weight) or off(mine[name], weight) is not None:
                told = tell(f"{name} after {EPOCHS} epochs", rank, mine[name], weight)
                return f"{told}\n{_misconception(outputs, rank, expected)}"
    return None


def _misconception(outputs, rank, expected) -> str:
    mine, world_size, batch = outputs[rank]["weights"], expected.world_size, expected.batch
    if any(_same(mine, _start(expected.seed, r)) for r in range(world_size)):
        return "The weights never moved: does the optimizer hold the parameters of this model?"
    for message, change in _wrong_ways(world_size, batch):
        simulated = Simulated(expected.seed, expected.kind, world_size, **change)
        if _same(mine, simulated.weights(rank)):
            return message
    if world_size > 1 and outputs[rank]["asked"] >= EPOCHS * len(expected.dataset):
        return _EVERYTHING
    if any(not _same(mine, output["weights"]) for output in outputs):
        return "The ranks end with different weights: are the gradients averaged in every step?"
    return "All ranks agree, on other weights than one process that takes the global batches."


def _start(seed, rank) -> dict:
    return model_of(seed, rank).state_dict()


def _same(mine, weights) -> bool:
    return all(
        not wrong_kind(mine[name], weight) and off(mine[name], weight, 1e-7, 1e-8) is None
        for name, weight in weights.items()
    )


_EVERYTHING = (
    "Every rank goes through all samples: with a DistributedSampler each takes its own part, and "
    "an epoch has fewer steps."
)


def _wrong_ways(world_size, batch):
    """Yield (what it looks like, the change to the right training)."""
    yield "Every epoch had the order of epoch 0: call sampler.set_epoch(epoch).", _every(0)
    yield "set_epoch counted from 1: the first epoch is number 0.", {"epoch": lambda e: e + 1}
    yield "The samples were not shuffled.", {"shuffle": False}
    yield "The order is not that of `seed`: give it to the sampler.", {"shuffle_seed": 0}
    yield (
        "Gradients of earlier steps are still in .grad: zero_grad() is missing in the loop.",
        {"keep_gradients": True},
    )
    yield "Samples were dropped: the sampler's drop_last should be False.", {"drop_last": True}
    yield "The smaller last batch was dropped, by the loader's drop_last.", {"drop_batch": True}
    yield "The losses were summed over a batch, not averaged.", {"summed": True}
    if world_size > 1:
        yield from _wrong_ways_of_ranks(world_size, batch)


def _wrong_ways_of_ranks(world_size, batch):
    yield _EVERYTHING, {"no_sampler": True}
    yield (
        "Each rank trained alone, from weights of its own: the model was not wrapped in DDP.",
        {"alone": True, "own_start": True},
    )
    yield (
        "All began with rank 0's weights, and then each rank trained alone: the forward has to go "
        "through the wrapper, ddp_model(x).",
        {"alone": True},
    )
    yield (
        "The gradients were averaged, but each rank began with weights of its own: rank 0's have "
        "to be sent to all first, as DDP does.",
        {"own_start": True},
    )
    yield (
        f"The learning rate was {world_size} times the one that was given: scaling it with the "
        "ranks is the caller's decision.",
        {"rate": world_size},
    )
    yield (
        f"The steps were {world_size} times too small: DDP's mean was divided once more.",
        {"rate": 1 / world_size},
    )
    if batch >= world_size:
        yield (
            f"The batches had {batch // world_size} samples a rank: batch_size is meant for each "
            "rank.",
            {"batch": batch // world_size},
        )


def _every(epoch: int) -> dict:
    return {"epoch": lambda _: epoch}


# ---- the losses


def _wrong_losses(outputs, expected) -> str | None:
    wanted = [_mean([pair for step in steps for pair in step]) for steps in expected.steps]
    for rank, output in reversed(list(enumerate(outputs))):
        mine = output["losses"]
        if output["graph"]:
            return (
                f"rank {rank}: a returned loss still carries its graph, and with it the activations"
                " of its batch: add up loss.detach() or loss.item()."
            )
        if len(mine) != EPOCHS:
            return f"rank {rank}: {len(mine)} losses, and there were {EPOCHS} epochs: one for each."
        for epoch, (loss, right) in enumerate(zip(mine, wanted, strict=True)):
            if off(loss, right, 1e-6, 1e-6) is not None:
                told = tell(f"the loss of epoch {epoch}", rank, loss, right, 1e-6)
                return f"{told}\n{_misread(mine, rank, expected)}".rstrip()
    return None


def _misread(mine, rank, expected) -> str:
    for message, of_epoch in _other_losses(rank, expected):
        if off(mine, [of_epoch(steps) for steps in expected.steps], 1e-6, 1e-6) is None:
            return message
    return ""


def _other_losses(rank, expected):
    """Yield (what it looks like, a function from an epoch's steps to that loss)."""

    def every(steps):
        return [pair for step in steps for pair in step]

    def means(steps):
        return [_mean(step) for step in steps]

    if expected.world_size > 1:
        own = "It is this rank's own loss: the other ranks' samples are not in it."
        yield own, lambda steps: _mean([step[rank] for step in steps])
        yield own, lambda steps: _plain_mean([step[rank][0] for step in steps])
        yield own, lambda steps: steps[-1][rank][0]
        yield (
            "The ranks' losses were added up, not averaged.",
            lambda steps: expected.world_size * _mean(every(steps)),
        )
        yield (
            "The ranks' losses were added up, not averaged.",
            lambda steps: expected.world_size * _plain_mean(means(steps)),
        )
    yield "It is the loss of the epoch's last step alone.", lambda steps: means(steps)[-1]
    yield (
        "It is the mean of the steps' means, in which the samples of a small last batch count too "
        "much: weight by the number of samples.",
        lambda steps: _plain_mean(means(steps)),
    )
    yield "The steps' losses were added up, not averaged.", lambda steps: sum(means(steps))
    yield (
        f"It was divided by len(dataset), {len(expected.dataset)}: with its padding the epoch "
        "processed more.",
        lambda steps: sum(loss * n for loss, n in every(steps)) / len(expected.dataset),
    )


def _mean(pairs) -> float:
    return sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs)


def _plain_mean(values) -> float:
    return sum(values) / len(values)


_STUCK = (
    "Likely: not all ranks call a collective, as an all_reduce of the loss inside `if rank == 0`, "
    "or some have more batches than others."
)
_ERRORS = {"mutually exclusive": "A loader takes either a sampler or shuffle=True."}


def _case(name, points, kind, what, worlds) -> Case:
    return Case(name, points, _run(kind), _judge(kind, what), worlds, _STUCK, _ERRORS)


EXERCISE = Exercise(
    "06_train_ddp",
    "train_ddp",
    ("model", "dataset", "epochs", "batch_size", "learning_rate", "seed"),
    (
        _case("the weights, all batches equal", 3, "even", _wrong_weights, (2, 3, 1)),
        _case("the weights, padding and a small last batch", 3, "ragged", _wrong_weights, (2, 3)),
        _case("the losses", 3, "ragged", _wrong_losses, (2,)),
    ),
)
