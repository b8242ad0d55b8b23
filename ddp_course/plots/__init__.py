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
strategy_choice  GPUs for one copy of a model, as published and as chosen
indices       which rank sees which sample
ring          the ring all-reduce by steps
cost          time of a collective against its bytes
scaling       speed-up by ranks; time of a step by bandwidth and by number of buckets
waits         the last collectives of each rank, and who never came
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
from .scaling import bucket_sweep, slow_link, speedup
from .strategies import strategies
from .strategy_choice import strategy_choice
from .timeline import timeline
from .waits import waits

__all__ = [
    "Picture",
    "accumulated",
    "before_after",
    "bucket_sweep",
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
    "slow_link",
    "speedup",
    "strategies",
    "strategy_choice",
    "summary",
    "throughput",
    "time_against_bytes",
    "timeline",
    "turns",
    "waits",
]
