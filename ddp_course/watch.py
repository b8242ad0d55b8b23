"""Where the ranks are: asks them, and notices when none of them can ever go on."""

import contextlib
import functools
import os

from . import rank, verdict

QUIET = 0.85  # seconds of silence between two looks at where the ranks are
ANSWER = 1.0  # seconds that a rank has to say where it is
SIGNALLED = 0.25  # and to write its stack when a signal asks for it
PATIENCE = 4  # looks at which all ranks idle in one collective, before that counts as a hang
IDLE = 0.05  # processor seconds between two looks, at most, of a rank that waits


class Watch:
    """Looks at the ranks of one run, through what comes into its `inbox`."""

    def __init__(self, inbox, ranks):
        self._inbox, self._ranks, self._state = inbox, ranks, inbox.state
        self._still = 0  # looks, one after the other, at which no rank had moved

    def ask(self, seconds: float = ANSWER) -> None:
        """Ask all ranks that live where they are, and wait for their answers."""
        asked = set(range(self._state.nproc)) - set(self._state.failures)
        for number in asked:
            self._state.whereabouts.pop(number, None)
            self._state.outputs[number].forget_threads()
            with contextlib.suppress(BrokenPipeError):
                self._ranks.pipes[number][0].write(b"s")
        self._inbox.pump_until(lambda: not self._silent(asked), seconds)
        if silent := self._silent(asked):
            self._signal(silent)

    def stuck(self) -> bool:
        """Say whether no rank has moved since the last look and none can; False if not quiet."""
        state = self._state
        if len(state.ready) < state.nproc or self._inbox.clock() - self._inbox.last_sign <= QUIET:
            return False
        before, state.whereabouts = state.whereabouts, {}
        self.ask()
        self._inbox.last_sign = self._inbox.clock()
        now = state.whereabouts
        if state.failures or not state.unfinished or set(now) != set(range(state.nproc)):
            return False
        still = all(n in before and _still(before[n], now[n]) for n in state.unfinished)
        self._still = self._still + 1 if still else 0
        # Ranks in one and the same collective may only be slow, but then not idle for so long.
        return self._still >= (1 if verdict.never_go_on(state) else PATIENCE)

    def _silent(self, asked: set[int]) -> set[int]:
        return asked - set(self._state.whereabouts) - set(self._state.failures)

    def _signal(self, silent: set[int]) -> None:
        """Get the stacks of ranks whose threads cannot run: a signal needs no interpreter lock."""
        if rank.STACK_SIGNAL is None:
            return
        for number in silent & self._state.ready & set(self._ranks.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks.pids[number], rank.STACK_SIGNAL)
        told = functools.partial(verdict.crash_frames, self._state)
        self._inbox.pump_until(lambda: all(told(number) for number in silent), SIGNALLED)


def _still(before: dict, now: dict) -> bool:
    """Say whether a rank waits where it was, and has computed nothing in between."""
    idle = now["cpu"] - before["cpu"] < IDLE
    return now["log"] == before["log"] and idle and verdict.waits(now)
