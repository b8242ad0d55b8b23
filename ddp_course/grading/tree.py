"""The processes of a submission, from the outside: who they are, what they use, and their end."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass

MOST_PROCESSES = 64
PATIENCE = 10  # seconds to kill all
MOST_MEMORY = 8 << 30  # bytes, resident, of all processes
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Process:
    """One line of the table of processes."""

    pid: int
    parent: int
    session: int
    started: int  # with the pid, it names a process for good
    memory: int  # bytes, resident
    user: int
    name: str
    alive: bool  # no zombie


def table() -> dict[int, Process]:
    """Return all processes of this machine (Linux), by pid."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                text = file.read().decode(errors="replace")
            with open(f"/proc/{pid}/status", "rb") as file:
                user = int(file.read().partition(b"\nUid:")[2].split()[0])
        except (OSError, IndexError):  # it has just ended
            continue
        head, _, tail = text.rpartition(")")  # the name may hold brackets
        f = tail.split()
        facts = int(f[1]), int(f[3]), int(f[19]), int(f[21]) * _PAGE
        found[int(pid)] = Process(int(pid), *facts, user, head.partition("(")[2], f[0] not in "ZX")
    return found


def descendants(roots: set[int], processes: dict[int, Process]) -> set[int]:
    """Return the pids below `roots`, without these."""
    children = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found, queue = set(), list(roots)
    while queue:
        new = set(children.get(queue.pop(), ())) - found
        found |= new
        queue += new
    return found


def left_behind(ranks: set[int]) -> list[str]:
    """Return the names of processes that ranks started and that went their own way.

    Such as a daemon in a session of its own. A helper that is still a child of its rank, as those
    of a DataLoader are, is none.
    """
    processes = table()
    guardians = {processes[rank].parent for rank in ranks if rank in processes}
    away = set()
    for pid in descendants(guardians, processes) - ranks:
        process = processes[pid]
        if process.alive and (process.session not in ranks or process.parent in guardians):
            away.add(process.name)
    return sorted(away)


class Tree:
    """All processes below one examiner, wherever they went.

    `user` is its own, if it has one; `nursery` is the one child of this process that is no orphan.
    """

    def __init__(self, root: int, user: int | None, nursery: int):
        self.root, self.user, self._nursery = root, user, nursery
        self._seen = set()
        self._since = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))

    def members(self) -> list[Process]:
        """Return those that live; remembers them, for when they are nobody's children any more."""
        processes = table()
        found = descendants({self.root}, processes) | {self.root}
        found |= {p.pid for p in processes.values() if (p.pid, p.started) in self._seen}
        found |= {p.pid for p in processes.values() if self._is_ours(p)}
        found |= descendants(found, processes)
        alive = [processes[pid] for pid in found if pid in processes and processes[pid].alive]
        self._seen |= {(p.pid, p.started) for p in alive}
        return alive

    def _is_ours(self, process: Process) -> bool:
        """Say whether it is of our user or, without one, a child of this process by adoption."""
        if self.user:
            return process.user == self.user
        adopted = process.parent == os.getpid() and process.started >= self._since
        return adopted and process.pid != self._nursery

    def too_much(self) -> str | None:
        """Say what is more than allowed, or None."""
        members = self.members()
        if len(members) > MOST_PROCESSES:
            return f"it started more than {MOST_PROCESSES} processes"
        if sum(p.memory for p in members) > MOST_MEMORY:
            return f"its processes took more than {MOST_MEMORY >> 30} GiB of memory"
        return None

    def kill(self, grace: float = 0) -> list[str]:
        """Kill them all; return the names of those that live on `grace` seconds after the root.

        With the root ends what belongs to it, at once, on a machine that is not too busy.
        """
        self.members()
        self._send({self.root})
        start, strays = time.monotonic(), set()
        while members := self.members():
            spent = time.monotonic() - start
            if spent > grace:
                strays |= {p.name for p in members if p.pid != self.root}
                if self.user:  # all at once: nothing can fork away
                    self._as_user("kill -9 -1")
                self._send({p.pid for p in members})
            self._reap()
            if spent > grace + PATIENCE:
                break
            time.sleep(0.02)
        self._reap()
        return sorted(strays)

    def _as_user(self, command: str) -> None:
        own = {"user": self.user, "group": self.user, "extra_groups": []}
        subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.DEVNULL, **own)

    def _send(self, pids):
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Take leave of processes that have become our children because their parents ended."""
        for pid, _ in self._seen:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
