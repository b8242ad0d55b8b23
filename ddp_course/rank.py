"""What runs inside a rank: fetch the work, stream records and output, send back the value or the
error.

Standard input brings two frames (where am I; what to call), then one-byte commands; standard output
is the private channel for messages; standard error carries all that is printed, from Python or C++.
The same for a rank that was forked (`fork_server`) and one started as `python -m ddp_course.rank`.
"""

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback

from . import errors, flight, wire
from .dials import turn

STACK_SIGNAL = getattr(
    signal, "SIGUSR1", None
)  # asks for the stacks of a rank whose threads cannot run
NO_THREADS = "This machine allows no more threads (ulimit -u): try fewer ranks."
RECENT = 100  # collectives that an error or a hang report carries

_channel = None


class Channel:
    """The rank's end of the private pipe: whole messages, from any thread."""

    def __init__(self, fd: int, started: float):
        self._fd, self._lock, self._started = fd, threading.Lock(), started
        self.process = os.getpid()

    def clock(self) -> float:
        """Return the seconds since `launch` was called; all processes have the same clock."""
        return time.monotonic() - self._started

    def send(self, kind: str, **content) -> None:
        self.send_frame(kind, wire.dumps(content))

    def send_frame(self, kind: str, frame: bytes) -> None:
        message = pickle.dumps((kind, self.clock(), frame))
        with self._lock:
            wire.write(self._fd, message)


def inside() -> bool:
    """Return whether this process is a rank that `launch` started."""
    return _channel is not None


def report(**fields) -> None:
    """Stream one record of named values to the notebook while the ranks run.

    Tensors arrive as CPU copies, those with one element as Python numbers. `rank` and `time` are
    added on the way. Any rank may call it, at any time; outside of `launch` the record is printed.
    Raises TypeError, naming the field, for a value that cannot be sent.
    """
    for name in ("rank", "time"):
        if name in fields:
            raise TypeError(f"report() adds {name!r} itself: give your value another name.")
    fields = {name: _plain(value) for name, value in fields.items()}
    if _channel is None:
        print("  ".join(f"{name} {value}" for name, value in fields.items()))
        return
    if os.getpid() != _channel.process:
        raise RuntimeError("report() works in the rank itself, not in a process that it started.")
    try:
        frame = wire.dumps(fields)
    except Exception as error:
        culprit = wire.unpicklable(fields, "report")
        raise TypeError(f"report() cannot send {culprit}") from error
    _channel.send_frame("record", frame)


def _plain(value):
    import torch

    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def main() -> None:
    """Be a rank, from the first byte on standard input to the end of the process."""
    global _channel
    control, messages = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__ = _printed_to(1), _printed_to(2)
    header = wire.read(control)
    if header is None:
        os._exit(1)  # whoever wanted us has gone
    header = pickle.loads(header)
    _take_over(header)
    _channel = Channel(messages, header["started"])
    work = wire.read(control)
    if work is None:
        os._exit(1)
    release = threading.Event()
    watcher = threading.Thread(target=_obey, args=(control, release), daemon=True)
    try:
        watcher.start()
    except RuntimeError as error:
        error.add_note(NO_THREADS)
        _channel.send("error", moment=_channel.clock(), chain=describe(error), log=[])
        os._exit(1)
    group = _run(work, header["check_order"])  # held: a peer may still be talking to us through it
    release.wait()
    del group
    os._exit(0)


def _printed_to(fd: int):
    how = {"encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    return open(fd, "w", buffering=1, **how)  # line by line


def _take_over(header):
    """Look like a process that the notebook has just started: environment, folder, imports."""
    os.environ.clear()
    os.environ.update(header["environment"])
    sys.dont_write_bytecode = True  # a module edited twice within a second must not look unchanged
    faulthandler.enable()  # a crash in C++ says on which Python line
    if header["check_order"]:
        os.environ["TORCH_FR_BUFFER_SIZE"] = flight.WHOLE_RUN
    if hasattr(faulthandler, "register"):  # and so does a rank that holds the interpreter lock
        faulthandler.register(STACK_SIGNAL)
    sys.path[:] = header["path"]
    sys.argv[:] = header["argv"]
    with contextlib.suppress(OSError):
        os.chdir(header["folder"])
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    import numpy
    import torch
    import torch.distributed as dist

    numpy.random.seed()  # a forked process has its parent's
    torch.seed()
    dist.set_debug_level_from_env()
    torch.set_num_threads(header["threads"])


def _run(work: bytes, check_order: bool):
    """Call the function with the process group up, send its value or error; return the group, still
    up.

    It is not torn down after an error: the other ranks would fail too, and hide whose error came
    first.
    """
    from .process_group import process_group

    group = process_group()
    try:
        group.__enter__()
        function, args, kwargs = wire.loads(work)
        _channel.send("ready")
        value = function(*args, **kwargs)
        if os.getpid() != _channel.process:  # the function forked, and this is its child
            os._exit(0)
        try:
            frame = wire.dumps(value)
        except Exception:
            name = getattr(function, "__name__", "the function")
            culprit = wire.unpicklable(value, "value")
            raise TypeError(
                f"{name} returned something that cannot leave its rank: {culprit}"
            ) from None
        _flush()
        if check_order:
            _channel.send("log", **_whereabouts(None, lines=True))
        _channel.send_frame("value", frame)
    except BaseException as error:  # SystemExit too: it is no result
        if os.getpid() != _channel.process:
            os._exit(1)
        moment = _channel.clock()
        _channel.send("failing")  # to describe an error can take longer than others take to fail
        _flush()
        if re.search("start new thread|[Tt]emporarily unavailable", _said(error)):
            error.add_note(NO_THREADS)
        _channel.send("error", moment=moment, chain=describe(error), log=flight.log(RECENT))
    return group


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _obey(control: int, release: threading.Event) -> None:
    """Answer commands: b"s" sends this rank's stack, b"d" turns dials, b"x" lets it leave.

    Their end is ours.
    """
    while command := os.read(control, 1):
        if command == b"s":
            _channel.send("stack", **_whereabouts())
        elif command == b"d":
            turn(**pickle.loads(wire.read(control)))
        elif command == b"x":
            release.set()
    if not release.is_set():
        os._exit(1)


def _whereabouts(most: int | None = RECENT, lines: bool = False) -> dict:
    """Return where this rank is: its stack, its last collectives, its processor seconds."""
    innermost = sys._current_frames()[threading.main_thread().ident]
    frames = _frames(reversed(list(traceback.walk_stack(innermost))))
    return {"frames": frames, "log": flight.log(most, lines), "cpu": time.process_time()}


def describe(error: BaseException) -> list[dict]:
    """Return an exception as plain data: its type, its message, and the chain of its tracebacks."""
    chain, seen, link = [], set(), ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = _frames(traceback.walk_tb(error.__traceback__))
        chain.append({"link": link, "frames": frames, "text": _said(error)})
        link = "cause" if error.__cause__ is not None else "context"
        hidden = error.__cause__ is None and error.__suppress_context__
        error = None if hidden else error.__cause__ or error.__context__
    return chain


def _said(error: BaseException) -> str:
    """Return an exception's type and message, whatever its own __str__ does, and its notes."""
    text = "".join(traceback.format_exception_only(type(error), error)).rstrip()
    if isinstance(error, BaseExceptionGroup):
        text += "".join(f"\n  {n}. {_said(one)}" for n, one in enumerate(error.exceptions, 1))
    return text


def _frames(walk) -> list[tuple[str, int, str]]:
    """Return (file, line, function), outermost call first, from the student's function on."""
    return errors.from_student([(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk])


if __name__ == "__main__":
    # `python -m` makes this module __main__; functions that were sent refer to it by its own name.
    from ddp_course.rank import main as _main

    _main()
