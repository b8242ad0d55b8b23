"""Facts about this machine, measured or read: what `doctor` judges. No opinions here."""

import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def cores(root: Path = CGROUP) -> tuple[int, float]:
    """CPU cores of the machine, and how many of them this process may use (affinity, container)."""
    count = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return count, min(usable, _cgroup_limit(root / "cpu.max") or usable)


def free_memory(root: Path = CGROUP) -> float:
    """Bytes that new processes can still have; within a container, what its limit leaves."""
    free = psutil.virtual_memory().available
    limit, used = (_cgroup_limit(root / name) for name in ("memory.max", "memory.current"))
    return min(free, limit - (used or 0)) if limit else free


def _cgroup_limit(file: Path) -> float | None:
    """The value of a cgroup file, for cpu.max quota / period; None for "max" or no such file."""
    try:
        value, *period = file.read_text().split()
        return None if value == "max" else float(value) / float(period[0] if period else 1)
    except (OSError, ValueError):
        return None


def temporary_space() -> tuple[str | None, float]:
    """The folder for temporary files, None if none can be written to, and its free bytes."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return None, 0.0
    return folder, shutil.disk_usage(folder).free


def shared_memory() -> int | None:
    """Bytes of /dev/shm, through which DataLoader workers hand over batches; None: has none."""
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None


def driver_gpus() -> int:
    """How many GPUs NVIDIA's driver lists, whatever PyTorch makes of them."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def torch_gpus() -> list[str]:
    """Name and memory of each GPU that PyTorch can use."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in found]


def kernel_command() -> str | None:
    """The program that Jupyter starts for a `python3` notebook; None: it knows no such kernel."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        return KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return None


def has_widget_extension() -> bool:
    """Whether JupyterLab has the part of ipywidgets that draws them."""
    from jupyter_core.paths import jupyter_path

    manager = Path("@jupyter-widgets", "jupyterlab-manager")
    return any((Path(place) / manager).is_dir() for place in jupyter_path("labextensions"))


def hostname_resolves(seconds: float = 3) -> bool:
    """Whether this machine's own name leads to an address, and soon."""
    found = []
    look_up = threading.Thread(
        target=lambda: found.extend(_addresses(socket.gethostname())), daemon=True
    )
    look_up.start()
    look_up.join(seconds)
    return bool(found)


def _addresses(name: str) -> list:
    try:
        return socket.getaddrinfo(name, None)
    except OSError:
        return []


def loopback_works() -> bool:
    """Whether a byte sent to 127.0.0.1 comes back out."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=3) as client:
                client.sendall(b"x")
            with server.accept()[0] as end:
                end.settimeout(3)
                return end.recv(1) == b"x"
    except OSError:
        return False


def matmul_speed(dtype: torch.dtype, device: str) -> float:
    """Speed of a matrix product in `dtype` as a multiple of fp32's; RuntimeError: cannot do it."""
    size = 2048 if device == "cuda" else 512
    a = torch.randn(size, size, device=device)
    low = a.to(dtype)
    return _seconds(lambda: a @ a, device) / _seconds(lambda: low @ low, device)


def _seconds(work: Callable, device: str, repeats: int = 7) -> float:
    """Median time of `work`, after a warm-up; waits for the GPU, which runs on by itself."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def scaler_works(device: str) -> bool:
    """Whether a GradScaler takes an fp16 step, and skips one that overflowed, halving its scale."""
    model = torch.nn.Linear(8, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    moved = []
    for x in (1.0, float("inf")):
        before = model.weight.detach().clone()
        with torch.amp.autocast(device, dtype=torch.float16):
            loss = model(torch.full((4, 8), x, device=device)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, model.weight))
    return moved == [True, False] and scaler.get_scale() == 512.0
