"""What ranks reported, as curves, {optimizer step: value} in the order of steps, and in words.

A record is a dict with "rank", "step" and quantities. What all ranks share, such as the loss of the
global batch, is read from the lowest rank that reported the step; a step done twice counts the
last time. Raises ValueError, in one line, for what is missing or is no number.
"""

import itertools
import math

from .drawing import say

_BY_CLOCK = ("seconds", "samples_per_s", "time")  # each rank has its clock: values differ a little


def records_of(run_or_records) -> list[dict]:
    """Return the records of a `Run`, or the list of records itself."""
    records = getattr(run_or_records, "records", run_or_records)
    if not isinstance(records, list | tuple) or not all(isinstance(r, dict) for r in records):
        raise TypeError(f"needs a Run or a list of records (dicts), not {type(records).__name__}.")
    if not records:
        raise ValueError("there are no records: call report(step=step, loss=...) in the ranks.")
    return list(records)


def ranks_of(records: list[dict]) -> list[int]:
    """Return the ranks that reported."""
    return sorted({record.get("rank", 0) for record in records})


def series(records: list[dict], key: str, rank: int | None = None) -> dict[int, float]:
    """Return the curve of `key` of one rank, or the one that all ranks share.

    Raises ValueError if ranks report different values of what they should share.
    """
    found, source = {}, {}
    for record in sorted(records, key=lambda record: -record.get("rank", 0)):  # the lowest last
        step, value, by = record.get("step"), record.get(key), record.get("rank", 0)
        if step is None or value is None or rank not in (None, by):
            continue
        step = int(number(step, "step"))
        value = number(value, f'"{key}" at step {step}')
        if source.get(step, by) != by and key not in _BY_CLOCK and not _same(value, found[step]):
            raise ValueError(
                f'"{key}" at step {step} is {value:.6g} on rank {by} but {found[step]:.6g} on rank '
                f"{source[step]}: all-reduce it before report(); what is each rank's own goes "
                "under another name, as in local_loss."
            )
        found[step], source[step] = value, by
    if not found:
        how = f"call report(step=step, {key}=...) in the ranks"
        raise ValueError(f'no record has "step" and "{key}": {how}.')
    return dict(sorted(found.items()))


def along(records: list[dict], x: str, curve: dict[int, float]) -> list[float]:
    """Return where the steps of a curve lie: by "step", "samples" (seen so far) or "time"."""
    if x == "step":
        return list(curve)
    values = series(records, x)
    if x == "samples":
        values = dict(zip(values, itertools.accumulate(values.values()), strict=True))
    return [values.get(step, math.nan) for step in curve]


def finite(*curves: dict[int, float]) -> list[float]:
    """Return the values of all curves that are neither inf nor nan."""
    return [value for curve in curves for value in curve.values() if math.isfinite(value)]


def number(value, what: str) -> float:
    """Return value as a float; `what` begins the error if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} must be a number, not {value!r}.") from None


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4) or (math.isnan(a) and math.isnan(b))


def count(many: int, noun: str) -> str:
    """Return "1 step", "2 steps", "no steps"."""
    return f"{f'{many:,}' if many else 'no'} {noun}{'s' * (many != 1)}"


def trend(name: str, curve: dict[int, float]) -> str:
    """Return a sentence such as "The loss fell from 2.31 to 0.12 in 120 steps"."""
    values, span = finite(curve), count(max(curve) - min(curve) + 1, "step")
    if not values:
        return f"The {name} was never finite in {span}"
    first, last = values[0], values[-1]
    if len(curve) == 1:
        said = f"The {name} at step {min(curve):,} is {say(first)}"
    elif abs(last - first) <= 0.005 * abs(first):
        said = f"The {name} stayed at {say(first)} in {span}"
    else:
        moved = "fell" if last < first else "rose"
        said = f"The {name} {moved} from {say(first)} to {say(last)} in {span}"
    bad = [step for step, value in curve.items() if not math.isfinite(value)]
    return said + (f"; not finite at {len(bad):,} of them, first at step {bad[0]:,}" if bad else "")
