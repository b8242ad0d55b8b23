"""Ranks in milliseconds on Linux: a small server that has imported torch and does nothing but fork.

Three kinds of process, each the parent of the next:

    kernel ── server ── guardian, one a run ── ranks (and whatever they start)

* The *server* is a fresh interpreter. It imports torch, runs no tensor operation (a fork after the
  thread pools are in use hangs), and forks a guardian for each run.
* The *guardian* forks the run's ranks and is their "child subreaper": what a rank starts, also in a
  session of its own, stays its descendant. When its socket closes, for whatever reason (the cell is
  done, was interrupted, the kernel was killed), it kills all of them and leaves.

So no process outlives its cell, and nobody has to remember to clean up.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings

PRELOAD = ("torch", "torch.distributed", "numpy", "cloudpickle", "ddp_course.rank")
# What the first DistributedDataParallel in a process imports, and then what `check_order` does; in
# pieces: between two of them the server looks whether a run is wanted.
PRELOAD_WHEN_IDLE = (
    "sympy",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch._inductor",
)

# A server looks twice a second whether its kernel still lives, whatever it imports meanwhile. As
# text, since it must run before this package, and so torch, is imported.
_LEAVE = """
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: os.getppid() == {kernel} or os._exit(0))
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # not inherited by what it forks
"""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Client:
    """The kernel's end: starts the server when needed, asks it for runs. Any thread may use it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process = self._socket = self._owner = None

    def start(self) -> None:
        """Start the server unless it runs; return at once, while the server imports torch."""
        with self._lock:
            self._start()

    def new_run(self) -> socket.socket:
        """Return a socket to a new guardian: see `_guard` for what it understands."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._start()
            try:
                socket.send_fds(self._socket, [b"r"], [theirs.fileno()])
            except OSError:  # the server was killed: once more, with a new one
                self._start(anew=True)
                socket.send_fds(self._socket, [b"r"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """End the server of this process, if there is one, and with it all that still runs."""
        with self._lock:
            if self._owner == os.getpid():
                self._socket.close()
                self._process.kill()
                self._process.wait()
                self._owner = None

    def _start(self, anew=False):
        alive = self._owner == os.getpid() and self._process.poll() is None
        if alive and not anew:
            return
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair()
        course = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        path = [course, *(os.path.abspath(folder) for folder in sys.path)]
        command = _LEAVE.format(kernel=os.getpid())  # before the import of torch, which takes long
        command += f"sys.path[:] = {path!r}\nfrom {__name__} import serve\nserve(0)"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # Jupyter interrupts and kills the kernel's process group
            )
        self._owner = os.getpid()


client = Client()
atexit.register(client.close)


def leave_with(kernel: int) -> None:
    """End this process soon after its parent, `kernel`."""
    exec(_LEAVE.format(kernel=kernel))


def serve(fd: int) -> None:
    """Be the server: fork a guardian for each descriptor that comes on the socket `fd`."""
    control = socket.socket(fileno=os.dup(fd))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guardians are reaped by the system
    for name in PRELOAD:
        __import__(name)
    later = list(PRELOAD_WHEN_IDLE)
    _freeze()
    while True:  # a process forked by the kernel may hold our socket open: the timer, too, ends it
        ready, _, _ = select.select([control], [], [], 0 if later else None)
        if ready:
            data, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not data:
                return
            with contextlib.suppress(OSError):  # no more processes: the closed socket will tell
                if _fork() == 0:
                    control.close()
                    _guard(socket.socket(fileno=fds[0]))
            os.close(fds[0])
        elif later:
            with contextlib.suppress(ImportError):
                __import__(later.pop(0))
            _freeze()


def _freeze():
    """Keep the garbage collector of the children from touching, and so copying, our memory."""
    gc.collect()
    gc.freeze()


def _fork() -> int:
    with warnings.catch_warnings():  # Python 3.12 warns of threads: the idle ones of numpy's BLAS
        warnings.simplefilter("ignore")
        return os.fork()


def _guard(run: socket.socket) -> None:
    """Be the guardian of one run; never returns.

    Each byte b"r" with three descriptors (stdin, stdout, stderr) starts the next rank. Writes a
    line of JSON for each rank started, {"rank", "pid"}, and ended, {"rank", "exit"} (negative: the
    signal). At the end of the stream kills every descendant, then closes.
    """
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    leaving = []  # without the server, too, it kills all it has first
    signal.signal(signal.SIGTERM, lambda *_: leaving.append(True))
    _die_with_parent(signal.SIGTERM)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks = {}
    _tell(run, guardian=os.getpid())
    while not leaving:
        ready, _, _ = select.select([run, wake_read], [], [])
        if run in ready:
            try:
                data, fds, _, _ = socket.recv_fds(run, 1, 3)
            except ConnectionError:  # the kernel has gone, and left something unread
                break
            if not data:
                break
            try:
                pid = _fork()
            except OSError:  # no more processes: the closed socket will tell
                break
            if pid == 0:
                try:
                    run.close()
                    _become_rank(fds)
                finally:
                    os._exit(1)
            for fd in fds:
                os.close(fd)
            ranks[pid] = len(ranks)
            _tell(run, rank=ranks[pid], pid=pid)
        if wake_read in ready:
            os.read(wake_read, 4096)
        while reaped := _reap(os.WNOHANG):
            _tell_exit(run, ranks, *reaped)
    while _kill_children() and (reaped := _reap(0)):
        _tell_exit(run, ranks, *reaped)
    os._exit(0)


def _become_rank(fds):
    """Be a rank: `fds` become its standard input, output and error, as if exec had started it."""
    from . import rank

    os.setsid()  # a group of its own: signals meant for the kernel do not reach it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    rank.main()


def _reap(flags):
    """Return (pid, status) of a child that ended, or None when there is none (left)."""
    try:
        pid, status = os.waitpid(-1, flags)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _kill_children() -> bool:
    """Send SIGKILL to all children; their orphans become our children, for the next call."""
    children = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if _parent(pid) == os.getpid()
    ]
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(children)


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])  # the name may hold brackets
    except OSError:  # it has just ended
        return None


def _tell(run, **event):
    with contextlib.suppress(OSError):  # the kernel has gone: the end of the stream comes next
        run.sendall(json.dumps(event).encode() + b"\n")


def _tell_exit(run, ranks, pid, status):
    if pid in ranks:
        _tell(run, rank=ranks[pid], exit=os.waitstatus_to_exitcode(status))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent(how: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, how)
