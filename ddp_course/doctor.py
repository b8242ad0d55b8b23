"""`ddp-course doctor`: what this machine can do, what that means, and how to mend what is off.

Each function judges facts handed to it; `report` reads them from this machine.
"""

import os
import platform
import sys
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import machine

OLDEST, NEWEST = (3, 11), (3, 14)
OLDEST_TORCH = (2, 6)
NOTEBOOK_BYTES = 500e6  # a kernel with torch
RANK_BYTES = 150e6  # one rank of a lesson, beyond what it shares with the others
REINSTALL_TORCH = "pip install --force-reinstall -c constraints.txt torch"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `level`: "ok", "note" (the course runs, but know this) or "FAIL"."""

    name: str
    text: str
    level: str = "ok"
    fix: str = ""

    def __str__(self):
        lines = textwrap.wrap(self.text, 80)
        lines += textwrap.wrap(self.fix, 80, initial_indent="fix: ", break_on_hyphens=False)
        return f"{self.level:<5} {self.name:<11} " + ("\n" + " " * 18).join(lines)


def python(version: tuple, prefix: str, base_prefix: str) -> Finding:
    text = f"{'.'.join(map(str, version[:3]))} in {prefix}"
    if prefix == base_prefix:
        text += ", which is no virtual environment"
    if version[:2] < OLDEST:
        fix = "install Python 3.11 to 3.14, remove .venv, and set up again"
        return Finding("Python", f"{text}: too old", "FAIL", fix)
    if version[:2] > NEWEST:
        return Finding("Python", f"{text}: newer than the course knows (3.14)", "note")
    return Finding("Python", text)


def pytorch(version: str, cuda: str | None) -> Finding:
    text = f"{version}, " + (f"built for CUDA {cuda}" if cuda else "built for the CPU")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return Finding("PyTorch", f"{text}: too old, 2.6 is needed", "FAIL", REINSTALL_TORCH)
    return Finding("PyTorch", text)


def kernel(command: str | None, python: str) -> Finding:
    """Whether a notebook's kernel is this Python, and so sees the same packages."""
    again = f"{python} -m ipykernel install --sys-prefix"
    if command is None:
        return Finding("Notebooks", "Jupyter has no python3 kernel to run them", "FAIL", again)
    folders = {os.path.normcase(os.path.dirname(os.path.abspath(p))) for p in (command, python)}
    if os.path.dirname(command) and len(folders) > 1:  # a bare "python" is JupyterLab's own
        return Finding("Notebooks", f"run in another Python than this: {command}", "note", again)
    return Finding("Notebooks", "run in this same Python")


def widgets(installed: bool) -> Finding:
    if installed:
        return Finding("Widgets", "JupyterLab can show sliders and live views")
    text = "JupyterLab lacks their extension: sliders and live views would appear as text"
    return Finding("Widgets", text, "note", "pip install --force-reinstall jupyterlab_widgets")


def cores(count: int, usable: float) -> Finding:
    text = f"{count} CPU core(s)" + (f", {usable:g} for this process" if usable < count else "")
    if usable < 2:
        fix = "give the container or virtual machine two cores, if it is one"
        return Finding("Cores", f"{text}: ranks take turns, so timings say little", "note", fix)
    return Finding("Cores", text)


def memory(free: float) -> Finding:
    count = max(0, int((free - NOTEBOOK_BYTES) / RANK_BYTES))
    text = f"{free / 1e9:.1f} GB free: the notebook, and "
    if count >= 8:
        return Finding("Memory", text + "as many small ranks as a lesson asks for (8)")
    level = "FAIL" if count < 2 else "note"
    text += f"{count} small rank(s); lessons use 2, a few ask for 4 or 8"
    return Finding("Memory", text, level, "close other programs and notebooks")


def gpus(usable: list[str], listed: int, cuda: str | None, visible: str | None) -> Finding:
    """`usable` by PyTorch, `listed` by the driver, `visible`: CUDA_VISIBLE_DEVICES."""
    if usable:
        return Finding("GPUs", ", ".join(usable))
    if not listed:
        return Finding("GPUs", "no NVIDIA GPU: everything runs on the CPU")
    text = f"{listed} NVIDIA GPU(s) that PyTorch cannot use: "
    if not cuda:
        fix = f"{REINSTALL_TORCH} (Windows: with the --index-url that pytorch.org names)"
        return Finding("GPUs", text + "this PyTorch is built for the CPU", "note", fix)
    if visible is not None and not _shows_a_gpu(visible, listed):
        text += f'CUDA_VISIBLE_DEVICES="{visible}" hides them'
        return Finding("GPUs", text, "note", "unset CUDA_VISIBLE_DEVICES")
    text += f"the driver is too old for CUDA {cuda}, or broken"
    return Finding("GPUs", text, "note", "update the NVIDIA driver")


def _shows_a_gpu(visible: str, listed: int) -> bool:
    """Whether CUDA_VISIBLE_DEVICES begins with one of the driver's: CUDA stops at the first other.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables". Names (GPU-…) may be any.
    """
    first = visible.split(",")[0].strip()
    return first.startswith(("GPU-", "MIG-")) or (first.isdigit() and int(first) < listed)


def ranks(gloo: bool, nccl: bool, gpu_count: int, usable_cores: float) -> Finding:
    """Where `launch(…, nproc=N)` puts its ranks, and how they talk."""
    if not gloo:
        text = "cannot talk: this PyTorch has no gloo"
        return Finding("Ranks", text, "FAIL", REINSTALL_TORCH)
    threads = max(1, int(usable_cores) // 2)
    if not gpu_count:
        text = f"run on the CPU and talk by gloo; two ranks get {threads} thread(s) each"
    elif nccl:
        text = f"up to {gpu_count}: a GPU each, by nccl; more: they share the GPU(s), by gloo"
    else:
        text = f"share {gpu_count} GPU(s) and talk by gloo: this PyTorch has no nccl"
    return Finding("Ranks", text)


def bf16(speed: float | None) -> Finding:
    """`speed` as a multiple of fp32's; None: the device cannot."""
    if speed is None:
        return Finding("bf16", "does not work on this device: use fp32", "note")
    return Finding("bf16", f"works; a matrix product runs at {speed:.3g} times fp32's speed here")


def fp16(speed: float | None, scaler: bool, device: str) -> Finding:
    if speed is None or not scaler:
        return Finding("fp16", "does not work with a GradScaler here: use bf16 or fp32", "note")
    text = f"works with a GradScaler; a matrix product runs at {speed:.3g} times fp32's speed here"
    if device == "cpu":
        text += ". Convolutions in fp16 are a trap on a CPU: hundreds of times slower"
    return Finding("fp16", text)


def shared_memory(size: int | None) -> Finding:
    if size is None:
        return Finding("/dev/shm", "this system has none and needs none")
    text = f"{size / 1e9:.2g} GB"
    if size < 256e6:
        text += ": DataLoader workers may die of a 'bus error' when it is full"
        return Finding("/dev/shm", text, "note", "docker run --shm-size=1g, or use no workers")
    return Finding("/dev/shm", f"{text} for batches from DataLoader workers")


def hostname(name: str, resolves: bool) -> Finding:
    if resolves:
        return Finding("Host name", f"{name} has an address")
    text = f"{name} has no address: under torchrun gloo may wait long or fail; launch does not"
    return Finding("Host name", text, "note", f'add the line "127.0.1.1 {name}" to /etc/hosts')


def temporary(folder: str | None, free: float) -> Finding:
    """`folder`: where Python puts temporary files, None if it can write to none; `free` bytes."""
    if folder is None:
        fix = "free some disk space, or set TMPDIR to a folder that you may write to"
        return Finding("Disk", "no folder for temporary files can be written to", "FAIL", fix)
    text = f"{free / 1e9:.1f} GB free in {folder}"
    if free < 1e9:
        text += ": checkpoints and traces may not fit"
        return Finding("Disk", text, "note", "free some, or set TMPDIR to a folder with more")
    return Finding("Disk", text)


def shadows(folder: str, files: Collection[str]) -> list[Finding]:
    """The files in `folder` that scripts and notebooks there may import instead of a module."""
    modules = sys.stdlib_module_names | {"torch", "numpy", "matplotlib", "ipywidgets", "ddp_course"}
    text = "may be imported instead of the module of that name"
    return [
        Finding("Folder", f"{name} in {folder} {text}", "note", f"rename it, {module}_mine.py say")
        for module in sorted(modules)
        if (name := f"{module}.py") in files
    ]


def wsl(release: str) -> list[Finding]:
    """`release` of the kernel, as `uname -r` prints it."""
    if "microsoft" not in release.lower():
        return []
    text = "Linux in Windows (WSL): has the cores and the memory that Windows gives it"
    fix = "if too few: processors= and memory= under [wsl2] in .wslconfig, then wsl --shutdown"
    return [Finding("WSL", text, "note", fix)]


def loopback(works: bool) -> Finding:
    if works:
        return Finding("Loopback", "127.0.0.1 works: ranks on this machine can meet")
    text = "nothing gets through 127.0.0.1: ranks cannot meet"
    return Finding("Loopback", text, "FAIL", "ip link set lo up; let the firewall pass loopback")


def variables(environment: Mapping[str, str], prefix: str) -> list[Finding]:
    """The environment variables that change what ranks do."""
    found = []

    def note(name, text, fix=""):
        found.append(Finding("Variables", f"{name}={environment[name]}: {text}", "note", fix))

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name in environment:
            note(name, "a script takes itself for one of torchrun's ranks", f"unset {name}")
    if environment.get("GLOO_SOCKET_IFNAME", "").startswith("^"):
        text = "excluding with ^ is nccl's syntax; gloo finds no such interface under torchrun"
        note("GLOO_SOCKET_IFNAME", text, "export GLOO_SOCKET_IFNAME=lo (one machine)")
    if "OMP_NUM_THREADS" in environment:
        text = "every rank uses that many threads, whatever the cores"
        note("OMP_NUM_THREADS", text, "unset OMP_NUM_THREADS")
    if environment.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
        note("TORCH_DISTRIBUTED_DEBUG", "checks every collective: slow, and may crash DDP")
    venv = environment.get("VIRTUAL_ENV")
    if venv and os.path.realpath(venv) != os.path.realpath(prefix):
        note("VIRTUAL_ENV", "notebooks would import packages from there", "deactivate")
    return found or [Finding("Variables", "none set that changes what ranks do")]


def _speed(dtype: torch.dtype, device: str) -> float | None:
    try:
        return machine.matmul_speed(dtype, device)
    except RuntimeError:
        return None


def _scaler(device: str) -> bool:
    try:
        return machine.scaler_works(device)
    except RuntimeError:
        return False


def report() -> list[Finding]:
    """Look at this machine; takes a few seconds. No process group is needed."""
    import socket

    usable_gpus = machine.torch_gpus()
    device = "cuda" if usable_gpus else "cpu"
    count, usable = machine.cores()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available()
    return [
        python(sys.version_info[:3], sys.prefix, sys.base_prefix),
        pytorch(torch.__version__, torch.version.cuda),
        kernel(machine.kernel_command(), sys.executable),
        widgets(machine.has_widget_extension()),
        cores(count, usable),
        memory(machine.free_memory()),
        gpus(usable_gpus, machine.driver_gpus(), torch.version.cuda, visible),
        ranks(gloo, nccl, len(usable_gpus), usable),
        bf16(_speed(torch.bfloat16, device)),
        fp16(_speed(torch.float16, device), _scaler(device), device),
        shared_memory(machine.shared_memory()),
        hostname(socket.gethostname(), machine.hostname_resolves()),
        loopback(machine.loopback_works()),
        temporary(*machine.temporary_space()),
        *wsl(platform.release()),
        *shadows(os.getcwd(), os.listdir()),
        *variables(os.environ, sys.prefix),
    ]


def main() -> int:
    """Print the report; 0 if the course can run here, 1 if not."""
    findings = report()
    print(*findings, sep="\n")
    failed = [finding.name for finding in findings if finding.level == "FAIL"]
    notes = sum(finding.level == "note" for finding in findings)
    if failed:
        print(f"\nThe course cannot run here yet. First mend: {', '.join(failed)}.")
        return 1
    print("\nThe course can run here" + (f"; {notes} note(s) above." if notes else "."))
    return 0
