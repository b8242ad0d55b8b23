"""The ways to share out training: what each of two ranks holds, and what crosses between them."""

from matplotlib.patches import FancyArrowPatch, Rectangle

from .drawing import COMMUNICATION, DIM, PALE, RANK_COLORS, Picture, canvas, course_style, finish

ALL = [(row, column) for row in range(4) for column in range(4)]
HALVES = {  # of a 4×4 grid, for rank 0 and for rank 1
    "whole": (ALL, ALL),
    "rows": (ALL[:8], ALL[8:]),
    "columns": ([c for c in ALL if c[1] < 2], [c for c in ALL if c[1] >= 2]),
    "first": (ALL, []),  # rank 1 gets none of it
    # every other layer is shared out by columns, the rest is on both
    "experts": ([c for c in ALL if c[0] % 2 == 0 or c[1] < 2],
                [c for c in ALL if c[0] % 2 == 0 or c[1] >= 2]),
}  # fmt: skip

# name: (batch, model, what crosses, when)
STRATEGIES = {
    "data (DDP)": ("rows", "whole", "gradients", "after each backward"),
    "sharded data (ZeRO, FSDP)": ("rows", "columns", "weights, gradients", "at each layer"),
    "tensor": ("whole", "columns", "activations", "in every layer"),
    "pipeline": ("first", "rows", "activations, gradients", "between stages"),
    "sequence, context": ("columns", "whole", "keys and values", "in attention"),
    "expert": ("rows", "experts", "tokens", "around each expert layer"),
}


@course_style()
def strategies(names=None, title: str | None = None) -> Picture:
    """Draw what two ranks hold of batch and model under each strategy, and what crosses.

    `names`: some of STRATEGIES, all of them by default.
    """
    names = list(STRATEGIES) if names is None else list(names)
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        raise ValueError(f"unknown {unknown}: choose from {', '.join(STRATEGIES)}.")
    figure, (axes,) = canvas(1, 1.0 + 2.25 * ((len(names) + 1) // 2))
    for place, name in enumerate(names):
        _draw(axes, 17 * (place % 2), 8.6 * (place // 2), name)
    axes.set(xlim=(-0.4, 32.6), ylim=(8.6 * ((len(names) + 1) // 2) + 0.2, -0.6), aspect="equal")
    axes.set(xticks=[], yticks=[], xlabel=LEGEND)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    first = "Filled: what each rank holds. Arrows: what crosses between ranks"
    finish(figure, title, [first, *map(_in_words, names)], "map")
    figure.subplots_adjust(left=0.015, right=0.985)
    return figure


LEGEND = "batch: rows are samples, columns positions · model: rows are layers, columns their slices"
PARTS = {
    "whole": "all of the {}",
    "rows": {"batch": "half of the samples", "model": "half of the layers"},
    "columns": {"batch": "half of each sequence", "model": "half of every layer"},
    "first": "the {} on rank 0",
    "experts": "all shared layers and half of the experts",
}


def _in_words(name) -> str:
    batch, model, what, when = STRATEGIES[name]
    held = [
        PARTS[part][kind] if isinstance(PARTS[part], dict) else PARTS[part].format(kind)
        for kind, part in (("batch", batch), ("model", model))
    ]
    return f"{name}: each rank holds {held[0]}, {held[1]}; {what} cross {when}"


def _draw(axes, x, y, name) -> None:
    batch, model, what, when = STRATEGIES[name]
    axes.text(x, y, name, weight="bold", va="center")
    for rank in (0, 1):
        left = x + 8.6 * rank
        look = {"facecolor": "none", "edgecolor": DIM, "linewidth": 0.8}
        axes.add_patch(Rectangle((left, y + 0.8), 6.4, 4.6, **look))
        axes.text(left + 0.15, y + 1.35, f"rank {rank}", va="center")
        for start, part, kind in ((0.4, batch, "batch"), (3.4, model, "model")):
            _draw_grid(axes, left + start, y + 1.9, HALVES[part][rank], rank)
            axes.text(left + start + 1.3, y + 4.95, kind, ha="center", va="center", color=DIM)
    arrow = {"arrowstyle": "<|-|>", "mutation_scale": 14, "shrinkA": 1, "shrinkB": 1}
    arrow |= {"color": COMMUNICATION, "linewidth": 2}
    axes.add_patch(FancyArrowPatch((x + 6.4, y + 3.2), (x + 8.6, y + 3.2), **arrow))
    axes.text(x + 7.5, y + 6.1, f"{what}, {when}", ha="center", va="center", color=COMMUNICATION)


def _draw_grid(axes, left, top, held, rank) -> None:
    for row, column in ALL:
        mine = (row, column) in held
        color = RANK_COLORS[rank] if mine else PALE
        look = {"facecolor": color, "edgecolor": "#444444" if mine else "#BBBBBB", "linewidth": 0.8}
        axes.add_patch(Rectangle((left + 0.65 * column, top + 0.65 * row), 0.65, 0.65, **look))
