"""All-reduce along a ring by hand, gloo's, and, as the limit, copying memory."""

import torch
import torch.distributed as dist

from ..collectives import bus_bandwidth, ring_all_reduce
from ..launch import launch
from .cases import COURSE, Case, Goal, seconds_on_ranks

GLOO, COPY = "gloo's all_reduce", "a copy in memory"
SIZES = {"1 KB": 2**10, "16 KB": 2**14, "256 KB": 2**18, "4 MB": 2**22, "64 MB": 2**26}
RANKS = 2


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each size, in GB/s of bus bandwidth; for the copy, in bytes copied."""
    cases = []
    for size, nbytes in SIZES.items():
        say(f"all-reduce of {size}")
        seconds = launch(contest, nbytes, rounds, nproc=RANKS, timeout=600).values[0]
        case = Case(f"all-reduce of {size}, {RANKS} ranks", "GB/s", more_is_better=True)
        for name, took in seconds.items():
            for one in took:
                moved = nbytes / one if name == COPY else bus_bandwidth(nbytes, one, RANKS)
                case.add(name, moved / 1e9)
        cases.append(case)
    cases[-1].goals.append(Goal(0.5, GLOO))
    return cases


def contest(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of one all-reduce and of one copy. Every rank must call it."""
    torch.set_num_threads(1)
    tensor, target = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
    contenders = {
        COURSE: lambda: ring_all_reduce(tensor),
        GLOO: lambda: dist.all_reduce(tensor),
        COPY: lambda: target.copy_(tensor),
    }
    return seconds_on_ranks(contenders, rounds)
