"""A run that goes on while the notebook is free: `launch(..., wait=False)`.

A thread of the kernel drives it as `launch` would (see `supervisor`), and what is asked of it from
other threads is done there, between two messages.
"""

import collections
import contextlib
import sys
import threading
import time

import psutil

from . import errors

MOST_LINES = 200  # of what ranks print that are at hand while they run
PERIOD = 0.05  # seconds in which a slowed rank stops and goes once

_latest = None  # there is one at a time: running the cell again ends what it had started


def stop_latest() -> None:
    """End the run in the background that was started last, if it still goes on."""
    if _latest is not None:
        _latest.stop()


class Background:
    """A run in the background. `records` grows as ranks report; `lines` is what they printed last.

    Use it as a context manager to end it with the block. It also ends when the next one starts,
    and with the kernel. Asking something of a run that is over does nothing.
    """

    def __init__(self, supervisor, work: bytes, backend: str, result, on_end=None):
        global _latest
        stop_latest()
        _latest = self
        self.nproc, self.error = supervisor.state.nproc, None
        self.records, self.lines = supervisor.state.records, collections.deque(maxlen=MOST_LINES)
        self.paused, self.state = False, "starting"
        self._supervisor, self._work, self._backend = supervisor, work, backend
        self._make_result, self._result, self._on_end = result, None, on_end
        self._factors, self._brakes = {}, None
        self._over = threading.Event()  # a Thread.join that is interrupted takes it for ended
        for output in supervisor.state.outputs:
            output.show = self.lines.append
        self._thread = threading.Thread(target=self._drive, name="background run", daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def __repr__(self):
        return f"<Background run of {self.nproc} rank(s): {self.state}>"

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def wait(self, seconds: float | None = None):
        """Return the `Run` once the ranks are done, or raise what `launch` would have raised.

        Raises TimeoutError, and lets the run go on, after `seconds`.
        """
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise ValueError(f"wait for a number of seconds, at least 0, or None: got {seconds!r}.")
        if not self._over.wait(seconds):
            raise TimeoutError(f"the run goes on: {seconds:g} s were not enough for it.")
        if self.error is not None:
            raise self.error
        return self._result

    def stop(self) -> None:
        """End the run; return when all its ranks are gone."""
        self._post(_raise_stopped)
        if threading.current_thread() is not self._thread:
            self._over.wait()

    def pause(self) -> None:
        """Stop the ranks' processes where they are, until `resume`."""
        self.paused = self.running
        self._once_started(lambda: self.paused and self._supervisor.pause())

    def resume(self) -> None:
        """Let paused ranks go on."""
        self.paused = False
        self._post(self._supervisor.resume)

    def kill(self, rank: int) -> None:
        """Kill one rank's process, as the system does when it is out of memory."""
        self._check(rank)
        self._once_started(lambda: self._with_process(rank, "kill"))

    def slow(self, rank: int, factor: float) -> None:
        """Give one rank's process only 1/factor of the time, by stopping it now and then."""
        self._check(rank)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= 20:
            raise ValueError(f"factor says how many times as slow, from 1 to 20: got {factor!r}.")
        self._factors = {**self._factors, rank: factor}
        if self._brakes is None:
            self._brakes = threading.Thread(target=self._brake, daemon=True)
            self._brakes.start()

    def set(self, **dials: float) -> None:
        """Turn dials that the ranks read with `dials(name=default)`."""
        for name, value in dials.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {value!r}.")
        self._post(lambda: self._supervisor.turn(dials))

    def _post(self, action) -> None:
        if self.running:
            self._supervisor.post(action)

    def _once_started(self, action) -> None:
        """Have `action()` done as soon as all ranks have processes."""
        self._post(lambda: action() if self._supervisor.started else self._once_started(action))

    def _check(self, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.nproc:
            raise ValueError(f"there is no rank {rank!r}: ranks are 0 to {self.nproc - 1}.")

    def _with_process(self, rank: int, action: str) -> None:
        """Do something with a rank's process, if it has started and not ended."""
        with contextlib.suppress(psutil.Error, KeyError):
            getattr(psutil.Process(self._supervisor.pids[rank]), action)()

    def _drive(self) -> None:
        try:
            with self._supervisor as supervisor:
                supervisor.send_work(self._work, self._backend)
                self.state = "running"
                values = supervisor.wait()
            self._result = self._make_result(values)
            self.state = "done"
        except BaseException as error:
            self.error = error
            self.state = "stopped" if isinstance(error, errors.Stopped) else "failed"
        finally:
            self._work, self.paused = None, False
            try:
                if self._on_end is not None:
                    self._on_end(self.error)
                elif self.state == "failed":
                    print(f"{type(self.error).__name__}: {self.error}", file=sys.stderr)
            finally:
                self._over.set()

    def _brake(self) -> None:
        """Stop slowed ranks for their share of each period; psutil notices a pid that is new."""
        processes = {}
        while self.running:
            slowed = [(rank, factor) for rank, factor in self._factors.items() if factor > 1]
            pauses = sorted((PERIOD * (1 - 1 / factor), rank) for rank, factor in slowed)
            if self.paused or not pauses:
                time.sleep(PERIOD)
                continue
            for _, rank in pauses:
                with contextlib.suppress(psutil.Error, KeyError):
                    if rank not in processes:
                        processes[rank] = psutil.Process(self._supervisor.pids[rank])
                    processes[rank].suspend()
            begun = time.monotonic()
            for pause, rank in pauses:
                time.sleep(max(0, begun + pause - time.monotonic()))
                if rank in processes and not self.paused:
                    with contextlib.suppress(psutil.Error):
                        processes[rank].resume()
            time.sleep(max(0, begun + PERIOD - time.monotonic()))


def _raise_stopped():
    raise errors.Stopped("the run was stopped; all its ranks are gone.")
