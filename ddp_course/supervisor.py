"""One run, from the parent's side: start the ranks, hand out the work, and see how it ends.

`inbox` takes in what ranks send, `watch` notices when they hang, `verdict` says why. All of it
happens in one thread, the caller's: there is nothing to lock and nothing to leave behind.
"""

import contextlib
import os
import pickle
import sys

from . import errors, orders, processes, verdict, wire
from .inbox import Inbox, State
from .watch import ANSWER, Watch

START_UP = 180  # seconds for ranks to start and connect, before the time-out begins to count
GRACE = 0.25  # seconds that other ranks get to report errors of their own after the first one


class Supervisor:
    """A context manager: entering it starts the ranks, leaving it kills what is left of them."""

    def __init__(self, nproc: int, timeout: float | None, on_record=None, check_order=False):
        self.state = State(nproc)
        self._inbox = Inbox(self.state, on_record)
        self._timeout, self._check_order = timeout, check_order
        self._ranks = self._store = self._watch = None
        self._paused_at, self._dials = None, {}

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
            self._inbox.close()
            self._store = None  # the traceback of an error would keep its socket open

    def _start(self):
        from torch.distributed import TCPStore

        # One for each run: keys of an earlier run would greet the ranks of a later one.
        self._store = TCPStore(
            "127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=sys.platform != "win32"
        )
        self._ranks = processes.start(self.state.nproc)
        self._inbox.open(self._ranks)
        self._watch = Watch(self._inbox, self._ranks)

    def send_work(self, work: bytes, backend: str) -> None:
        """Send every rank its place and the call."""
        run = {"started": self._inbox.started, "check_order": self._check_order}
        for number in range(self.state.nproc):
            order = orders.order(number, self.state.nproc, self._store.port, backend)
            for frame in (pickle.dumps(order | run), work):
                with contextlib.suppress(BrokenPipeError):  # it died: its exit will tell
                    wire.write(self._ranks.pipes[number][0].fileno(), frame)

    def wait(self) -> list:
        """Return the values by rank; raise RankError, HangError, OrderError or Interrupted."""
        try:
            return self._wait()
        except processes.Gone as error:
            raise verdict.nothing_known(self.state, str(error)) from None
        except KeyboardInterrupt:
            self._inbox.on_record = None  # it may have been what took too long
            self._watch.ask(GRACE)
            raise errors.Interrupted(verdict.interrupted(self.state)) from None
        finally:
            self._end_output()

    def _wait(self) -> list:
        state = self.state
        while len(state.values) < state.nproc:
            self._inbox.pump(0.1)
            if state.failures:
                self._let_others_report()
                self._end_output()
                raise verdict.rank_error(state)
            if self._paused_at is not None:
                continue
            if self._late():
                self._watch.ask()
                self._end_output()
                raise verdict.hang_error(state, self._headline())
            if self._watch.stuck():
                self._end_output()
                raise verdict.hang_error(state, verdict.CAN_NEVER_GO_ON)
        self._leave()
        if self._check_order and (error := verdict.order_error(state)):
            raise error
        return [state.values[number] for number in range(state.nproc)]

    def _late(self) -> bool:
        if len(self.state.ready) < self.state.nproc:
            return self._inbox.clock() > START_UP
        spent = self._inbox.clock() - self._inbox.all_ready
        return self._timeout is not None and spent > self._timeout

    def _headline(self) -> str:
        if len(self.state.ready) < self.state.nproc:
            return f"the ranks had not all started after {START_UP} s:"
        return f"no result after {self._timeout:g} s:"

    def _let_others_report(self) -> None:
        """Give the other ranks a moment for errors of their own, then ask where they are."""
        state = self.state
        self._inbox.pump_until(lambda: not state.unfinished, GRACE)
        self._inbox.pump_until(lambda: not state.failing & state.unfinished, 4 * ANSWER)
        self._watch.ask(2 * GRACE)

    def _leave(self) -> None:
        """Let the ranks go, and take the output that was still on its way."""
        for commands, _, _ in self._ranks.pipes:
            with contextlib.suppress(BrokenPipeError):
                commands.write(b"x")
        for number in range(self.state.nproc):
            self._inbox.drain(number)

    def _end_output(self) -> None:
        """Take lines that have no end: none will come."""
        for output in self.state.outputs:
            output.end()

    def output(self) -> list[tuple[int, str]]:
        """Return all that is kept of what ranks printed, as (rank, line)."""
        return verdict.output(self.state)

    # what is asked of it while it runs

    def post(self, action) -> None:
        """Have `action()` done by the thread that waits, soon; any thread may call it."""
        self._inbox.post(action)

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
            self._paused_at = self._inbox.clock()
            self._ranks.each("suspend")

    @property
    def started(self) -> bool:
        """Whether all ranks have processes by now."""
        return len(self.pids) == self.state.nproc

    def resume(self) -> None:
        """Let the ranks' processes go on."""
        if self._paused_at is not None:
            self._ranks.each("resume")
            self._inbox.all_ready += self._inbox.clock() - self._paused_at
            self._inbox.last_sign, self._paused_at = self._inbox.clock(), None
            self.turn({})
