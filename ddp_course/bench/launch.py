"""From the call in a cell to the sum of an all-reduce on rank 0, by each launcher."""

import contextlib
import tempfile
from pathlib import Path

from .cases import Case, Goal
from .kernel import kernel
from .launchers import TRAINED, available, write_work

# With an operation that uses all threads, as training does: in a fork of a kernel that has used
# them it never ends.
WORK = """
def work():
    total = torch.ones(100_000).exp().log().mean()
    dist.all_reduce(total)
    return round(total.item(), 3)
"""
TIMED = """
def timed(n):
    began = time.perf_counter()
    assert go(n) == n
    return time.perf_counter() - began
"""
IMPORT = "began = __import__('time').perf_counter(); import torch"
PATIENCE = 30  # seconds until a launch counts as hung
AT_LEAST = [Goal(30, "torch.multiprocessing.spawn"), Goal(30, "torchrun")]
FORKS = [Goal(1, "accelerate notebook_launcher"), Goal(1, "Fabric ddp_notebook")]


def measure(rounds: int, say) -> list[Case]:
    """Return a case for first launches and for later ones, on 2 and 4 ranks, in both states."""
    with tempfile.TemporaryDirectory() as folder:
        write_work(Path(folder), WORK)
        launchers, missing = available()
        cases = [_first(rounds, folder, launchers, say)]
        for state, before in (("only torch imported", ""), ("has trained a model", TRAINED)):
            cases += _later(rounds, folder, launchers, state, before, say)
    cases[0].notes += missing
    return cases


def _first(rounds, folder, launchers, say) -> Case:
    """Time the first launch of a fresh kernel, from after the imports, and one import of torch."""
    case = Case("first launch in a kernel, 2 ranks", "s", goals=[Goal(1 / 1.2, "import torch")])
    for _ in range(rounds):
        for launcher in launchers:
            with kernel(folder) as live:
                say(f"{case.name}: {launcher.name}")
                code = f"{launcher.setup}\n{TIMED}\nfirst = timed(2)"
                live.run(code, timeout=180)
                case.add(launcher.name, live.number("first"))
        with kernel(folder) as live:
            live.run(f"{IMPORT}; took = __import__('time').perf_counter() - began")
            case.add("import torch", live.number("took"))
    return case


def _later(rounds, folder, launchers, state, before, say) -> list[Case]:
    """Time later launches, all launchers in turns, each in a kernel of its own."""
    goals = AT_LEAST + FORKS
    name = "later launches, {} ranks, kernel {}"
    cases = {n: Case(name.format(n, state), "s", goals=goals) for n in (2, 4)}
    with contextlib.ExitStack() as stack:
        kernels = {}
        for launcher in launchers:
            live = kernels[launcher.name] = stack.enter_context(kernel(folder))
            live.run(f"{launcher.setup}\n{TIMED}\n{before}", timeout=180)
            if live.number("timed(2)", timeout=PATIENCE) is None:
                kernels[launcher.name] = None
        for turn in range(rounds):
            for n, case in cases.items():
                for name, live in kernels.items():
                    say(f"{case.name}: round {turn + 1}, {name}")
                    case.add(name, live and live.number(f"timed({n})", PATIENCE))
    return list(cases.values())
