"""What of a run is not as it was saved, and what was left out of the checkpoint then."""

import torch

NAMES = {
    "weights": "weights",
    "momentum": "optimizer's momentum",
    "learning_rate": "learning rate",
    "schedule": "schedule",
    "scale": "loss scale",
    "good_steps": "scaler's count of good steps",
    "epoch": "epoch",
    "batches_done": "place in the epoch",
    "random": "random numbers",
}


def different(one: dict, other: dict) -> list[str]:
    """Return the names of what differs between two snapshots."""
    return [name for name in NAMES if not _equal(one[name], other[name])]


def _equal(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def load_wrong(outputs, rank) -> str | None:
    """Say what a rank's load has not restored, from the snapshots in what the ranks returned."""
    output = outputs[rank]
    saved = output["older" if output["failed"] else "saved"]
    loaded, fresh = output["loaded"], output["fresh"]
    if wrong := different(loaded, saved):
        if not different(loaded, fresh):
            if rank and different(outputs[0]["loaded"], outputs[0]["fresh"]):
                return "load() restores nothing here, but does on rank 0: every rank has to load."
            return "load() changes nothing: the run begins anew."
        if saved is output["saved"] and _equal(loaded["weights"], output["older"]["weights"]):
            return (
                "load() restores an older checkpoint, not the one that was saved last (or does "
                "save() fail without a word?)."
            )
        if not {"momentum", "schedule", "scale", "random"} - set(wrong) and wrong[0] != "weights":
            return (
                "only the weights are restored: optimizer, schedule, scaler, progress and random "
                "numbers begin anew."
            )
        return _left_out(wrong, loaded, saved, outputs, rank)
    return None


def _left_out(wrong, loaded, saved, outputs, rank) -> str:
    part = wrong[0]
    if part in ("epoch", "batches_done"):
        return _progress_wrong(wrong, loaded, saved)
    if part == "random":
        for other, output in enumerate(outputs):
            if other != rank and _equal(loaded["random"], output["saved"]["random"]):
                return _OF_RANK_0 if other == 0 else _OF_ANOTHER.format(other)
        return _LEFT_OUT[part]
    if part == "learning_rate":
        return f"the learning rate is {loaded[part]:g} instead of {saved[part]:g}."
    if part in ("weights", "momentum"):
        return _LEFT_OUT[part]
    return _LEFT_OUT[part].format(loaded[part], saved[part])


_LEFT_OUT = {
    "weights": "the weights are not those that were saved.",
    "momentum": "the optimizer begins without its momentum, or with another: its state_dict() "
    "belongs in the checkpoint.",
    "schedule": "the schedule has counted {} steps instead of {}: its state_dict() belongs in the "
    "checkpoint.",
    "scale": "the loss scale is {:,.0f} instead of {:,.0f}: without the scaler's state it "
    "searches its scale anew, and skips steps.",
    "good_steps": "the scaler has counted {} good steps instead of {}: its scale alone is not its "
    "state, so save its state_dict().",
    "random": "dropout draws other numbers than in the run that was never stopped: the state of "
    "torch's generator belongs in the checkpoint.",
}
_OF_RANK_0 = (
    "it goes on with rank 0's random numbers: dropout then drops the same units on all ranks. Save "
    "each rank's own state (all in one file, or a file for each), and give it back to that rank."
)
_OF_ANOTHER = (
    "it goes on with rank {}'s random numbers: do all ranks write the same file, so that the last "
    "one's stays? One file a rank, or one that holds the states of all."
)


def _progress_wrong(wrong, loaded, saved) -> str:
    if loaded["epoch"] == loaded["batches_done"] == 0:
        return (
            "progress is still at epoch 0, batch 0: it was left out, or the name got a new dict. "
            "The caller's must change: progress.update(...)."
        )
    if wrong[0] == "batches_done":
        return (
            f"progress says {loaded['batches_done']} batches instead of {saved['batches_done']}: "
            "the epoch begins anew, and its first samples are used twice."
        )
    return (
        f"progress says epoch {loaded['epoch']} instead of {saved['epoch']}: the sampler deals "
        "that epoch's order again."
    )
