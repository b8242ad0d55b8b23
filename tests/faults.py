"""What goes wrong in distributed code, as data: the worker, and what must be seen of it.

`test_faults` proves it through a live kernel, `fault_table` measures it beside other launchers.

In a worker, `bad` is the rank that does it. The comment `# fault` marks the line where it goes
wrong, `# others` the line where the other ranks then are. What must be seen is text in which {bad},
{other} (each other rank in turn), {fault} and {others} (those lines, as "Cell In[3], line 5") are
filled in; of a tuple of texts one is enough.
"""

from dataclasses import dataclass

AT_ONCE = 60.0  # the time-out that `launch` gets; the message must not wait for it
DEADLOCK = 120.0  # likewise: no rank can ever go on
AT_TIME_OUT = 1.0  # nobody can know before: the rank might still come


@dataclass(frozen=True)
class Fault:
    """A worker that goes wrong on rank `bad`, and what the message says then."""

    name: str
    source: str
    seen: tuple = ()
    others: str | tuple = ""
    error: str = "RankError"
    timeout: float = AT_ONCE

    def line(self, mark: str) -> int | None:
        """Return the number, from 1, of the source line that ends with this comment."""
        lines = self.source.splitlines()
        return next((i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}")), None)

    def expected(self, bad: int, nproc: int, place):
        """Return the texts (or tuples of them) to be seen; `place(line)` names a line."""
        fields = {
            "bad": bad,
            **{m: place(self.line(m)) for m in ("fault", "others") if self.line(m)},
        }
        texts = [_fill(text, **fields) for text in self.seen]
        ranks = [rank for rank in range(nproc) if rank != bad and self.others]
        return texts + [_fill(self.others, other=rank, **fields) for rank in ranks]


def _fill(text, **fields):
    if isinstance(text, tuple):
        return tuple(_fill(one, **fields) for one in text)
    return text.format(**fields)


def _fault(name, source, *seen, **options) -> Fault:
    return Fault(name, "def worker(bad):\n    rank = dist.get_rank()\n" + source, seen, **options)


FIRST = "rank {bad} failed first"
WAIT = "rank {other} waits in all_reduce(float32[4]) ({others})"
LOST = "rank {other} then lost its connection to a rank that had gone"
RETURNED = "rank {other} had returned"
WAIT_OR_LOST = (WAIT, LOST + ", in all_reduce(float32[4]) ({others})")
NEVER_CAME = "all_reduce(float32[4]) needs every rank: rank {bad} never called it"
CAN_NEVER = "the ranks wait for one another and can never go on"

RAISES = [
    _fault(
        "raises before a collective",
        """\
    dist.barrier()
    if rank == bad:
        raise ValueError("bad luck")  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, "{fault}, in worker", 'raise ValueError("bad luck")', "ValueError: bad luck"),
        others=WAIT,
    ),
    _fault(
        "raises while a collective is under way",
        """\
    work = dist.all_reduce(torch.ones(4), async_op=True)
    if rank == bad:
        raise ValueError("bad luck")  # fault
    work.wait()
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, "{fault}, in worker", "ValueError: bad luck"),
        others=WAIT,
    ),
    _fault(
        "a collective itself raises",
        """\
    dist.barrier()
    if rank == bad:
        dist.all_reduce([1.0, 2.0])  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, "{fault}, in worker", "TypeError: "),
        others=WAIT,
    ),
    _fault(
        "raises in the backward pass of DDP",
        """\
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("bad luck")  # fault

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    y = model(torch.ones(2, 3))
    (Bad.apply(y) if rank == bad else y).sum().backward()  # others
""",
        *(FIRST, "{fault}, in backward", "{others}, in worker", "ValueError: bad luck"),
        others="rank {other} waits in all_reduce(float32[4]) ({others})",
    ),
    _fault(
        "raises after a collective",
        """\
    dist.all_reduce(torch.ones(4))
    if rank == bad:
        raise ValueError("bad luck")  # fault
""",
        *(FIRST, "{fault}, in worker", "ValueError: bad luck"),
        others=RETURNED,
    ),
    _fault(
        "an error with a cause",
        """\
    dist.barrier()
    if rank == bad:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("no such setting") from error  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, "KeyError: 'missing'", "direct cause", "{fault}, in worker", "no such setting"),
        others=WAIT,
    ),
    _fault(
        "an error of thousands of lines",
        """\
    def deeper(n):
        return deeper(n + 1)

    dist.barrier()
    if rank == bad:
        deeper(0)  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, "{fault}, in worker", "RecursionError: maximum recursion depth exceeded"),
        others=WAIT,
    ),
    _fault(
        "two ranks raise different errors",
        """\
    dist.barrier()
    if rank == bad:
        raise ValueError("bad luck")  # fault
    if rank == (bad + 1) % dist.get_world_size():
        raise KeyError("worse luck")
    dist.all_reduce(torch.ones(4))  # others
""",
        ("failed too: ValueError: bad luck", "failed too: KeyError: 'worse luck'"),
        ("raise ValueError", "raise KeyError"),
        "failed first",
        others=(WAIT, "rank {other} failed too", "rank {other} failed first"),
    ),
    _fault(
        "all ranks raise the same error",
        """\
    dist.all_reduce(torch.ones(4))
    raise ValueError("bad luck")  # fault
""",
        *("the same error on all ranks", "{fault}, in worker", "ValueError: bad luck"),
    ),
]

DEATHS = [
    _fault(
        f"leaves with {call}",
        f"""\
    dist.barrier()
    if rank == bad:
        {call}  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(FIRST, *seen),
        others=WAIT_OR_LOST,
    )
    for call, *seen in [
        ("os._exit(0)", "left with exit code 0 without returning a value"),
        ("os._exit(3)", "left with exit code 3 without returning a value"),
        ("sys.exit(0)", "{fault}, in worker", "SystemExit: 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of SIGKILL", "out of memory"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "died of SIGTERM"),
        ("ctypes.string_at(0)", "{fault}, in worker", "died of SIGSEGV", "crashed in C++ code"),
        ("os.abort()", "{fault}, in worker", "died of SIGABRT", "aborted by C++ code"),
    ]
]

TOGETHER = "The ranks disagree about collective number 2: "
DIFFER = "the ranks' tensors differ in shape or type"
DEADLOCKS = [
    _fault(
        "all send and none receives",
        """\
    dist.send(torch.ones(4), dst=(rank + 1) % dist.get_world_size())  # others
""",
        *(CAN_NEVER, "want to send, and none receives", "rank {bad} waits in send ({others})"),
        others="rank {other} waits in send ({others})",
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "a barrier on one rank only",
        """\
    if rank == bad:
        dist.barrier()  # fault
""",
        *(CAN_NEVER, "rank {bad} waits in barrier() ({fault})", "barrier() needs every rank: "),
        others=RETURNED,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "different collectives",
        """\
    x = torch.ones(4)
    dist.barrier()
    if rank == bad:
        dist.broadcast(x, src=0)  # fault
    else:
        dist.all_reduce(x)  # others
    dist.barrier()
""",
        CAN_NEVER,
        TOGETHER,
        ("rank {bad} waits in broadcast(float32[4]", "rank {bad} waits in barrier()"),
        "rank {bad} broadcast(float32[4]",
        others="rank {other} all_reduce(float32[4])",
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "collectives in a different order",
        """\
    a, b = torch.ones(2), torch.ones(100)
    dist.barrier()
    if rank == bad:
        a, b = b, a
    dist.all_reduce(a)  # fault
    dist.all_reduce(b)
""",
        (TOGETHER, DIFFER),
        error="HangError RankError",
        timeout=DEADLOCK,
    ),
    _fault(
        "different shapes",
        """\
    dist.barrier()
    dist.all_reduce(torch.ones(100 if rank == bad else 4))  # fault
""",
        (TOGETHER, DIFFER),
        error="HangError RankError",
        timeout=DEADLOCK,
    ),
    _fault(
        "different types",
        """\
    dist.barrier()
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == bad else torch.float32))  # fault
""",
        (TOGETHER, DIFFER),
        error="HangError RankError",
        timeout=DEADLOCK,
    ),
    _fault(
        "different sources of a broadcast",
        """\
    dist.barrier()
    source = (bad + 1) % dist.get_world_size() if rank == bad else bad
    dist.broadcast(torch.ones(4), source)  # fault
""",
        *(CAN_NEVER, "rank {bad} waits in broadcast(float32[4]"),
        others="rank {other} waits in broadcast(float32[4]",
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "one batch more",
        """\
    for batch in range(4 if rank == bad else 3):
        dist.all_reduce(torch.ones(4))  # fault
""",
        *(CAN_NEVER, "rank {bad} waits in all_reduce(float32[4]) ({fault})"),
        others=RETURNED,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "one batch fewer",
        """\
    def average(x):
        dist.all_reduce(x)  # others
        return x / dist.get_world_size()

    for batch in range(2 if rank == bad else 3):
        average(torch.ones(4))
""",
        *(CAN_NEVER, "rank {bad} had returned", NEVER_CAME),
        others=WAIT,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "one batch fewer under DDP",
        """\
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    for batch in range(2 if rank == bad else 3):
        model(torch.ones(2, 3)).sum().backward()  # others
""",
        *(CAN_NEVER, "rank {bad} had returned", NEVER_CAME),
        others=WAIT,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "an asynchronous collective that others never call",
        """\
    if rank == bad:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()  # fault
""",
        *(CAN_NEVER, "rank {bad} waits in all_reduce(float32[4]) ({fault})"),
        others=RETURNED,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "a group that only one rank makes",
        """\
    if rank == bad:
        dist.new_group([bad, (bad + 1) % dist.get_world_size()])  # fault
    dist.all_reduce(torch.ones(4))  # others
""",
        *(CAN_NEVER, "rank {bad} waits in new_group"),
        others=WAIT,
        error="HangError",
        timeout=DEADLOCK,
    ),
    _fault(
        "all receive and nobody sends",
        """\
    dist.recv(torch.ones(4), src=(rank + 1) % dist.get_world_size())  # fault
""",
        *(CAN_NEVER, "rank {bad} waits in recv ({fault})"),
        others="rank {other} waits in recv ({fault})",
        error="HangError",
        timeout=DEADLOCK,
    ),
]

NO_RESULT = "no result after 1 s"
IS_AT = "rank {bad} is at {fault}"
STUCK = [
    _fault(
        name,
        f"""\
    dist.barrier()
    if rank == bad:
{source}
    dist.all_reduce(torch.ones(4))  # others
""",
        *(NO_RESULT, *seen, NEVER_CAME),
        others=WAIT,
        error="HangError",
        timeout=AT_TIME_OUT,
    )
    for name, source, *seen in [
        ("sleeps", "        time.sleep(1000)  # fault", IS_AT + ": time.sleep(1000)"),
        ("never comes", "        threading.Event().wait()  # fault", IS_AT + ": threading.Event()"),
        ("a busy loop", "        while True:\n            pass  # fault", "rank {bad} is at "),
        (
            "a busy loop that ignores SIGTERM and SIGINT",
            """\
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            rank += 1  # fault""",
            "rank {bad} is at ",
        ),
        (
            "stuck in C code that lets threads run",
            "        ctypes.CDLL(None).sleep(1000)  # fault",
            IS_AT,
        ),
        (
            "stuck in C code that lets no thread run, deaf to SIGTERM",
            """\
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        re.match("(a+)+$", 60 * "a" + "b")  # fault""",
            IS_AT,
            "in C or C++ code that lets no other thread run",
        ),
        (
            "stopped",
            "        os.kill(os.getpid(), signal.SIGSTOP)  # fault",
            "rank {bad} gave no answer",
        ),
        (
            "waits for a child in a session of its own",
            '        subprocess.run(["sleep", "1000"], start_new_session=True)  # fault',
            IS_AT,
        ),
        (
            "leaves a daemon behind",
            """\
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        time.sleep(1000)  # fault""",
            IS_AT,
        ),
    ]
]

FAULTS = RAISES + DEATHS + DEADLOCKS + STUCK
IMPORTS = """\
import ctypes, os, re, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
"""


def positions(nproc: int) -> list[int]:
    """Return the ranks that are the bad one in turn: all of them."""
    return list(range(nproc))


CASES = [(fault, nproc, bad) for fault in FAULTS for nproc in (2, 4) for bad in positions(nproc)]
