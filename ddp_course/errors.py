"""What a student sees when ranks fail: who, where, why; the full record stays on the exception."""

import importlib.util
import itertools
import linecache
import os
import re
import sys
import sysconfig

# What a rank says because another one has gone: not the cause if another rank has a better one.
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|remote process exited"
    r"|peer.{0,40}(closed|lost)|NCCL.{0,80}remote",
    re.IGNORECASE,
)
# Where torch.distributed lives (not torch/nn/parallel/distributed.py, nor a folder of that name).
_TORCH = os.path.dirname(importlib.util.find_spec("torch").origin)
_C10D = os.path.join(_TORCH, "distributed", "")
MOST_CHARACTERS = 5000  # of an error's own text
MOST_FRAMES = 30  # of a stack that are shown, half of them from either end
_LINKS = {
    "cause": "The above was the direct cause of:",
    "context": "While handling the above, another error occurred:",
}


class RunError(RuntimeError):
    """A run that gave no result. In a notebook its message is shown, not the launcher's own frames.

    `output` is what the ranks printed, as (rank, line); `stacks` a Python stack per rank ("" where
    it had returned), `collectives` what each rank called last (`flight.Collective`), oldest first.
    """

    def __init__(self, message, *, output, stacks, collectives):
        # a notebook shows nothing at all of a text that is no valid Unicode
        super().__init__(message.encode("utf-8", "backslashreplace").decode())
        self.output, self.stacks, self.collectives = output, stacks, collectives

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class RankError(RunError):
    """A rank raised an error or ended without a result.

    `rank` failed first, `traceback` is its own, from the student's line down, `others` maps every
    other rank to one line on what it was doing.
    """

    def __init__(self, message, rank, traceback, others, **record):
        super().__init__(message, **record)
        self.rank, self.traceback, self.others = rank, traceback, others


class HangError(RunError):
    """The ranks did not finish in time, or wait for one another and never can."""


class Interrupted(KeyboardInterrupt):
    """The stop button or Ctrl-C ended a run; the message says where its ranks were."""

    def _render_traceback_(self):
        return [f"KeyboardInterrupt: {self}"]


class Stopped(RuntimeError):
    """A run in the background was stopped, by its `stop` or by the next one."""


class OrderError(RunError):
    """Ranks called collectives in different orders, found by `launch(…, check_order=True)`."""


def from_student(frames: list) -> list:
    """Return (file, line, function) frames, outermost first, from the student's function on."""
    ours = (__file__.replace("errors.py", "rank.py"), "_run")
    start = next((i + 1 for i, (file, _, name) in enumerate(frames) if (file, name) == ours), 0)
    return frames[start:]


def is_consequence(chain: list[dict]) -> bool:
    """Return whether an error (from `rank.describe`) only says that another rank has gone."""
    return bool(_PEER_LOST.search(chain[0]["text"]))


def format_chain(chain: list[dict]) -> str:
    """Format an error from `rank.describe` as Python would, with the lines of notebook cells."""
    parts = []
    for part in reversed(chain):
        text = part["text"]
        if len(text) > MOST_CHARACTERS:
            text = f"{text[:MOST_CHARACTERS]} […]"
        parts.append(format_stack(part["frames"]) + text)
        if part["link"]:
            parts.append(_LINKS[part["link"]])
    return "\n\n".join(parts)


def format_stack(frames) -> str:
    """Format (file, line, function) frames, outermost first: a place and its source line each."""
    calls = [(frame, len(list(same))) for frame, same in itertools.groupby(frames)]
    if len(calls) > MOST_FRAMES:
        calls[MOST_FRAMES // 2 : -MOST_FRAMES // 2] = [None]
    return "".join(_format_call(*call) if call else "  […]\n" for call in calls)


def _format_call(frame, times: int) -> str:
    file, line, function = frame
    text = f"{place(file, line)}, in {function}\n"
    if source := linecache.getline(file, line).strip():
        text += f"    {source}\n"
    return text + (f"  [{times - 1} more times]\n" if times > 1 else "")


def place(file: str, line: int) -> str:
    """Name a line as the student knows it: "Cell In[3], line 8" or "worker.py, line 8"."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and (cell := shell.compile.format_code_name(file)):
        return f"{' '.join(cell)}, line {line}"
    return f"{file}, line {line}"


def where(frames) -> str:
    """Say in half a line where a rank is: "is at Cell In[3], line 8: x = f(y)"."""
    if not frames:
        return "is starting"
    source = linecache.getline(*_own(frames)[:2]).strip()
    return f"is at {own_place(frames)}" + (f": {source}" if source else "")


def own_place(frames) -> str:
    """Return the place of the innermost line that is the student's own."""
    return place(*_own(frames)[:2]) if frames else "at the start"


def collective(frames) -> str | None:
    """Return the torch.distributed function a stack is inside of, or None."""
    inner = frames[_own_index(frames) + 1 :]
    names = [name for file, _, name in inner if file.startswith(_C10D) and name != "wrapper"]
    return names[0] if names else None


def in_backward(frames) -> bool:
    """Return whether a stack is inside of autograd, where DDP waits for its buckets."""
    return any("autograd" in file for file, _, _ in frames[_own_index(frames) + 1 :])


def _own_index(frames) -> int:
    own = [index for index, frame in enumerate(frames) if not _is_library(frame[0])]
    return own[-1] if own else -1


def _own(frames):
    return frames[max(0, _own_index(frames))]


def _is_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    package = __file__.rpartition("errors.py")[0]
    installed = (paths["stdlib"], paths["purelib"], paths["platlib"], package, _TORCH, "<frozen")
    return file.startswith(installed) or bool(
        {"site-packages", "dist-packages"} & set(file.split(os.sep))
    )


def exit_reason(code: int) -> str:
    """Say in plain words how a process ended that sent no result."""
    import signal

    if code == 0:
        return "left with exit code 0 without returning a value (os._exit?)"
    if code > 0:
        return f"left with exit code {code} without returning a value"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hints = {
        "SIGKILL": "killed from outside: often the system was out of memory",
        "SIGSEGV": "crashed in C++ code",
        "SIGABRT": "aborted by C++ code, often a collective whose shapes differ between ranks",
    }
    return f"died of {name}" + (f" ({hints[name]})" if name in hints else "")


def first_line(text: str) -> str:
    """Return the last exception line of a traceback's text, cut to a line's length."""
    line = text.strip().splitlines()[-1] if text.strip() else ""
    return line if len(line) <= 160 else line[:157] + "…"
