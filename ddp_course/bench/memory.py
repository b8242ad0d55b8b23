"""What ranks and the notebook hold, by launcher, while the ranks are there."""

import json
import tempfile
from pathlib import Path

import psutil

from .cases import Case, Goal
from .kernel import kernel
from .launchers import COMMON, TRAINED, available, write_work

# Proportional set size: a page that k processes share counts 1/k for each, so that a sum is what
# the machine has to hold. The kernel alone: its resident size, since its share of a page says more
# about who else has touched it.
WORK = """
def work():
    import json, psutil
    total = torch.ones(100_000).exp().log().mean()
    dist.all_reduce(total)
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, os.getpid())
    if dist.get_rank() == 0:
        from ddp_course.bench.kernel import MARK, marked
        held = {p.pid: p.memory_full_info().pss / 1e6 for p in marked(os.environ[MARK])}
        with open("held.json", "w") as file:
            json.dump({"ranks": ranks, "held": held}, file)
    dist.barrier()
    return round(total.item(), 3)
"""
SPAWN = "torch.multiprocessing.spawn"
# At most 1.0 times spawn's. A kernel with this course's modules in it cannot hold less than one
# without them: that one counts to the first decimal.
PLACES = {"a rank": 1, "the notebook's kernel": 1 / 1.05, "everything together": 1}


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each place that memory is held in, on 2 and on 4 ranks."""
    launchers, missing = available()
    cases = {
        (n, place): Case(f"memory of {place}, {n} ranks", "MB", goals=[Goal(bound, SPAWN)])
        for n in (2, 4)
        for place, bound in PLACES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder), WORK)
        for launcher in launchers * rounds:
            if launcher.forks:
                continue  # hangs in a kernel that has trained
            with kernel(folder) as live:
                live.run(f"{COMMON}\n{TRAINED}\n{launcher.setup}", timeout=180)
                for n in (2, 4):
                    say(f"memory: {launcher.name}, {n} ranks")
                    live.run(f"go({n})", timeout=180)
                    held = _held(Path(folder, "held.json"), live.pid)
                    for place, megabytes in zip(PLACES, held, strict=True):
                        cases[n, place].add(launcher.name, megabytes)
    forks = [launcher.name for launcher in launchers if launcher.forks]
    left_out = [f"{name}: left out, it hangs in a kernel that has trained" for name in forks]
    next(iter(cases.values())).notes += missing + left_out
    return list(cases.values())


def _held(file: Path, kernel: int) -> tuple[float, float, float]:
    told = json.loads(file.read_text())
    held = {int(pid): megabytes for pid, megabytes in told["held"].items()}
    ranks = [held[pid] for pid in told["ranks"]]
    resident = psutil.Process(kernel).memory_info().rss / 1e6
    return sum(ranks) / len(ranks), resident, sum(held.values())
