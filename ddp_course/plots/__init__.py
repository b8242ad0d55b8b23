"""The figures of the course: each function returns a `Picture` that shows itself in a notebook.

drawing       what colours, shapes and lines mean, and how a figure is made
records       what ranks reported, as curves
curves        loss, loss scale, throughput, runs side by side
prediction    what was predicted beside what was measured
drift         how far apart ranks' weights are, by step
timeline      what each rank computes, and what is on the wire meanwhile
accumulated   accumulation against the big batch; placements of no_sync
formats       gradients against the range of a number format
grids         heat maps of what ranks hold, before and after; when each of them ran
ledger        memory of one GPU, part by part or strategy by strategy
strategies    what each rank holds under each strategy, and what crosses
indices       which rank sees which sample
ring          the ring all-reduce by steps
cost          time of a collective against its bytes
"""

from .accumulated import accumulated, placements
from .cost import time_against_bytes
from .curves import compare, loss, loss_scale, summary, throughput
from .drawing import Picture, rank_style, show
from .drift import drift
from .formats import gradient_histogram
from .grids import before_after, turns
from .indices import index_grid
from .ledger import memory_ledger
from .prediction import prediction
from .ring import ring, ring_slider, ring_strip
from .strategies import strategies
from .timeline import timeline

__all__ = [
    "Picture",
    "accumulated",
    "before_after",
    "compare",
    "drift",
    "gradient_histogram",
    "index_grid",
    "loss",
    "loss_scale",
    "memory_ledger",
    "placements",
    "prediction",
    "rank_style",
    "ring",
    "ring_slider",
    "ring_strip",
    "show",
    "strategies",
    "summary",
    "throughput",
    "time_against_bytes",
    "timeline",
    "turns",
]
