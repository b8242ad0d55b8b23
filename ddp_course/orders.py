"""What each rank is told before its work: its place, its environment, the notebook's folder."""

import os
import sys

from . import flight
from .process_group import threads_per_rank


def order(number: int, nproc: int, port: int, backend: str) -> dict:
    """Return what rank `number` of `nproc` is to take over from the notebook; its store is at
    `port` of this machine."""
    return {
        "environment": _environment(number, nproc, port, backend),
        "path": [str(folder) for folder in sys.path],
        "argv": sys.argv[:1],
        "folder": _folder(),
        "threads": threads_per_rank(nproc),
    }


def _environment(number: int, nproc: int, port: int, backend: str) -> dict[str, str]:
    """Return the variables of a rank: the notebook's, and those that torchrun would set."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {
        "TORCH_FR_BUFFER_SIZE": flight.BUFFER,
        **os.environ,
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),  # for silent DNS
        "USE_LIBUV": "0" if sys.platform == "win32" else "1",
        "DDP_COURSE_BACKEND": backend,
        # one machine: loopback, whatever the host name resolves to
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # deleted under the notebook
        return os.path.expanduser("~")
