"""Knobs of a run that the notebook turns while it trains.

In the ranks, once a step:

    knobs = dials(learning_rate=0.1)
    optimizer.param_groups[0]["lr"] = knobs.learning_rate

and in the notebook: `run = launch(worker, wait=False)`, then `run.set(learning_rate=0.2)`.
"""

from types import SimpleNamespace

_turned: dict[str, float] = {}  # what the notebook has set, as this rank knows it


def turn(**values: float) -> None:
    """Take what the notebook has set; `rank` calls it when a command arrives."""
    _turned.update(values)


def dials(**defaults: float) -> SimpleNamespace:
    """Return these numbers as the notebook has set them, or as given here; the same on all ranks.

    Every rank must call it, at the same place and with the same names: rank 0's values are
    broadcast, since ranks that hear of a change one step apart would drift apart. Raises TypeError
    for a default that is no number.
    """
    import torch
    import torch.distributed as dist

    from .process_group import this_rank

    for name, value in defaults.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"dials(): {name} must be a number, not {value!r}.")
    names = sorted(defaults)
    values = [float(_turned.get(name, defaults[name])) for name in names]
    if dist.is_initialized():
        shared = torch.tensor(values, dtype=torch.float64, device=this_rank().device)
        dist.broadcast(shared, src=0)
        values = shared.tolist()
    return SimpleNamespace(**dict(zip(names, values, strict=True)))
