"""What comes from the ranks of one run: messages, output and exits, taken into `State`.

All of it happens in one thread, the one that waits: there is nothing to lock.
"""

import pickle
import queue
import selectors
import time
from dataclasses import dataclass, field

from . import wire
from .output import Output


@dataclass
class State:
    """All that is known of the ranks of one run, by rank."""

    nproc: int
    records: list[dict] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    values: dict[int, object] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)  # have failed; the error is on its way
    failures: dict[int, dict] = field(default_factory=dict)  # "moment", and "chain" or "exit"
    whereabouts: dict[int, dict] = field(default_factory=dict)  # last told: frames, log, cpu
    outputs: list[Output] = field(init=False)

    def __post_init__(self):
        self.outputs = [Output(number) for number in range(self.nproc)]

    @property
    def unfinished(self) -> set[int]:
        return set(range(self.nproc)) - set(self.values) - set(self.failures)


class Inbox:
    """Handles what arrives while `pump` waits; `on_record`, if any, is called with each record."""

    def __init__(self, state: State, on_record=None):
        self.state, self.on_record = state, on_record
        self.started = time.monotonic()
        self.last_sign = self.all_ready = 0.0  # on `clock`
        self._frames = [wire.Frames() for _ in range(state.nproc)]
        self._posted = queue.SimpleQueue()
        self._selector, self._ranks = selectors.DefaultSelector(), None

    def open(self, ranks) -> None:
        """Listen to these ranks."""
        self._ranks = ranks
        if ranks.events is not None:
            self._selector.register(ranks.events, selectors.EVENT_READ, None)
        for number, (_, messages, output) in enumerate(ranks.pipes):
            self._selector.register(messages, selectors.EVENT_READ, (self._on_message, number))
            self._selector.register(output, selectors.EVENT_READ, (self._on_output, number))

    def close(self) -> None:
        self._selector.close()

    def clock(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.started

    def post(self, action) -> None:
        """Have `action()` done by the thread that waits, soon; any thread may call it."""
        self._posted.put(action)

    def pump(self, seconds: float) -> None:
        """Handle what ranks have sent and how they ended; wait at most `seconds` for something."""
        for _ in range(self._posted.qsize()):  # what is posted meanwhile has its turn next time
            self._posted.get()()
        ended = self._ranks.exits() if self._ranks.events is None else {}
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                ended |= self._ranks.exits()
            else:
                self._receive(key.fileobj, *key.data)
        for number, code in ended.items():
            self.drain(number)
            if number in self.state.unfinished:
                self.state.failures[number] = {"moment": self.clock(), "exit": code}

    def pump_until(self, condition, seconds: float) -> None:
        """Handle what arrives until `condition()` holds, for at most `seconds`."""
        deadline = self.clock() + seconds
        while self.clock() < deadline and not condition():
            self.pump(0.02)

    def drain(self, number: int) -> None:
        """Take what a rank that has ended left in its pipes."""
        with selectors.DefaultSelector() as left:
            for key in list(self._selector.get_map().values()):
                if key.data and key.data[1] == number:
                    left.register(key.fileobj, selectors.EVENT_READ, key.data)
            while left.get_map() and (ready := left.select(0)):
                for key, _ in ready:
                    if not self._receive(key.fileobj, *key.data):
                        left.unregister(key.fileobj)
        self.state.outputs[number].end()

    def _receive(self, pipe, handle, number) -> bool:
        data = pipe.read(1 << 16)
        if not data:
            self._selector.unregister(pipe)
        handle(number, data)
        return bool(data)

    def _on_output(self, number, data) -> None:
        self.last_sign = self.clock()
        self.state.outputs[number].feed(data)

    def _on_message(self, number, data) -> None:
        for frame in self._frames[number].feed(data):
            kind, moment, content = pickle.loads(frame)
            if kind != "stack":  # that it was asked for
                self.last_sign = self.clock()
            getattr(self, f"_on_{kind}")(number, moment, content)

    # one for each kind of message

    def _on_ready(self, number, *_):
        self.state.ready.add(number)
        self.all_ready = self.clock()

    def _on_record(self, number, moment, content):
        fields = self._read(number, moment, content)
        if fields is None:
            return
        record = {"rank": number, "time": moment, **fields}
        self.state.records.append(record)
        if self.on_record is not None:
            self.on_record(record)

    def _on_value(self, number, moment, content):
        value = self._read(number, moment, content)
        if number not in self.state.failures:
            self.state.values[number] = value

    def _on_failing(self, number, *_):
        self.state.failing.add(number)

    def _on_error(self, number, _, content):
        self.state.failures[number] = wire.loads(content)

    def _on_stack(self, number, _, content):
        self.state.whereabouts[number] = wire.loads(content)

    _on_log = _on_stack

    def _read(self, number, moment, content):
        """Return what a rank sent; None, and a failure of that rank, if it cannot be read here."""
        try:
            return wire.loads(content)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\nIt sent something that cannot be read here."
            chain = [{"link": "", "frames": [], "text": text}]
            self.state.failures[number] = {"moment": moment, "chain": chain}
            return None
