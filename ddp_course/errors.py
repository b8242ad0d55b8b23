"""What a student sees when ranks fail: who, where, why; the full record stays on the exception."""

import linecache
import re
import sys
import sysconfig

# What a rank says because another one has gone: never the cause while another rank has a better one.
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket (closed|Timeout)|remote process exited"
    r"|peer.{0,40}(closed|lost)|NCCL.{0,80}remote",
    re.IGNORECASE,
)
_LINKS = {
    "cause": "The above was the direct cause of:",
    "context": "While handling the above, another error occurred:",
}


class _Shown(RuntimeError):
    """An error of the ranks. In a notebook only its message is shown, not the launcher's own frames."""

    def _render_traceback_(self):
        return [f"{type(self).__name__}: {self}"]


class RankError(_Shown):
    """A rank raised an error or ended without a result.

    `rank` failed first, `traceback` is its own, from the student's line down, `others` maps every other
    rank to one line on what it was doing, `output` is what the ranks printed, as (rank, line).
    """

    def __init__(self, message, rank, traceback, others, output):
        super().__init__(message)
        self.rank, self.traceback, self.others, self.output = rank, traceback, others, output


class HangError(_Shown):
    """The ranks did not finish: `stacks` holds a Python stack per rank ("" where a rank had returned)."""

    def __init__(self, message, stacks, output):
        super().__init__(message)
        self.stacks, self.output = stacks, output


def is_consequence(chain: list[dict]) -> bool:
    """Return whether an error (from `rank.describe`) only says that another rank has gone."""
    return bool(_PEER_LOST.search(chain[0]["text"]))


def format_chain(chain: list[dict]) -> str:
    """Format an error from `rank.describe` as Python would, with the lines of notebook cells."""
    parts = []
    for part in reversed(chain):
        parts.append(format_stack(part["frames"]) + part["text"])
        if part["link"]:
            parts.append(_LINKS[part["link"]])
    return "\n\n".join(parts)


def format_stack(frames) -> str:
    """Format (file, line, function) frames, outermost first: a place and its source line each."""
    text = ""
    for file, line, function in frames:
        text += f"{place(file, line)}, in {function}\n"
        if source := linecache.getline(file, line).strip():
            text += f"    {source}\n"
    return text


def place(file: str, line: int) -> str:
    """Name a line as the student knows it: "Cell In[3], line 8" or "worker.py, line 8"."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and (cell := shell.compile.format_code_name(file)):
        return f"{' '.join(cell)}, line {line}"
    return f"{file}, line {line}"


def where(frames) -> str:
    """Say in half a line where a rank is: "waits in all_reduce (Cell In[3], line 8)"."""
    if not frames:
        return "is starting"
    own = max((i for i, frame in enumerate(frames) if not _is_library(frame[0])), default=0)
    file, line, _ = frames[own]
    waits_in = collective(frames)
    if waits_in:
        return f"waits in {waits_in} ({place(file, line)})"
    source = linecache.getline(file, line).strip()
    return f"is at {place(file, line)}" + (f": {source}" if source else "")


def collective(frames) -> str | None:
    """Return the torch.distributed function a stack is inside of, or None."""
    own = max((i for i, frame in enumerate(frames) if not _is_library(frame[0])), default=-1)
    inner = [name for file, _, name in frames[own + 1 :] if "distributed" in file and name != "wrapper"]
    return inner[0] if inner else None


def _is_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    package = __file__.rpartition("errors.py")[0]
    return file.startswith((paths["stdlib"], paths["purelib"], paths["platlib"], package, "<frozen"))


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


