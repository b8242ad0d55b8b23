"""Run a function on N fresh ranks from a notebook cell: `launch`.

The parent holds the rendezvous store on a free port of the loopback interface and hands each rank
the environment variables that torchrun would. It then does one thing, in one thread: wait for what the
ranks send, until every rank has returned, one has failed, or the time is up; and then it kills them all.
"""

import contextlib
import inspect
import os
import pickle
import selectors
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from . import errors, fork_server, machine, processes, rank, wire
from .process_group import choose_backend, cores, threads_per_rank

START_UP = 180  # seconds that ranks may take to start and connect, before `timeout` begins to count
GRACE = 0.25  # seconds that other ranks get to report their own errors after the first one
MEMORY_PER_RANK = 150e6  # bytes that a rank needs at least (measured: a forked rank that has used DDP)


@dataclass
class Run:
    """What a launch gave: `values` by rank, `records` in arrival order, `output` as (rank, line)."""

    values: list
    records: list[dict]
    output: list[tuple[int, str]] = field(repr=False)
    backend: str = "gloo"

    def __repr__(self):
        return f"<Run of {len(self.values)} rank(s), {self.backend}: {len(self.records)} record(s)>"


def launch(
    fn: Callable,
    *args,
    nproc: int = 2,
    timeout: float | None = 300,
    backend: str | None = None,
    on_record: Callable[[dict], None] | None = None,
    **kwargs,
) -> Run:
    """Run `fn(*args, **kwargs)` on `nproc` fresh processes with the process group up; return a `Run`.

    `fn` may be defined in a notebook cell; its arguments are copied to every rank, its return values
    come back with tensors as CPU copies. What ranks `report` is passed to `on_record` while they run;
    what they print appears here, labelled. `timeout` is in seconds from the moment all ranks are up
    (None: no limit). Raises RankError when a rank fails, HangError when the time is up, and TypeError or
    ValueError, before any process starts, for arguments that cannot work. No process outlives the call.
    """
    if rank.inside():
        raise RuntimeError("launch() was called inside a rank: ranks cannot launch ranks. Call it in the notebook.")
    check_nproc(nproc)
    work = _pack(fn, args, kwargs, timeout, on_record)
    if processes.can_fork():
        fork_server.client.start()  # it imports torch while we do
    chosen, note = choose_backend(nproc, backend)
    if note:
        print(note)
    with _Supervisor(nproc, timeout, on_record) as supervisor:
        supervisor.send_work(work, chosen)
        return Run(supervisor.wait(), supervisor.records, supervisor.output, chosen)


def check_nproc(nproc) -> None:
    """Raise TypeError or ValueError unless this machine can hold `nproc` ranks; warn above 4 a core."""
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise TypeError(f"nproc is the number of ranks, a whole number: got {nproc!r}.")
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least one rank is needed.")
    most = max(8, int(machine.free_memory() / MEMORY_PER_RANK))
    if nproc > most:
        raise ValueError(f"nproc={nproc}: this machine has free memory for about {most} ranks.")
    if nproc > 4 * cores():
        warnings.warn(f"nproc={nproc} on {cores()} core(s): ranks will mostly wait for one another.", stacklevel=3)


def _pack(fn, args, kwargs, timeout, on_record) -> bytes:
    """Return the call as bytes for the ranks; raise TypeError or ValueError for one that cannot work."""
    if not callable(fn):
        raise TypeError(f"launch() needs a function to run on each rank: got {fn!r} ({type(fn).__name__}).")
    if on_record is not None and not callable(on_record):
        raise TypeError(f"on_record must be a function of one record: got {on_record!r}.")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout > 0):
        raise ValueError(f"timeout is a number of seconds above 0, or None: got {timeout!r}.")
    name = getattr(fn, "__name__", "function")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        try:
            inspect.signature(fn).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() cannot be called with these arguments: {error}.") from None
    try:
        return wire.dumps((fn, args, kwargs))
    except Exception as error:
        culprit = _culprit(fn, args, kwargs) or f"{name}: {error}"
        raise TypeError(
            f"{name} cannot be sent to another process because of {culprit}. Create it inside the function instead."
        ) from None


def _culprit(fn, args, kwargs) -> str | None:
    """Name the variable or argument that keeps a call from being pickled."""
    candidates = [(value, f"argument {index + 1}") for index, value in enumerate(args)]
    candidates += [(value, f"argument {name!r}") for name, value in kwargs.items()]
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        names = variables.globals | variables.nonlocals
        candidates += [(value, f"the variable {name!r}") for name, value in names.items()]
    return next((found for value, name in candidates if (found := wire.unpicklable(value, name))), None)


class _Supervisor:
    """One run, from start to the last process gone. A context manager: leaving it kills what is left."""

    def __init__(self, nproc, timeout, on_record):
        self.started = time.monotonic()
        self.nproc, self.timeout, self.on_record = nproc, timeout, on_record
        self.records, self.output = [], []
        self.ready, self.values, self.failures, self.stacks = set(), {}, {}, {}
        self._frames = [wire.Frames() for _ in range(nproc)]
        self._lines = [b""] * nproc

    def __enter__(self):
        from torch.distributed import TCPStore

        # One for each run: keys of an earlier run would greet the ranks of a later one.
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.platform != "win32"
        )
        self._ranks = processes.start(self.nproc)
        self._selector = selectors.DefaultSelector()
        if self._ranks.events is not None:
            self._selector.register(self._ranks.events, selectors.EVENT_READ, None)
        for number, (_, messages, output) in enumerate(self._ranks.pipes):
            self._selector.register(messages, selectors.EVENT_READ, (self._on_message, number))
            self._selector.register(output, selectors.EVENT_READ, (self._on_output, number))
        return self

    def __exit__(self, *_):
        self._ranks.kill()
        self._selector.close()
        self._store = None  # the traceback of an error would keep its socket open

    def send_work(self, work: bytes, backend: str) -> None:
        """Send every rank its place and the call."""
        for number, (commands, _, _) in enumerate(self._ranks.pipes):
            header = {
                "started": self.started,
                "environment": _environment(number, self.nproc, self._store.port, backend),
                "path": sys.path,
                "argv": sys.argv[:1],
                "folder": _folder(),
                "threads": threads_per_rank(self.nproc),
            }
            with contextlib.suppress(BrokenPipeError):  # it died: its exit will tell
                wire.write(commands.fileno(), pickle.dumps(header))
                wire.write(commands.fileno(), work)

    def wait(self) -> list:
        """Return the values by rank once all are in; raise RankError or HangError otherwise."""
        while len(self.values) < self.nproc:
            self._pump(0.1)
            if self.failures:
                self._let_others_report()
                raise self._rank_error()
            if self._late():
                raise self._hang_error()
        self._leave()
        return [self.values[number] for number in range(self.nproc)]

    def _late(self) -> bool:
        if len(self.ready) < self.nproc:
            return self._clock() > START_UP
        return self.timeout is not None and self._clock() - self._all_ready > self.timeout

    def _clock(self) -> float:
        return time.monotonic() - self.started

    # what arrives

    def _pump(self, seconds: float) -> None:
        """Handle what ranks have sent and how they ended; wait at most `seconds` for something."""
        ended = self._ranks.exits() if self._ranks.events is None else {}
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                ended |= self._ranks.exits()
            else:
                self._receive(key.fileobj, *key.data)
        for number, code in ended.items():
            self._drain(number)
            if number not in self.values and number not in self.failures:
                self.failures[number] = {"moment": self._clock(), "exit": code}

    def _receive(self, pipe, handle, number) -> bool:
        data = pipe.read(1 << 16)
        if not data:
            self._selector.unregister(pipe)
        handle(number, data)
        return bool(data)

    def _drain(self, number) -> None:
        """Take what a rank that has ended left in its pipes."""
        with selectors.DefaultSelector() as left:
            for pipe, data in [(key.fileobj, key.data) for key in self._selector.get_map().values()]:
                if data and data[1] == number:
                    left.register(pipe, selectors.EVENT_READ, data)
            while left.get_map() and (ready := left.select(0)):
                for key, _ in ready:
                    if not self._receive(key.fileobj, *key.data):
                        left.unregister(key.fileobj)
        self._print(number, self._lines[number], whole=False)
        self._lines[number] = b""

    def _on_message(self, number, data) -> None:
        for frame in self._frames[number].feed(data):
            kind, moment, content = pickle.loads(frame)
            getattr(self, f"_on_{kind}")(number, moment, content)

    def _on_ready(self, number, moment, _):
        self.ready.add(number)
        self._all_ready = self._clock()

    def _on_record(self, number, moment, content):
        record = {"rank": number, "time": moment, **wire.loads(content)}
        self.records.append(record)
        if self.on_record is not None:
            self.on_record(record)

    def _on_value(self, number, moment, content):
        self.values[number] = wire.loads(content)

    def _on_error(self, number, moment, content):
        self.failures[number] = wire.loads(content)

    def _on_stack(self, number, moment, content):
        self.stacks[number] = wire.loads(content)["frames"]

    def _on_output(self, number, data) -> None:
        whole, newline, self._lines[number] = (self._lines[number] + data).rpartition(b"\n")
        self._print(number, whole + newline)

    def _print(self, number, data: bytes, whole=True) -> None:
        lines = [(number, _last_state(line)) for line in data.decode("utf-8", "replace").split("\n")]
        if lines and (whole or not lines[-1][1]):
            lines.pop()  # what follows the last newline
        if lines:
            self.output += lines
            print("\n".join(f"[rank {number}] {line}" for _, line in lines))

    # how it ends

    def _leave(self) -> None:
        """Let the ranks go, and take the output that was still on its way."""
        for commands, _, _ in self._ranks.pipes:
            with contextlib.suppress(BrokenPipeError):
                commands.write(b"x")
        for number in range(self.nproc):
            self._drain(number)

    def _let_others_report(self) -> None:
        """Give the other ranks a moment for errors of their own, then ask where they are."""
        deadline = self._clock() + GRACE
        while self._clock() < deadline and len(self.failures) + len(self.values) < self.nproc:
            self._pump(0.02)
        self._ask_for_stacks(GRACE)

    def _ask_for_stacks(self, seconds: float) -> None:
        silent = set(range(self.nproc)) - set(self.failures) - set(self.values)
        for number in silent:
            with contextlib.suppress(BrokenPipeError):
                self._ranks.pipes[number][0].write(b"s")
        deadline = self._clock() + seconds
        while self._clock() < deadline and silent - set(self.stacks) - set(self.failures):
            self._pump(0.02)

    def _rank_error(self) -> errors.RankError:
        def order(number):  # a rank that only lost its peer comes after one with a reason of its own
            failure = self.failures[number]
            return "chain" in failure and errors.is_consequence(failure["chain"]), failure["moment"]

        first = min(self.failures, key=order)
        trace = self._reason(first)
        others = {number: self._state(number) for number in range(self.nproc) if number != first}
        same = [number for number in others if number in self.failures and self._reason(number) == trace]
        who = "all ranks failed alike" if len(same) == self.nproc - 1 and same else f"rank {first} failed first"
        message = f"{who}.\n\n{trace}"
        if rest := [f"  rank {number} {state}" for number, state in others.items() if number not in same]:
            message += "\n\nThe other ranks:\n" + "\n".join(rest)
        return errors.RankError(message, first, trace, others, self.output)

    def _reason(self, number) -> str:
        failure = self.failures[number]
        if "exit" in failure:
            return f"The process of rank {number} {errors.exit_reason(failure['exit'])}."
        return errors.format_chain(failure["chain"])

    def _state(self, number) -> str:
        if number in self.values:
            return "had returned"
        if number in self.failures:
            return self._failed_too(number)
        if number in self.stacks:
            return errors.where(self.stacks[number])
        return "gave no answer: it is busy in C or C++ code"

    def _failed_too(self, number) -> str:
        failure = self.failures[number]
        if "chain" in failure and errors.is_consequence(failure["chain"]):
            return "then lost its connection to a rank that had gone"
        return "failed too: " + errors.first_line(self._reason(number))

    def _hang_error(self) -> errors.HangError:
        self._ask_for_stacks(1)
        states = [f"  rank {number} {self._state(number)}" for number in range(self.nproc)]
        waiting = {n: name for n, frames in self.stacks.items() if (name := errors.collective(frames))}
        absent = [number for number in range(self.nproc) if number not in waiting]
        if len(self.ready) < self.nproc:
            message = f"the ranks had not all started after {START_UP} s:"
        else:
            message = f"no result after {self.timeout:g} s:"
        message += "\n" + "\n".join(states)
        if waiting and absent:
            names = " and ".join(sorted(set(waiting.values())))
            never = ", ".join(f"rank {number}" for number in absent)
            message += f"\n{names} needs every rank: {never} never called it."
        stacks = [errors.format_stack(self.stacks.get(number, ())) for number in range(self.nproc)]
        return errors.HangError(message, stacks, self.output)


def _environment(number: int, nproc: int, port: int, backend: str) -> dict[str, str]:
    """Return the variables of a rank: the notebook's, and those that torchrun would set."""
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    return {
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


def _last_state(line: str) -> str:
    """Return what a line shows on a terminal: progress bars go back to its start with a carriage return."""
    return line.rstrip("\r").rpartition("\r")[2]
