"""Small drawings for what moves: SVG text takes a millisecond where a figure takes a few hundred.

Plain functions from numbers to text, for `live` views and control panels; any thread may call them.
"""

import html

from .drawing import SKIPPED, say

POINTS = 240  # of a curve; more would not be seen


def chart(
    title: str,
    curves: list[tuple],
    *,
    crosses=(),
    from_zero: bool = False,
    unit: str = "",
    size: int = 14,
    width: int = 205,
    height: int = 100,
) -> str:
    """Return a titled box with curves (values, color, line width[, label]) over equal x.

    Labels stand at the ends of lines, `crosses` (indices) are red ✕ on the first curve. With a
    `unit` the lowest and the highest value are written at the axis. `size` is in pixels.
    """
    room = size * 0.62  # of a letter
    left = room * 8 if unit else 6
    right = room * max((len(curve[3]) + 1 for curve in curves if len(curve) > 3), default=0) or 6
    low, high = _range([curve[0] for curve in curves], from_zero)

    def place(index, values):
        value = values[index]
        value = min(max(value, low), high) if value == value else high
        x = left + index / max(1, len(values) - 1) * (width - left - right)
        return x, height - 6 - (value - low) / (high - low) * (height - 12)

    shapes, taken = "", []
    for values, color, thickness, *label in curves:
        picked = range(0, len(values), max(1, len(values) // POINTS))
        points = " ".join("{:.1f},{:.1f}".format(*place(index, values)) for index in picked)
        shapes += (
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{thickness}"/>'
        )
        if label and values:
            y = _free(place(len(values) - 1, values)[1], taken, size, height)
            shapes += _text(label[0], width - right + 6, y, size, color="#222")
            shapes += _text("●", width - right - 4, y, size * 0.7, color=color)
    for index in crosses:
        x, y = place(index, curves[0][0])
        look = f'stroke="{SKIPPED["color"]}" stroke-width="{max(2, size // 7)}"'
        half = size * 0.3
        shapes += f'<path d="M{x - half:.1f},{y - half:.1f}l{2 * half:.1f},{2 * half:.1f}'
        shapes += f'm0,{-2 * half:.1f}l{-2 * half:.1f},{2 * half:.1f}" {look}/>'
    if unit:
        shapes += _text(say(high), left - 6, size, size, anchor="end")
        shapes += _text(say(low), left - 6, height - 6, size, anchor="end")
        shapes += _text(unit, left - 6, height / 2, size, anchor="end")
    box = f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    box += ' style="border: 1px solid #bbb; max-width: 100%; height: auto"'
    box += f' role="img" aria-label="{html.escape(title)}">{shapes}</svg>'
    figure = '<figure style="display: inline-block; margin: 4px 8px 4px 0">'
    return f"{figure}<figcaption>{html.escape(title)}</figcaption>{box}</figure>"


def _range(curves, from_zero) -> tuple[float, float]:
    finite = [v for values in curves for v in values if abs(v) < 1e300]  # else no difference is
    low, high = min([0, *finite] if from_zero else finite, default=0), max(finite, default=1)
    return (low, high) if high > low else (low, low + max(1, abs(low) / 2))  # 1e300 + 1 is 1e300


def _free(y: float, taken: list, size: float, height: float) -> float:
    """Return where a label near y does not lie on those before, and remember it."""
    y = min(max(y + size * 0.35, size), height - 4)
    while any(abs(y - other) < size for other in taken):
        y = y - 2 if y > size + 2 else y + size * (len(taken) + 1)
    taken.append(y)
    return y


def _text(words, x, y, size, color="#444", anchor="start") -> str:
    look = f'font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{html.escape(str(words))}</text>'
