"""The figures of the course: each function returns a `Picture` that shows itself in a notebook.

drawing       what colours, shapes and lines mean, and how a figure is made
records       what ranks reported, as curves
curves        loss, loss scale, throughput, runs side by side
prediction    what was predicted beside what was measured
"""

from .curves import compare, loss, loss_scale, summary, throughput
from .drawing import Picture, rank_style, show
from .prediction import prediction

__all__ = [
    "Picture",
    "compare",
    "loss",
    "loss_scale",
    "prediction",
    "rank_style",
    "show",
    "summary",
    "throughput",
]
