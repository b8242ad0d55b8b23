"""The same work on N ranks by each launcher, as cells of a notebook.

`Launcher.setup` is a cell that defines `go(n)`, which runs `work()` on n ranks with the process
group up and returns what rank 0 returned. `work` is text, in a file beside the notebook: torch's
spawn and torchrun cannot take a function from a cell.
"""

# ruff: noqa: F821 - the bodies of cells use names that COMMON defines

import importlib.util
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path

from .cases import COURSE

# ---- the file work.py, beside the notebook

ON_RANKS = """
import os, sys, time
import torch, torch.distributed as dist
import torch.multiprocessing

{work}

def with_group(results=None, **place):
    dist.init_process_group("gloo", **place)
    value = work()
    if dist.get_rank() == 0 and results is not None:
        results.put(value)
    dist.barrier()
    dist.destroy_process_group()
    return value

def on_rank(rank, n, port, results):
    with_group(results, init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=n)

def on_engine(rank, n, port):
    return with_group(init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=n)

if __name__ == "__main__":
    value = with_group()
    if os.environ["RANK"] == "0":
        print("VALUE", value)
"""

# ---- cells

COMMON = """
import socket, subprocess, sys, time
import torch, torch.distributed as dist, torch.multiprocessing
import work as on_ranks

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
"""
TRAINED = """
torch.set_num_threads(max(2, torch.get_num_threads()))
model = torch.nn.Linear(512, 512)
for _ in range(5):
    model(torch.randn(512, 512)).sum().backward()
"""


def course():
    from ddp_course import launch

    def go(n):
        return launch(on_ranks.work, nproc=n).values[0]


def spawn():
    def go(n):
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        torch.multiprocessing.spawn(on_ranks.on_rank, (n, free_port(), results), nprocs=n)
        return results.get()


def torchrun():
    def go(n):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run += ["--nproc-per-node", str(n), "work.py"]
        told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        return float(told.rpartition("VALUE")[2])


def accelerate():
    from accelerate import notebook_launcher

    def go(n):
        results = torch.multiprocessing.get_context("fork").SimpleQueue()
        how = {"num_processes": n, "use_port": str(free_port())}
        notebook_launcher(on_ranks.with_group, (results,), **how)
        return results.get()


def fabric():
    import logging

    from lightning_fabric import Fabric

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)

    def go(n):
        fabric = Fabric(accelerator="cpu", devices=n, strategy="ddp_notebook")
        return fabric.launch(lambda fabric: on_ranks.work())


def ipyparallel_cold():
    import ipyparallel

    def go(n):
        with ipyparallel.Cluster(n=n, log_level=40) as engines:
            ranks = list(range(n))
            return engines[:].map_sync(on_ranks.on_engine, ranks, [n] * n, [free_port()] * n)[0]


def ipyparallel_warm():
    import ipyparallel

    engines = ipyparallel.Cluster(n=4, log_level=40).start_and_connect_sync()

    def go(n):
        ranks = list(range(n))
        return engines[:n].map_sync(on_ranks.on_engine, ranks, [n] * n, [free_port()] * n)[0]


@dataclass(frozen=True)
class Launcher:
    name: str
    cell: object  # the function whose body is the cell
    package: str = "torch"
    forks: bool = False  # forks the kernel itself, whatever threads it has

    @property
    def there(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def setup(self) -> str:
        lines = inspect.getsource(self.cell).splitlines()[1:]
        return COMMON + textwrap.dedent("\n".join(lines))


LAUNCHERS = [
    Launcher(COURSE, course),
    Launcher("torch.multiprocessing.spawn", spawn),
    Launcher("torchrun", torchrun),
    Launcher("accelerate notebook_launcher", accelerate, "accelerate", forks=True),
    Launcher("Fabric ddp_notebook", fabric, "lightning_fabric", forks=True),
    Launcher("ipyparallel, cold", ipyparallel_cold, "ipyparallel"),
    Launcher("ipyparallel, engines warm", ipyparallel_warm, "ipyparallel"),
]


def available(names=None) -> tuple[list[Launcher], list[str]]:
    """Return the launchers that are installed, of these names, and a line for each that is not."""
    wanted = [launcher for launcher in LAUNCHERS if names is None or launcher.name in names]
    missing = [
        f"{launcher.name}: left out, {launcher.package} is not installed "
        '(pip install -c constraints.txt -e ".[peers]")'
        for launcher in wanted
        if not launcher.there
    ]
    return [launcher for launcher in wanted if launcher.there], missing


def write_work(folder: Path, work: str) -> None:
    """Write the file with `work`, the text of a function of no arguments."""
    (folder / "work.py").write_text(ON_RANKS.format(work=work))
