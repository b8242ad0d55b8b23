"""What ranks tell of themselves and measure of each other, when nothing may work yet.

They talk through torchrun's store, which is there as soon as they have found each other; only
`link` needs a process group. `cluster` judges what comes of it.
"""

import contextlib
import hashlib
import json
import os
import platform
import socket
import statistics
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from . import data
from .process_group import Rank

PATIENCE = 20.0  # seconds for a rank to tell of itself
CONNECT = 3.0  # seconds for a connection to another host
MESSAGE = 8 << 20  # bytes whose transfer gives the bandwidth
ROUNDS = 20  # of one number there and back: the median gives the latency


@dataclass(frozen=True)
class Facts:
    """What one rank tells of itself."""

    rank: int
    node: int  # of torchrun
    host: str
    address: str  # that gloo would offer to the other ranks
    interfaces: dict[str, str]  # name: address, without loopback
    port: int  # on which this rank waits for the others to try
    backend: str
    versions: dict[str, str]
    digests: dict[str, str]


def facts(me: Rank, port: int) -> Facts:
    """Return what this rank tells of itself."""
    return Facts(
        rank=me.rank,
        node=int(os.environ.get("GROUP_RANK", 0)),
        host=socket.gethostname(),
        address=gloo_address(os.environ.get("GLOO_SOCKET_IFNAME", "")),
        interfaces=_interfaces(),
        port=port,
        backend=me.backend,
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "the course's code": _digest(*sorted(Path(__file__).parent.rglob("*.py"))),
        },
        digests={"digits": _digest_of(data.digits()), "text": _digest_of(data.characters())},
    )


def gloo_address(interface: str) -> str:
    """Return the address that gloo offers to other ranks; "" if there is none.

    That of the interface GLOO_SOCKET_IFNAME, else what the host's own name resolves to.
    """
    if interface:
        return _interfaces(loopback=True).get(interface.split(",")[0], "")
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def _interfaces(loopback: bool = False) -> dict[str, str]:
    found = {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    return {name: a for name, a in found.items() if loopback or not a.startswith("127.")}


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _digest_of(sets) -> str:
    whole = hashlib.sha256()
    for part in sets:
        tensors = part.tensors if hasattr(part, "tensors") else (part.data,)
        for tensor in tensors:
            whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()[:12]


def named(told: list[Facts]) -> list[Facts]:
    """Return the facts with a name of its own for each node: two may have the same host name."""
    nodes = {host: {fact.node for fact in told if fact.host == host} for host in host_names(told)}
    return [
        replace(fact, host=f"{fact.host} (node {fact.node})") if len(nodes[fact.host]) > 1 else fact
        for fact in told
    ]


class Absent(RuntimeError):
    """A rank has told nothing in time."""


def exchange(store, me: Rank, name: str, value) -> list:
    """Return every rank's value, by rank; raise Absent for one that does not tell."""
    store.set(f"cluster/{name}/{me.rank}", json.dumps(value))
    found = []
    for rank in range(me.world_size):
        try:
            store.wait([f"cluster/{name}/{rank}"], timedelta(seconds=PATIENCE))
        except RuntimeError:  # DistStoreError
            raise Absent(f"rank {rank} told nothing of itself for {PATIENCE:g} s") from None
        found.append(json.loads(store.get(f"cluster/{name}/{rank}")))
    return found


def offset(store, me: Rank) -> float:
    """Return how far this rank's clock is ahead of rank 0's, as NTP would find it (Mills, 1991)."""
    ahead = 0.0
    for rank in range(1, me.world_size):  # one after another: rank 0 answers at once
        ask, answer = f"cluster/ask/{rank}", f"cluster/answer/{rank}"
        if me.rank == 0:
            store.wait([ask], timedelta(seconds=PATIENCE))
            store.set(answer, repr(time.time()))
        elif me.rank == rank:
            began = time.time()
            store.set(ask, "")
            store.wait([answer], timedelta(seconds=PATIENCE))
            ahead = (began + time.time()) / 2 - float(store.get(answer))
    return ahead


def unreached(mine: Facts, told: list[Facts]) -> list[int]:
    """Return the ranks, one a host, to which this one cannot open a connection."""
    missed = []
    for other in first_of_each(told):
        if other.node != mine.node and other.address:
            try:
                socket.create_connection((other.address, other.port), timeout=CONNECT).close()
            except OSError:
                missed.append(other.rank)
    return missed


def host_names(told: list[Facts]) -> list[str]:
    return list(dict.fromkeys(fact.host for fact in told))


def first_of_each(told: list[Facts]) -> list[Facts]:
    return [next(fact for fact in told if fact.host == host) for host in host_names(told)]


def link(a: Facts, b: Facts) -> tuple[float, float]:
    """Return (seconds, bits per second) one way between two ranks, the same on every rank.

    Every rank must call it, with the process group up.
    """
    seconds = torch.zeros(2, dtype=torch.float64)
    if dist.get_rank() in (a.rank, b.rank):
        peer = b.rank if dist.get_rank() == a.rank else a.rank
        small = [_there_and_back(torch.zeros(1), peer, a.rank) for _ in range(ROUNDS)]
        large = [_there_and_back(torch.zeros(MESSAGE // 4), peer, a.rank) for _ in range(3)]
        seconds[0], seconds[1] = statistics.median(small) / 2, min(large) / 2
    dist.broadcast(seconds, a.rank)
    latency, transfer = seconds.tolist()
    return latency, 8 * MESSAGE / max(1e-9, transfer - latency)


def _there_and_back(tensor, peer: int, first: int) -> float:
    start = time.perf_counter()
    if dist.get_rank() == first:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    else:
        dist.recv(tensor, peer)
        dist.send(tensor, peer)
    return time.perf_counter() - start
