"""08 · amp_step(model, optimizer, scaler, x, y, max_norm): one fp16 step, lines in order."""

import torch

from ..compare import factor
from ..exercise import Case, Exercise
from .amp_steps import MISTAKES, PLANS, batch, reference, setup
from .fp16 import ALLOWED, add_hint, close, plain, types_wrong, weights


def _run(name: str):
    plan = PLANS[name]

    def run(fn, rank, world_size, seed):
        model, optimizer, scaler = setup(plan, seed)
        history = []
        for step, wrong in enumerate(plan.steps):
            x, y = batch(seed, step, wrong)
            try:
                returned = fn(model, optimizer, scaler, x, y, plan.max_norm)
            except Exception as error:
                add_hint(error, scaler.log)
                raise
            values = returned if isinstance(returned, tuple | list) else (returned,)
            history.append(
                {
                    "returned": [plain(value) for value in values],
                    "graph": any(getattr(value, "requires_grad", False) for value in values),
                    "weights": weights(model),
                    "scale": float(scaler.get_scale()),
                }
            )
        return {
            "history": history,
            "of_weights": sorted({str(p.dtype)[6:] for p in model.parameters()}),
            "log": list(scaler.log),
            **model[-1].notes(),
        }

    return run


def _judge(name: str):
    def judge(outputs, world_size, seed):
        output, right = outputs[0], reference(name, seed)
        history, start = output["history"], weights(setup(PLANS[name], seed)[0])
        if wrong := _types_wrong(output):
            return wrong
        if any(mine["weights"].isnan().any() for mine in history):
            return STEPS_ANYWAY
        if not _same_track(history, right, start):
            for mistake, message in MISTAKES.items():
                if _same_track(history, reference(name, seed, mistake), start):
                    return message
            return _off_track(output, right, start)
        return _returned_wrong(history, right, PLANS[name].max_norm)

    return judge


STEPS_ANYWAY = (
    "it takes the step although a gradient is inf or nan, which spoils the weights for ever: "
    "scaler.step(optimizer) looks first, optimizer.step() does not."
)
HALF_LOSS = (
    "the loss is computed in fp16, outside of autocast: forward *and* loss belong inside, where "
    "cross entropy runs in fp32."
)


def _types_wrong(output) -> str | None:
    if output["of_weights"] != ["float32"]:
        return (
            f"afterwards there are weights in {' and '.join(output['of_weights'])}: they must stay "
            "float32, in which small updates are not lost. Autocast makes the 16-bit copies."
        )
    return types_wrong(output)


def _same_track(history, wanted, start) -> bool:
    return all(
        mine["scale"] == right["scale"] and close(mine["weights"], right["weights"], start)
        for mine, right in zip(history, wanted, strict=True)
    )


def _off_track(output, right, start) -> str:
    """Say what is wrong with weights or scales that fit none of the known mistakes."""
    scale = right[0]["used"]
    first = output["history"][0]
    times = factor(first["weights"] - start, right[0]["weights"] - start, tolerance=0.02)
    if times is not None and abs(times - 1) > 0.01:
        told = f"the first step is {times:.4g} × as long as it should be: "
        if abs(times * scale - 1) < 0.05:
            return told + (
                f"1 / {scale:g}. It was divided by the loss scale twice."
                if "scale" in output["log"]
                else f"1 / {scale:g}. The loss was not scaled before backward, but unscaled after."
            )
        if abs(times / scale - 1) < 0.05:
            return told + "that is the loss scale: the gradients were not unscaled."
        return told + (
            f"was the loss multiplied by a fixed number, {times * scale:g}? The scaler's scale is "
            f"{scale:g}, and it changes."
        )
    for step, (mine, wanted) in enumerate(zip(output["history"], right, strict=True)):
        if mine["scale"] != wanted["scale"]:
            return (
                f"after step {step} the scaler's scale is {mine['scale']:g} instead of "
                f"{wanted['scale']:g}: it is the scaler that adapts it, in step and update."
            )
        if not close(mine["weights"], wanted["weights"], start):
            most = (mine["weights"] - wanted["weights"]).abs().max()
            return (
                f"after step {step} the weights are off by up to {most:.3g}; {ALLOWED:.0%} of "
                "their movement is allowed."
            )
    return "the weights are not those of the right steps."


def _returned_wrong(history, right, max_norm) -> str | None:
    if any(len(mine["returned"]) != 3 for mine in history):
        return "it should return three values: loss, grad_norm, stepped."
    if any(mine["graph"] for mine in history):
        return "the returned loss still carries its graph: return loss.item() or loss.detach()."
    pairs = [(*mine["returned"], wanted) for mine, wanted in zip(history, right, strict=True)]
    good = [pair for pair in pairs if pair[3]["stepped"]]
    for loss, norm, _, wanted in good:
        if not _near(loss, wanted["loss"]):
            if _near(loss, wanted["loss"] * wanted["used"]):
                return (
                    f"the returned loss is {loss:g}, the scaled one ({wanted['used']:g} × "
                    f"{wanted['loss']:.4g}): return the loss itself."
                )
            return f"the returned loss is {loss!r} instead of {wanted['loss']:.6g}."
        if not _near(norm, wanted["norm"]):
            return _norm_wrong(norm, wanted, max_norm)
    if good and all(torch.tensor(loss).half().item() == loss for loss, *_ in good):
        return HALF_LOSS  # numbers that fp16 has, every time
    return _stepped_wrong(pairs)


def _norm_wrong(norm, wanted, max_norm) -> str:
    told = f"the returned grad_norm is {norm!r} instead of {wanted['norm']:.6g}"
    if _near(norm, wanted["norm"] * wanted["used"]):
        return f"{told}: it was taken before unscale_, and carries the loss scale."
    if _near(norm, min(max_norm, wanted["norm"])):
        return f"{told}: it was taken after clipping, when all are max_norm."
    return f"{told}."


def _stepped_wrong(pairs) -> str | None:
    said, truth = [pair[2] for pair in pairs], [pair[3]["stepped"] for pair in pairs]
    if not all(isinstance(value, bool | int | float) for value in said):
        return f"stepped should be True or False, not {said[0]!r}."
    if [bool(value) for value in said] == truth:
        return None
    if all(said):
        return "stepped is True although a step was skipped: did the scale go down?"
    if not any(said) and all(truth):
        return None  # a case with good and skipped steps will tell which mistake it is
    if not any(said):
        return (
            "stepped is False although the step was taken: what scaler.step returns does not tell. "
            "Compare the scale before and after update: after a good step it stays, or grows."
        )
    if not any(bool(value) == fact for value, fact in zip(said, truth, strict=True)):
        return "stepped is the wrong way round: True where the step was skipped."
    return (
        "stepped is not what happened: the scale goes down when a step is skipped; after a good "
        "step it stays, or grows."
    )


def _near(value, wanted: float, tolerance: float = 0.01) -> bool:
    return isinstance(value, int | float) and abs(value - wanted) <= tolerance * abs(wanted)


def _case(title: str, points: int, name: str) -> Case:
    return Case(title, points, _run(name), _judge(name), worlds=(1,))


EXERCISE = Exercise(
    "08_amp_step",
    "amp_step",
    ("model", "optimizer", "scaler", "x", "y", "max_norm"),
    (
        _case("types and order", 3, "plain"),
        _case("clipping", 3, "clip"),
        _case("overflows", 3, "overflow"),
        _case("a frozen layer, a scale that grows", 2, "grows"),
    ),
)
