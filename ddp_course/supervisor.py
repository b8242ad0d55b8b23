"""One run, from the parent's side: hand out the work, take in what ranks send, notice how it ends.

All of it happens in one thread, the caller's: there is nothing to lock and nothing to leave behind.
"""

import contextlib
import functools
import os
import pickle
import queue
import selectors
import sys
import time
from dataclasses import dataclass, field

from . import errors, flight, processes, rank, verdict, wire
from .output import Output
from .process_group import threads_per_rank

START_UP = (
    180  # seconds that ranks may take to start and connect, before the time-out begins to count
)
GRACE = 0.25  # seconds that other ranks get to report errors of their own after the first one
WATCH = 0.85  # seconds of silence between two looks at where the ranks are
ANSWER = 1.0  # seconds that a rank has to say where it is
PATIENCE = 4  # looks at which all ranks idle in one collective, before that counts as a hang
IDLE = 0.05  # processor seconds between two looks, at most, of a rank that waits


@dataclass
class State:
    """All that is known of the ranks of one run, by rank."""

    nproc: int
    records: list[dict] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    values: dict[int, object] = field(default_factory=dict)
    failures: dict[int, dict] = field(default_factory=dict)  # "moment", and "chain" or "exit"
    whereabouts: dict[int, dict] = field(
        default_factory=dict
    )  # "frames", "log", "cpu", when last asked
    outputs: list[Output] = field(default_factory=list)

    @property
    def unfinished(self) -> set[int]:
        return set(range(self.nproc)) - set(self.values) - set(self.failures)


class Supervisor:
    """A context manager: entering it starts the ranks, leaving it kills what is left of them."""

    def __init__(self, nproc: int, timeout: float | None, on_record=None, check_order=False):
        self.state = State(nproc, outputs=[Output(number) for number in range(nproc)])
        self._check_order = check_order
        self._timeout, self._on_record_do = timeout, on_record
        self._frames = [wire.Frames() for _ in range(nproc)]
        self._ranks = self._store = None
        self._selector = selectors.DefaultSelector()
        self._started, self._last_sign, self._all_ready = time.monotonic(), 0.0, 0.0
        self._still = 0  # looks, one after the other, at which no rank had moved
        self._posted = queue.SimpleQueue()  # what other threads want done
        self._paused_at, self._dials = None, {}
        self._failing = set()  # ranks that have failed, of which the error is still on its way

    def __enter__(self):
        try:
            self._start()
        except BaseException:  # an interrupt, too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        try:
            if self._ranks is not None:
                self._ranks.kill()
        finally:
            self._selector.close()
            self._store = None  # the traceback of an error would keep its socket open

    def _start(self):
        from torch.distributed import TCPStore

        # One for each run: keys of an earlier run would greet the ranks of a later one.
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.platform != "win32"
        )
        self._ranks = processes.start(self.state.nproc)
        if self._ranks.events is not None:
            self._selector.register(self._ranks.events, selectors.EVENT_READ, None)
        for number, (_, messages, output) in enumerate(self._ranks.pipes):
            self._selector.register(messages, selectors.EVENT_READ, (self._on_message, number))
            self._selector.register(output, selectors.EVENT_READ, (self._on_output, number))

    def send_work(self, work: bytes, backend: str) -> None:
        """Send every rank its place and the call."""
        nproc = self.state.nproc
        for number in range(nproc):
            header = {
                "started": self._started,
                "environment": _environment(number, nproc, self._store.port, backend),
                "path": [str(folder) for folder in sys.path],
                "argv": sys.argv[:1],
                "folder": _folder(),
                "threads": threads_per_rank(nproc),
                "check_order": self._check_order,
            }
            for frame in (pickle.dumps(header), work):
                with contextlib.suppress(BrokenPipeError):  # it died: its exit will tell
                    wire.write(self._ranks.pipes[number][0].fileno(), frame)

    def wait(self) -> list:
        """Return the values by rank; raise RankError, HangError, OrderError or Interrupted."""
        try:
            return self._wait()
        except processes.Gone as error:
            raise verdict.nothing_known(self.state, str(error)) from None
        except KeyboardInterrupt:
            self._on_record_do = None  # it may have been what took too long
            self._ask(GRACE)
            raise errors.Interrupted(verdict.interrupted(self.state)) from None
        finally:
            self._end_output()

    def _wait(self) -> list:
        state = self.state
        while len(state.values) < state.nproc:
            self._pump(0.1)
            if state.failures:
                self._let_others_report()
                self._end_output()
                raise verdict.rank_error(state)
            if self._paused_at is not None:
                continue
            if self._late():
                self._ask()
                self._end_output()
                raise verdict.hang_error(state, self._headline())
            quiet = self._clock() - self._last_sign > WATCH
            if quiet and len(state.ready) == state.nproc and self._stuck():
                self._end_output()
                raise verdict.hang_error(state, verdict.CAN_NEVER_GO_ON)
        self._leave()
        if self._check_order and (error := verdict.order_error(state)):
            raise error
        return [state.values[number] for number in range(state.nproc)]

    def _end_output(self) -> None:
        """Take lines that have no end: none will come."""
        for output in self.state.outputs:
            output.end()

    def output(self) -> list[tuple[int, str]]:
        """Return all that is kept of what ranks printed, as (rank, line)."""
        return verdict.output(self.state)

    def _clock(self) -> float:
        return time.monotonic() - self._started

    def _late(self) -> bool:
        if len(self.state.ready) < self.state.nproc:
            return self._clock() > START_UP
        return self._timeout is not None and self._clock() - self._all_ready > self._timeout

    def _headline(self) -> str:
        if len(self.state.ready) < self.state.nproc:
            return f"the ranks had not all started after {START_UP} s:"
        return f"no result after {self._timeout:g} s:"

    # what is asked of it while it runs

    def post(self, action) -> None:
        """Have `action()` done by the thread that waits, soon; any thread may call it."""
        self._posted.put(action)

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that has started."""
        return self._ranks.pids if self._ranks is not None else {}

    def turn(self, dials: dict[str, float]) -> None:
        """Tell the ranks that dials were turned, once they are not paused."""
        self._dials.update(dials)
        if self._paused_at is not None:
            return
        for number in self.state.unfinished:
            with contextlib.suppress(BrokenPipeError):
                commands = self._ranks.pipes[number][0].fileno()
                os.write(commands, b"d")
                wire.write(commands, pickle.dumps(self._dials))

    def pause(self) -> None:
        """Stop the ranks' processes; neither time-out nor hang is looked for meanwhile."""
        if self._paused_at is None:
            self._paused_at = self._clock()
            self._ranks.each("suspend")

    def resume(self) -> None:
        """Let the ranks' processes go on."""
        if self._paused_at is not None:
            self._ranks.each("resume")
            self._all_ready += self._clock() - self._paused_at
            self._last_sign, self._paused_at = self._clock(), None
            self.turn({})

    # what arrives

    def _pump(self, seconds: float) -> None:
        """Handle what ranks have sent and how they ended; wait at most `seconds` for something."""
        while not self._posted.empty():
            self._posted.get()()
        ended = self._ranks.exits() if self._ranks.events is None else {}
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                ended |= self._ranks.exits()
            else:
                self._receive(key.fileobj, *key.data)
        for number, code in ended.items():
            self._drain(number)
            if number in self.state.unfinished:
                self.state.failures[number] = {"moment": self._clock(), "exit": code}

    def _receive(self, pipe, handle, number) -> bool:
        data = pipe.read(1 << 16)
        if not data:
            self._selector.unregister(pipe)
        handle(number, data)
        return bool(data)

    def _drain(self, number) -> None:
        """Take what a rank that has ended left in its pipes."""
        with selectors.DefaultSelector() as left:
            for pipe, data in [
                (key.fileobj, key.data) for key in self._selector.get_map().values()
            ]:
                if data and data[1] == number:
                    left.register(pipe, selectors.EVENT_READ, data)
            while left.get_map() and (ready := left.select(0)):
                for key, _ in ready:
                    if not self._receive(key.fileobj, *key.data):
                        left.unregister(key.fileobj)
        self.state.outputs[number].end()

    def _on_output(self, number, data) -> None:
        self._last_sign = self._clock()
        self.state.outputs[number].feed(data)

    def _on_message(self, number, data) -> None:
        for frame in self._frames[number].feed(data):
            kind, moment, content = pickle.loads(frame)
            if kind != "stack":
                self._last_sign = self._clock()
            getattr(self, f"_on_{kind}")(number, moment, content)

    def _on_ready(self, number, *_):
        self.state.ready.add(number)
        self._all_ready = self._clock()

    def _on_record(self, number, moment, content):
        fields = self._read(number, moment, content)
        if fields is None:
            return
        record = {"rank": number, "time": moment, **fields}
        self.state.records.append(record)
        if self._on_record_do is not None:
            self._on_record_do(record)

    def _on_log(self, number, moment, content):
        self.state.whereabouts[number] = wire.loads(content)

    def _on_value(self, number, moment, content):
        value = self._read(number, moment, content)
        if number not in self.state.failures:
            self.state.values[number] = value

    def _read(self, number, moment, content):
        """Return what a rank sent; None, and a failure of that rank, if it cannot be read here."""
        try:
            return wire.loads(content)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\nIt sent something that cannot be read here."
            chain = [{"link": "", "frames": [], "text": text}]
            self.state.failures[number] = {"moment": moment, "chain": chain}
            return None

    def _on_failing(self, number, *_):
        self._failing.add(number)

    def _on_error(self, number, moment, content):
        self.state.failures[number] = wire.loads(content)

    def _on_stack(self, number, moment, content):
        self.state.whereabouts[number] = wire.loads(content)

    # how it ends

    def _leave(self) -> None:
        """Let the ranks go, and take the output that was still on its way."""
        for commands, _, _ in self._ranks.pipes:
            with contextlib.suppress(BrokenPipeError):
                commands.write(b"x")
        for number in range(self.state.nproc):
            self._drain(number)

    def _let_others_report(self) -> None:
        """Give the other ranks a moment for errors of their own, then ask where they are."""
        self._pump_until(lambda: not self.state.unfinished, GRACE)
        self._pump_until(lambda: not self._failing & self.state.unfinished, 4 * ANSWER)
        self._ask(2 * GRACE)

    def _ask(self, seconds: float = ANSWER) -> None:
        """Ask all ranks that live where they are, and wait for their answers."""
        asked = set(range(self.state.nproc)) - set(self.state.failures)
        for number in asked:
            self.state.whereabouts.pop(number, None)
            self.state.outputs[number].forget_threads()
            with contextlib.suppress(BrokenPipeError):
                self._ranks.pipes[number][0].write(b"s")
        self._pump_until(lambda: not self._silent(asked), seconds)
        if silent := self._silent(asked):
            self._signal(silent)

    def _silent(self, asked: set[int]) -> set[int]:
        return asked - set(self.state.whereabouts) - set(self.state.failures)

    def _signal(self, silent: set[int]) -> None:
        """Get the stacks of ranks whose threads cannot run: a signal needs no interpreter lock."""
        if rank.STACK_SIGNAL is None:
            return
        for number in silent & self.state.ready & set(self._ranks.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks.pids[number], rank.STACK_SIGNAL)
        told = functools.partial(verdict.crash_frames, self.state)
        self._pump_until(lambda: all(told(number) for number in silent), GRACE)

    def _pump_until(self, condition, seconds: float) -> None:
        deadline = self._clock() + seconds
        while self._clock() < deadline and not condition():
            self._pump(0.02)

    def _stuck(self) -> bool:
        """Look where the ranks are; whether none has moved since the last look and none can."""
        before = self.state.whereabouts
        self.state.whereabouts = {}
        self._ask()
        self._last_sign = self._clock()
        now, state = self.state.whereabouts, self.state
        if state.failures or not state.unfinished or set(now) != set(range(state.nproc)):
            return False
        still = all(
            number in before
            and now[number]["log"] == before[number]["log"]
            and now[number]["cpu"] - before[number]["cpu"] < IDLE
            and verdict.waits(now[number])
            for number in state.unfinished
        )
        self._still = self._still + 1 if still and state.unfinished else 0
        # Ranks in one and the same collective may only be slow, but then not idle for so long.
        return self._still >= (1 if verdict.never_go_on(state) else PATIENCE)


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
