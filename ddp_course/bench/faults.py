"""From a rank's failure to the message in the notebook, and what is left running."""

import tempfile
from pathlib import Path

from .cases import Case, Goal
from .kernel import kernel
from .launchers import available, write_work

# Rank 0 waits in an all-reduce for rank 1, which fails.
WORK = """
def work():
    open("pid%d" % dist.get_rank(), "w").write(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        open("failed", "w").write(str(time.time()))
        {failure}
    dist.all_reduce(torch.ones(1))
"""
FAILURES = {
    "an exception": 'raise ValueError("the data of this rank")',
    "a kill": "os.kill(os.getpid(), 9)",
}
CELL = """
import time, psutil

def alive():
    return sum(psutil.pid_exists(int(open(f"pid{rank}").read())) for rank in range(2))

try:
    go(2)
    raise SystemExit("the failure was not told")
except Exception as error:
    told = time.time()
left = alive()
"""


def measure(rounds: int, say) -> list[Case]:
    """Return two cases for each failure: seconds to the message, and ranks left then."""
    launchers, missing = available()
    launchers = [one for one in launchers if not one.name.startswith("ipyparallel")]
    cases = []
    for failure, code in FAILURES.items():
        seconds = Case(f"{failure} on rank 1: to the message", "s", goals=[Goal(1)])
        left = Case(f"{failure} on rank 1: ranks left at the message", "ranks", goals=[Goal(0)])
        cases += [seconds, left]
        with tempfile.TemporaryDirectory() as folder:
            write_work(Path(folder), WORK.format(failure=code))
            for launcher in launchers * rounds:
                say(f"{failure}: {launcher.name}")
                with kernel(folder) as live:
                    live.run(launcher.setup, timeout=180)
                    hung = live.number(f"exec({CELL!r}, globals()) or told", 60) is None
                    failed = float(Path(folder, "failed").read_text())
                    seconds.add(launcher.name, None if hung else live.number(f"told - {failed}"))
                    left.add(launcher.name, None if hung else live.number("left"))
    cases[0].notes += missing
    return cases
