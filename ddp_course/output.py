"""What ranks print: whole lines, labelled; noise and floods are kept out of the cell."""

import codecs
import functools
import re
from collections import deque

SHOWN = 200_000  # characters of a rank that are printed in the cell; the rest is only kept
KEPT = 5_000_000  # characters of a rank that are kept from its start, and as many up to its end
LONGEST = 1_000_000  # characters of a line without an end that are waited for

# What PyTorch's C++ side says of sockets, profiling, tear-down (on a healthy run too), an abort,
# and the lines that follow such a message.
_NOISE = re.compile(
    r"(\[rank\d+\]:)?\[[WIE]\d+ .*"
    r"(socket|Socket|TCPStore|ProcessGroup|c10d|gloo|Gloo|NCCL|hostname)"
    r"|terminate called after throwing|  what\(\): |USDT:.*ProfilerHandler"
)
_NOISE_GOES_ON = re.compile(r"Exception raised from |frame #\d+: |<omitting python frames>|$")
# faulthandler's stacks, after a crash or when asked: threads with their frames, innermost first.
_THREAD = re.compile(r"(Current thread|Thread) 0x|Fatal Python error: ")
_REPORT = re.compile(r'  File "|  <no Python frame>|  \.\.\.|  Garbage-|Extension modules: |$')
_CUT_SHORT = ('  File "', "  <no Python frame>", "  Garbage-", "Thread 0x", "Current thread 0x")
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Output:
    """The output of one rank, fed in pieces of any size. `lines` is all that is kept of it.

    `show` is called with what the cell is to print: labelled lines.
    """

    def __init__(self, rank: int):
        self.show = functools.partial(print, flush=True)
        self._rank, self._partial, self._shown = rank, "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first, self._last = [], deque()
        self._room, self._room_at_end, self._left_out = KEPT, KEPT, 0
        self._report, self._in_report, self._in_noise = [], False, False

    def feed(self, data: bytes) -> None:
        """Take a piece, and print the lines that it completes."""
        text = self._partial + self._decoder.decode(data)
        whole, newline, self._partial = text.rpartition("\n")
        if newline:
            self._take(whole.split("\n"))
        if "\r" in self._partial:  # a progress bar: only its last state can be seen
            unfinished = self._partial.endswith("\r")
            self._partial = _last_state(self._partial) + "\r" * unfinished
        if len(self._partial) > LONGEST:
            self._take([self._partial])
            self._partial = ""

    def end(self) -> None:
        """Print what came without a newline, unless it is a report of which the rest is missing."""
        self._partial += self._decoder.decode(b"", final=True)
        cut_short = any(start.startswith(self._partial) for start in _CUT_SHORT)
        if self._partial and not (self._in_report and cut_short):
            self._take([self._partial])
        self._partial = ""

    @property
    def lines(self) -> list[str]:
        note = [f"… {self._left_out} lines left out …"] if self._left_out else []
        return self._first + note + list(self._last)

    @property
    def threads(self) -> list[list[tuple[str, int, str]]]:
        """Stacks that faulthandler wrote: a list of frames, outermost first, for each thread."""
        stacks = []
        for line in self._report:
            if _THREAD.match(line):
                stacks.append([])
            elif (match := _FRAME.match(line)) and stacks:
                stacks[-1].insert(0, (match[1], int(match[2]), match[3]))
        return stacks

    def forget_threads(self) -> None:
        """Forget stacks that were asked for earlier."""
        self._report = []

    def _take(self, lines: list[str]) -> None:
        lines = [_last_state(line) for line in lines]
        for line in lines:
            self._keep(line)
        visible = [line for line in lines if not self._hidden(line)]
        if not visible or self._shown > SHOWN:
            return
        text = "\n".join(f"[rank {self._rank}] {line}" for line in visible)
        self._shown += len(text)
        if self._shown > SHOWN:
            text = f"{text[:2000]}\n[rank {self._rank}] … prints too much to show: see .output"
        self.show(text)

    def _keep(self, line: str) -> None:
        if self._room > 0:
            self._room -= len(line) + 1
            self._first.append(line)
            return
        self._room_at_end -= len(line) + 1
        self._last.append(line)
        while self._room_at_end < 0 and len(self._last) > 1:
            self._room_at_end += len(self._last.popleft()) + 1
            self._left_out += 1

    def _hidden(self, line: str) -> bool:
        if _THREAD.match(line) or (self._in_report and _REPORT.match(line)):
            self._in_report = True
            self._report.append(line)
            return True
        self._in_report = False
        self._in_noise = bool(_NOISE.match(line) or (self._in_noise and _NOISE_GOES_ON.match(line)))
        return self._in_noise


def _last_state(line: str) -> str:
    """Return what a line shows on a terminal, where a carriage return starts it anew."""
    return line.rstrip("\r").rpartition("\r")[2]
