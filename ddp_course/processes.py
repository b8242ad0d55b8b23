"""Start ranks and end them: forked in milliseconds on Linux, as new interpreters elsewhere.

Either way the notebook holds three pipes a rank (work and commands in, messages out, output out),
learns of every exit, and `kill` leaves nothing behind.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

from . import fork_server


def can_fork() -> bool:
    """Return whether ranks are forked here. DDP_COURSE_START=spawn forces new interpreters."""
    return sys.platform == "linux" and os.environ.get("DDP_COURSE_START") != "spawn"


def start(nproc: int):
    """Start `nproc` ranks that wait for their work; return an object to drive and to kill them."""
    return (ForkedRanks if can_fork() else SpawnedRanks)(nproc)


PATIENCE = 5  # seconds for a guardian to kill its ranks
NO_GUARDIAN = (
    "the ranks could not be started, or were all killed from outside: is there memory for them, "
    "and does this machine allow so many processes (ulimit -u)? Try fewer ranks."
)


class Gone(RuntimeError):
    """All processes of a run have gone at once."""


class _Ranks:
    """What both kinds share."""

    def each(self, action: str) -> None:
        """Do "suspend" or "resume" with the process of each rank that lives."""
        import psutil

        for pid in self.pids.values():
            with contextlib.suppress(psutil.Error):
                getattr(psutil.Process(pid), action)()


class ForkedRanks(_Ranks):
    """Ranks forked by a guardian of this run (see `fork_server`)."""

    def __init__(self, nproc: int):
        self._open = contextlib.ExitStack()
        self._partial, self._guardian = b"", None
        self.pids = {}
        with self._open as on_failure:
            self.events = on_failure.enter_context(fork_server.client.new_run())
            self.pipes = [self._fork(on_failure) for _ in range(nproc)]
            self._open = on_failure.pop_all()

    def _fork(self, stack):
        """Start the next rank; return our ends of its pipes."""
        work, ours_in = _pipe(stack)
        ours_messages, messages = _pipe(stack)
        ours_output, output = _pipe(stack)
        socket.send_fds(self.events, [b"r"], [work.fileno(), messages.fileno(), output.fileno()])
        for theirs in (work, messages, output):
            theirs.close()
        return ours_in, ours_messages, ours_output

    def exits(self) -> dict[int, int]:
        """Return ranks that ended since the last call, with exit codes (negative: the signal)."""
        with contextlib.suppress(BlockingIOError):
            while data := self.events.recv(4096, socket.MSG_DONTWAIT):
                self._partial += data
            raise Gone(NO_GUARDIAN)
        *lines, self._partial = self._partial.split(b"\n")
        events = [json.loads(line) for line in lines]
        self.pids.update({event["rank"]: event["pid"] for event in events if "pid" in event})
        self._guardian = next((e["guardian"] for e in events if "guardian" in e), self._guardian)
        return {event["rank"]: event["exit"] for event in events if "exit" in event}

    def kill(self) -> None:
        """Kill all processes of the run, those that ranks started too; wait until all are gone."""
        try:
            with contextlib.suppress(ConnectionError):  # the guardian is gone, and so are ranks
                self.events.shutdown(socket.SHUT_WR)
                self.events.settimeout(PATIENCE)
                while self.events.recv(4096):
                    pass
        except TimeoutError:  # somebody stopped the guardian: its ranks end with it
            if self._guardian is not None:
                os.kill(self._guardian, signal.SIGKILL)
        finally:  # a second interrupt in the middle of the wait: closing kills as well
            self._open.close()


class SpawnedRanks(_Ranks):
    """Ranks started as new interpreters; each ends when the pipe of its commands does."""

    events = None

    def __init__(self, nproc: int):
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__package__}.rank import main; main()"
        )
        own_group = (
            {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
            if os.name == "nt"
            else {"start_new_session": True}
        )
        self._processes, self._ended = [], set()
        try:
            for _ in range(nproc):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", command],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        bufsize=0,
                        **own_group,
                    )
                )
        except BaseException:
            self.kill()
            raise
        self.pids = {rank: process.pid for rank, process in enumerate(self._processes)}
        self.pipes = [
            (process.stdin, _selectable(process.stdout), _selectable(process.stderr))
            for process in self._processes
        ]

    def exits(self) -> dict[int, int]:
        """Return the ranks that have ended since the last call, with exit codes (negative: the
        signal).
        """
        ended = {
            rank: process.returncode
            for rank, process in enumerate(self._processes)
            if rank not in self._ended and process.poll() is not None
        }
        self._ended.update(ended)
        return ended

    def kill(self) -> None:
        """Kill every rank and what it started, and wait until all are gone."""
        for process in self._processes:
            for child in _descendants(process.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, getattr(signal, "SIGKILL", signal.SIGTERM))
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()


def _descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pipe(stack):
    """Return (read end, write end) of a new pipe as unbuffered files that `stack` closes."""
    read, write = os.pipe()
    return (
        stack.enter_context(open(read, "rb", buffering=0)),
        stack.enter_context(open(write, "wb", buffering=0)),
    )


def _selectable(pipe):
    """Return `pipe`; on Windows, which can only wait for sockets, a socket that a thread fills."""
    if os.name != "nt":
        return pipe
    ours, theirs = socket.socketpair()

    def pump():
        with theirs, contextlib.suppress(OSError, ValueError):
            while data := os.read(pipe.fileno(), 1 << 16):
                theirs.sendall(data)

    threading.Thread(target=pump, daemon=True).start()
    return ours.makefile("rb", buffering=0)
