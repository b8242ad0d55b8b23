"""Number formats bit by bit: what fp32, bf16, fp16 and fp8 make of a value.

    look(0.1, FORMATS["fp16"])     # its bits, what is stored, the neighbours, the error
    explorer()                     # the same for all formats, with a value to type or drag

Rounding is to nearest, ties to even (IEEE 754); the two fp8 formats are those of Micikevicius and
others, FP8 formats for deep learning (2022): e4m3 has no infinity; beyond 448 it stays at 448.
"""

import html
import math
from dataclasses import dataclass

import torch

from .widgets import interactive, place


@dataclass(frozen=True)
class Format:
    """1 bit of sign, `exponent` bits with a bias, `fraction` bits after the leading 1."""

    name: str
    exponent: int
    fraction: int
    dtype: torch.dtype
    infinite: bool = True  # whether the highest exponent means inf and nan

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> float:
        """The largest finite number."""
        top = 2**self.exponent - 1 - self.bias - self.infinite
        ones = 2 ** (self.fraction + 1) - 1 - (not self.infinite)  # e4m3: all ones is its nan
        return math.ldexp(ones, top - self.fraction)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1, 1 - self.bias)

    @property
    def smallest(self) -> float:
        """The smallest number above 0, a subnormal one."""
        return math.ldexp(1, 1 - self.bias - self.fraction)

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.fraction


STEP = 0.05  # of the slider, in powers of 2

FORMATS = {
    made.name: made
    for made in (
        Format("fp32", 8, 23, torch.float32),
        Format("bf16", 8, 7, torch.bfloat16),
        Format("fp16", 5, 10, torch.float16),
        Format("fp8 e4m3", 4, 3, torch.float8_e4m3fn, infinite=False),
        Format("fp8 e5m2", 5, 2, torch.float8_e5m2),
    )
}


@dataclass(frozen=True)
class Look:
    """A value in a format: bits, what is `stored`, the numbers `below` and `above` (nan: none)."""

    value: float
    format: Format
    stored: float
    kind: str  # "normal", "subnormal", "zero", "inf" or "nan"
    sign: str
    exponent: str
    fraction: str
    below: float
    above: float

    @property
    def error(self) -> float:
        """The relative error, |stored − value| / |value|; nan where there is none."""
        if not math.isfinite(self.stored) or not self.value or not math.isfinite(self.value):
            return 0.0 if self.stored == self.value else math.nan
        return abs(self.stored - self.value) / abs(self.value)


def look(value: float, format: Format) -> Look:
    """Return what a number becomes in a format. Raises TypeError for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"look() needs a number, not {value!r}.")
    value = float(value)
    stored = rounded(value, format)
    code = _code(stored, format)
    text = f"{code:0{format.bits}b}"
    cut = 1 + format.exponent
    return Look(
        value, format, stored, _kind(stored, format), text[0], text[1:cut], text[cut:],
        _neighbour(stored, format, -1), _neighbour(stored, format, +1),
    )  # fmt: skip


def rounded(value: float, format: Format) -> float:
    """Return the nearest number of the format; beyond the largest inf, or the largest in e4m3."""
    beyond = math.copysign(math.inf if format.infinite else format.largest, value)
    if not math.isfinite(value):
        return value if math.isnan(value) else beyond
    size = abs(value)
    if size >= 2 * format.largest:
        return beyond
    exponent = max(math.frexp(size)[1] - 1, 1 - format.bias) if size else 0
    unit = exponent - format.fraction  # of the last place
    number = math.ldexp(round(math.ldexp(size, -unit)), unit)  # round() is to even
    return math.copysign(number, value) if number <= format.largest else beyond


def _kind(stored: float, format: Format) -> str:
    if math.isnan(stored):
        return "nan"
    if math.isinf(stored):
        return "inf"
    if stored == 0:
        return "zero"
    return "normal" if abs(stored) >= format.smallest_normal else "subnormal"


def _code(stored: float, format: Format) -> int:
    """Return the bits of a number of the format, as a whole number."""
    highest = (2**format.exponent - 1) << format.fraction
    sign = (math.copysign(1, stored) < 0) << (format.exponent + format.fraction)
    size = abs(stored)
    if math.isnan(stored):
        return highest | (1 << (format.fraction - 1) if format.infinite else 2**format.fraction - 1)
    if math.isinf(stored):
        return sign | highest
    return sign | _steps(size, format)


def _steps(size: float, format: Format) -> int:
    """Return how many numbers of the format lie between 0 and this one: its bits, too."""
    if size < format.smallest_normal:
        return int(size / format.smallest)
    exponent = math.frexp(size)[1] - 1
    leading = int(math.ldexp(size, format.fraction - exponent))
    return ((exponent + format.bias - 1) << format.fraction) + leading


def _neighbour(stored: float, format: Format, way: int) -> float:
    if math.isnan(stored):
        return math.nan
    if math.isinf(stored):  # beyond it is nothing
        return math.copysign(format.largest, stored) if way * stored < 0 else math.nan
    steps = _steps(abs(stored), format) * (1 if stored >= 0 else -1) + way
    return math.copysign(_number(abs(steps), format), steps)


def _number(steps: int, format: Format) -> float:
    """Return the number `steps` numbers away from 0; beyond the largest inf, or nan for none."""
    exponent, fraction = steps >> format.fraction, steps & (2**format.fraction - 1)
    beyond = math.inf if format.infinite else math.nan
    if exponent - format.bias > 1000:  # beyond Python's own numbers, too
        return beyond
    leading = fraction + (2**format.fraction if exponent else 0)
    number = math.ldexp(leading, max(exponent, 1) - format.bias - format.fraction)
    return number if number <= format.largest else beyond


# ---- for the eye


def explorer(value: float = 0.1) -> None:
    """Show a value in all formats: to type and to drag, or, without widgets, as plain text."""
    if not interactive():
        print(as_text(value))
        return
    import ipywidgets

    number = ipywidgets.FloatText(value, description="value")
    power = ipywidgets.FloatSlider(
        _nearest(value), min=-40, max=20, step=STEP,
        description="its log2", layout={"width": "560px"}, readout_format=".2f",
    )  # fmt: skip
    shown = ipywidgets.HTML(as_html(value))

    def typed(change):
        if math.isfinite(change["new"]) and change["new"]:
            power.value = _nearest(change["new"])
        shown.value = as_html(change["new"])

    def dragged(change):  # by a step at least: a browser sends back what the slider was set to
        if number.value and abs(change["new"] - _nearest(number.value)) < STEP / 2:
            return
        number.value = math.copysign(2 ** change["new"], number.value or 1)

    number.observe(typed, "value")
    power.observe(dragged, "value")
    place("formats", ipywidgets.VBox([number, power, shown]))


def _nearest(value: float) -> float:
    """Return log2 of a value where a slider can stand: off its steps it would move by itself."""
    if not value or not math.isfinite(value):
        return 0.0
    return min(20.0, max(-40.0, round(math.log2(abs(value)) / STEP) * STEP))


def as_text(value: float) -> str:
    """Return the table of a value in all formats as plain text."""
    lines = [f"{value:.9g} in each format (sign | exponent | fraction)"]
    for format in FORMATS.values():
        seen = look(value, format)
        bits = f"{seen.sign} {seen.exponent} {seen.fraction}"
        lines.append(
            f"{format.name:9} {bits:35} = {seen.stored:<14.9g} {seen.kind:9} off by {_off(seen)}, "
            f"next {_digits(seen, seen.below)} and {_digits(seen, seen.above)}"
        )
    return "\n".join(lines)


_CELL = "padding: 3px 8px; text-align: left; white-space: nowrap; line-height: 1.3"
_GROUND = {"sign": "#E0E0E0", "exponent": "#9ECAE1", "fraction": "#FDD0A2"}


def as_html(value: float) -> str:
    """Return the table of a value in all formats as HTML."""
    names = ("format", "sign · exponent · fraction", "stored", "off by", "below, above")
    rows = ["".join(f'<th style="{_CELL}">{name}</th>' for name in names)]
    for format in FORMATS.values():
        seen = look(float(value), format)
        bits = "&#8201;".join(
            f'<span style="background: {ground}; font-family: monospace" title="{part}">'
            f"{getattr(seen, part)}</span>"
            for part, ground in _GROUND.items()
        )
        stored = f"{seen.stored:.9g}" + (f"<br>{seen.kind}" if seen.kind != "normal" else "")
        near = f"{_digits(seen, seen.below)}<br>{_digits(seen, seen.above)}"
        cells = (f"<b>{format.name}</b>", bits, stored, html.escape(_off(seen)), near)
        rows.append("".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table style="color: #222; background: white; font-size: 13px">{body}</table>'


def _digits(seen: Look, number: float) -> str:
    """Return a number with as many digits as tell it from its neighbours; a dash for none."""
    return "–" if math.isnan(number) else f"{number:.{4 + seen.format.fraction // 4}g}"


def _off(seen: Look) -> str:
    if seen.error == 0:
        return "nothing"
    return "lost" if math.isnan(seen.error) or seen.error == 1 else f"{100 * seen.error:.2g} %"
