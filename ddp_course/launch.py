"""Run a function on N fresh ranks from a notebook cell: `launch`.

What cannot work is refused here, before any process starts. `supervisor` then drives the run.
"""

import contextlib
import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from . import fork_server, machine, processes, rank, wire
from .background import Background
from .process_group import choose_backend, cores
from .supervisor import Supervisor

MEMORY_PER_RANK = 150e6  # bytes that a rank needs at least


@dataclass
class Run:
    """What a launch gave: `values` by rank, `records` as they came, `output` as (rank, line)."""

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
    check_order: bool = False,
    wait: bool = True,
    **kwargs,
) -> Run | Background:
    """Run `fn(*args, **kwargs)` on `nproc` fresh ranks with the process group up; return a `Run`.

    `fn` may be defined in a notebook cell; its arguments are copied to every rank, its return
    values come back with tensors as CPU copies. What ranks `report` is passed to `on_record` while
    they run; what they print appears here, labelled. `timeout` is in seconds from the moment all
    ranks are up (None: no limit). Raises RankError when a rank fails, HangError when the time is
    up, and TypeError or ValueError, before any process starts, for arguments that cannot work. No
    process outlives the call.

    `check_order` compares, at the end, which line called each collective on each rank, and raises
    OrderError where they differ: two swapped all-reduces of one shape give wrong sums in silence.

    With `wait=False` it returns a `Background` at once, and the notebook stays free: see there for
    how to stop, pause, slow and steer the run. `on_record` is then called in a thread.
    """
    if rank.inside():
        raise RuntimeError(
            "launch() was called inside a rank: ranks cannot launch ranks. Call it in the notebook."
        )
    check_nproc(nproc)
    _check_environment()
    work = _pack(fn, args, kwargs, timeout, on_record)
    if processes.can_fork():
        fork_server.client.start()  # it imports torch while we do
    chosen, note = choose_backend(nproc, backend)
    if note:
        print(note)
    supervisor = Supervisor(nproc, timeout, on_record, check_order)

    def result(values):
        return Run(values, supervisor.state.records, supervisor.output(), chosen)

    if not wait:
        return Background(supervisor, work, chosen, result, getattr(on_record, "end", None))
    with supervisor:
        supervisor.send_work(work, chosen)
        return result(supervisor.wait())


def check_nproc(nproc) -> None:
    """Raise TypeError or ValueError unless this machine can hold `nproc` ranks; warn of many."""
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise TypeError(f"nproc is the number of ranks, a whole number: got {nproc!r}.")
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least one rank is needed.")
    most = max(8, int(machine.free_memory() / MEMORY_PER_RANK))
    if nproc > most:
        raise ValueError(f"nproc={nproc}: this machine has free memory for about {most} ranks.")
    if nproc > 4 * cores():
        warnings.warn(
            f"nproc={nproc} on {cores()} core(s): ranks will mostly wait for one another.",
            stacklevel=3,
        )


def _check_environment() -> None:
    """Raise ValueError for a variable that PyTorch would refuse in every rank."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    if level.upper() not in ("OFF", "INFO", "DETAIL"):
        raise ValueError(
            f"TORCH_DISTRIBUTED_DEBUG={level} is set in this notebook, and PyTorch refuses that: "
            'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF", "INFO" or "DETAIL".'
        )


def _pack(fn, args, kwargs, timeout, on_record) -> bytes:
    """Return the call as bytes; raise TypeError or ValueError for one that cannot work."""
    if not callable(fn):
        raise TypeError(
            f"launch() needs a function to run on each rank: got {fn!r} ({type(fn).__name__})."
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(f"{fn.__name__} is async or a generator: give launch() a plain function.")
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
            f"{name} cannot be sent to another process because of {culprit}. "
            "Create it inside the function instead."
        ) from None


def _culprit(fn, args, kwargs) -> str | None:
    """Name the variable or argument that keeps a call from being pickled."""
    candidates = [(value, f"argument {index + 1}") for index, value in enumerate(args)]
    candidates += [(value, f"argument {name!r}") for name, value in kwargs.items()]
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        names = variables.globals | variables.nonlocals
        candidates += [(value, f"the variable {name!r}") for name, value in names.items()]
    return next(
        (found for value, name in candidates if (found := wire.unpicklable(value, name))), None
    )
