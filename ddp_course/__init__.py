"""Helpers for an interactive course on distributed training in PyTorch.

launch          run a function on N fresh ranks from a notebook cell
report          stream a record from a rank to the notebook
dials           numbers in the ranks that the notebook can change while they run
process_group   the process group as a context manager, under torchrun as well
this_rank       rank, local rank, world size, device
"""

import sys

from . import fork_server, processes

if "ipykernel" in sys.modules and processes.can_fork():
    fork_server.client.start()  # in the background, while the kernel imports torch

from .dials import dials
from .errors import HangError, OrderError, RankError
from .launch import Run, launch
from .process_group import process_group, this_rank
from .rank import report

__all__ = [
    "HangError",
    "OrderError",
    "RankError",
    "Run",
    "dials",
    "launch",
    "process_group",
    "report",
    "this_rank",
]
