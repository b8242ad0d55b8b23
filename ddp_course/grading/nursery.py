"""A process that has imported all that ranks need and forks examiners in milliseconds.

It never runs a line of a submission and never hears of expected values. Each examiner forks, in
turn, a fork server for its ranks: see `fork_server`, which does the same for a notebook.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from .. import fork_server
from .sandbox import PACKAGE

START_UP = 300  # seconds to import torch, on a busy machine


class Nursery:
    """The end of whoever grades: a context manager. Any thread may ask for an examiner."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process = self._socket = None

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _start(self):
        self._socket, theirs = socket.socketpair()
        environment = {
            "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "MPLBACKEND": "agg",
            "TMPDIR": tempfile.gettempdir(),
            "CUDA_VISIBLE_DEVICES": "",  # the same verdict on every machine
        }
        course = str(PACKAGE.parent)  # this very package, wherever it lies, not one installed
        command = f"import sys; sys.path.insert(0, {course!r}); from {__name__} import serve"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", f"{command}; serve()"],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process number."""
        return self._process.pid

    def examiner(self, job: int, answers: int, folder: str, user: int | None) -> int:
        """Start an examiner that reads from the descriptor `job`; return its process number."""
        order = json.dumps({"folder": folder, "user": user}).encode()
        with self._lock:
            if self._process.poll() is not None:  # somebody killed it
                self._socket.close()
                self._start()
            self._socket.settimeout(START_UP)
            try:
                socket.send_fds(self._socket, [order], [job, answers])
                told = self._socket.recv(64)
            except ConnectionError:
                told = b""
        if not told:
            raise ChildProcessError(
                "the process that starts examiners has ended; does this run here: "
                f"{sys.executable} -I -c 'import torch, cloudpickle'"
            )
        return int(told)


def serve() -> None:
    """Be the nursery: fork an examiner for each order that comes on standard input."""
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # examiners are reaped by the system
    for name in (*fork_server.PRELOAD, f"{__package__}.examiner"):
        __import__(name)
    # Now, not when a rank needs it: torch._dynamo replaces torch.manual_seed, as a cheat would.
    for name in fork_server.PRELOAD_WHEN_IDLE:
        with contextlib.suppress(ImportError):
            __import__(name)
    _freeze()
    while True:
        order, fds, _, _ = socket.recv_fds(control, 4096, 2)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                _become_examiner(*fds, **json.loads(order))
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.sendall(str(pid).encode())


def _freeze():
    """Keep the garbage collector of the children from touching, and so copying, our memory."""
    gc.collect()
    gc.freeze()


def _become_examiner(job, answers, folder, user):
    from . import examiner, sandbox

    os.setsid()
    sandbox.die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if user is not None:
        sandbox.become(user)
        sandbox.die_with_parent()  # a change of user forgets it
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None  # what was imported may have found another place
    os.chdir(folder)
    with open(job, "rb") as stream:
        told = stream.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sandbox.adopt_orphans()
    sandbox.close_memory()
    held = sandbox.enter(folder)
    fork_server.client = ForkedServer()
    fork_server.client.start()
    examiner.main(told, answers, held)
    fork_server.client.close()
    os._exit(0)


class ForkedServer(fork_server.Client):
    """A fork server that is forked itself, from a process that has imported everything."""

    def _start(self, anew=False):
        if anew:
            raise ChildProcessError("the fork server has ended")
        if self._owner == os.getpid():
            return
        self._socket, theirs = socket.socketpair()
        self._server = os.fork()
        if self._server == 0:
            try:
                _become_server(theirs.fileno())
            finally:
                os._exit(1)
        theirs.close()
        self._owner = os.getpid()

    def close(self) -> None:
        """End the server, and with it all that still runs."""
        if self._owner == os.getpid():
            self._owner = None
            self._socket.close()
            os.kill(self._server, signal.SIGKILL)
            os.waitpid(self._server, 0)


def _become_server(fd: int):
    """Keep nothing of the examiner: its descriptors are closed, its memory holds no secrets."""
    from . import sandbox

    os.setsid()
    os.dup2(fd, 0)
    for target in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sandbox.open_memory()
    fork_server.leave_with(os.getppid())
    fork_server.serve(0)
