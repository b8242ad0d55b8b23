"""What ranks print: whole lines, labelled; noise and floods are kept out of the cell."""

import re
from collections import deque

SHOWN = 200_000  # bytes of a rank that are printed in the cell; the rest is only kept
KEPT = 20_000  # lines of a rank that are kept, and as many of its last ones
LONGEST = 1 << 16  # bytes of a line without an end that are waited for

# What PyTorch's C++ side says of sockets, at tear-down (also on a healthy run) and when it aborts.
_NOISE = re.compile(
    r"\[[WIE]\d+ .*(socket|Socket|TCPStore|ProcessGroup|c10d|gloo|Gloo|NCCL|hostname)"
    r"|terminate called after throwing|  what\(\): "
)
# faulthandler's stacks, after a crash or when asked: threads with their frames, innermost first.
_THREAD = re.compile(r"(Current thread|Thread) 0x|Fatal Python error: ")
_REPORT = re.compile(r'  File "|  <no Python frame>|  \.\.\.|Extension modules: |$')
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Output:
    """The output of one rank, fed in pieces of any size. `lines` is all that is kept of it."""

    def __init__(self, rank: int):
        self._rank, self._partial, self._shown = rank, b"", 0
        self._first, self._last, self._count = [], deque(maxlen=KEPT), 0
        self._report, self._in_report = [], False

    def feed(self, data: bytes) -> None:
        """Take a piece, and print the lines that it completes."""
        whole, newline, self._partial = (self._partial + data).rpartition(b"\n")
        if newline:
            self._show(whole.decode("utf-8", "replace").split("\n"))
        if len(self._partial) > LONGEST:
            self.end()

    def end(self) -> None:
        """Print what came without a newline."""
        if self._partial:
            self._show([self._partial.decode("utf-8", "replace")])
            self._partial = b""

    @property
    def lines(self) -> list[str]:
        left_out = self._count - len(self._first) - len(self._last)
        note = [f"… {left_out} lines left out …"] if left_out else []
        return self._first + note + list(self._last)

    @property
    def threads(self) -> list[list[tuple[str, int, str]]]:
        """Stacks that faulthandler wrote: a list of frames, outermost first, for each thread."""
        stacks = []
        for line in self._report:
            if _THREAD.match(line):
                stacks.append([])
            elif match := _FRAME.match(line):
                stacks[-1].insert(0, (match[1], int(match[2]), match[3]))
        return stacks

    def _show(self, lines: list[str]) -> None:
        lines = [_last_state(line) for line in lines]
        for line in lines:
            (self._first if len(self._first) < KEPT else self._last).append(line)
        self._count += len(lines)
        visible = [line for line in lines if not self._hidden(line)]
        if not visible or self._shown > SHOWN:
            return
        text = "\n".join(f"[rank {self._rank}] {line}" for line in visible)
        self._shown += len(text)
        if self._shown > SHOWN:
            text = f"{text[:2000]}\n[rank {self._rank}] … prints too much to show: see .output"
        print(text, flush=True)

    def _hidden(self, line: str) -> bool:
        if _THREAD.match(line) or (self._in_report and _REPORT.match(line)):
            self._in_report = True
            self._report.append(line)
            return True
        self._in_report = False
        return bool(_NOISE.match(line))


def _last_state(line: str) -> str:
    """Return what a line shows on a terminal, where a carriage return starts it anew."""
    return line.rstrip("\r").rpartition("\r")[2]
