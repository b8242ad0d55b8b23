"""How numbers differ, in the student's terms: rank, name, largest difference, what was allowed."""

import torch


def off(actual, expected, rtol: float = 1e-9, atol: float = 1e-10) -> float | None:
    """Return the largest absolute difference if it is more than allowed (nan counts), else None."""
    actual, expected = _tensor(actual), _tensor(expected)
    difference = (actual - expected).abs()
    allowed = atol + rtol * expected.abs()
    if bool((difference <= allowed).all()):
        return None
    return float(difference.nan_to_num(nan=float("inf")).max())


def wrong_kind(actual, expected) -> str | None:
    """Say that a value is no tensor, or one of another shape, or None."""
    if not isinstance(actual, torch.Tensor):
        if isinstance(expected, torch.Tensor) and expected.dim():
            return f"a {type(actual).__name__}, where a tensor of {_shape(expected)} is expected"
        return None if isinstance(actual, int | float) else f"{actual!r}, which is no number"
    if isinstance(expected, torch.Tensor) and actual.shape != expected.shape:
        return f"a tensor of {_shape(actual)}, where {_shape(expected)} is expected"
    return None


def factor(actual, expected, tolerance: float = 1e-6) -> float | None:
    """Return c if actual is c times expected in every element, else None."""
    actual, expected = _tensor(actual).flatten(), _tensor(expected).flatten()
    if actual.shape != expected.shape or not expected.any() or not actual.isfinite().all():
        return None
    c = float(actual @ expected / (expected @ expected))
    rest = (actual - c * expected).abs().max()
    return c if rest <= tolerance * max(1e-30, abs(c)) * expected.abs().max() else None


def is_times(actual, expected, c: float, tolerance: float = 1e-6) -> bool:
    """Say whether actual is c times expected."""
    found = factor(actual, expected, tolerance)
    return found is not None and abs(found - c) <= tolerance * max(1, abs(c))


def tell(what: str, rank: int, actual, expected, allowed: float = 1e-10) -> str:
    """Say how far off a value of a rank is: "rank 1: the gradient of 0.weight is off by …"."""
    kind = wrong_kind(actual, expected)
    if kind:
        return f"rank {rank}: {what} is {kind}."
    most = float((_tensor(actual) - _tensor(expected)).abs().nan_to_num(nan=float("inf")).max())
    return f"rank {rank}: {what} is off by up to {most:.3g} ({allowed:.0e} is allowed)."


def many(number: int, noun: str) -> str:
    """Return "1 sample", "2 samples"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _tensor(value) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()


def _shape(tensor) -> str:
    return f"shape {list(tensor.shape)}"
