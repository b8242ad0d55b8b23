"""The private pipe of an examiner, from the reading end: frames in, or `Stopped`."""

import contextlib
import json
import os
import selectors
import struct

from . import data

MOST_BYTES = 5 * data.MOST_BYTES  # of a frame: the values of all ranks


class Stopped(Exception):
    """The submission has to end now; the text says why."""


@contextlib.contextmanager
def open_pipe():
    """Yield both ends of a pipe, unbuffered; closes them."""
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as r, open(writing, "wb") as w:
        yield r, w


class Stream:
    """Reads (head, payloads) frames from a pipe; raises Stopped for anything else on it."""

    _LENGTH = struct.Struct("<Q")

    def __init__(self, pipe):
        self._pipe, self._buffer, self.over = pipe, bytearray(), False
        os.set_blocking(pipe.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def read(self, seconds: float) -> list:
        """Return the frames that are there, after waiting at most so long for more bytes."""
        if self._selector.select(seconds):
            data = self._pipe.read(1 << 20)
            self.over = data == b""
            self._buffer += data or b""
        frames = []
        while (size := self._size()) is not None and len(self._buffer) >= 8 + size:
            frames.append(self._frame(bytes(self._buffer[8 : 8 + size])))
            del self._buffer[: 8 + size]
        return frames

    def _size(self):
        if len(self._buffer) < 8:
            return None
        size = self._LENGTH.unpack_from(self._buffer)[0]
        if size > MOST_BYTES:
            raise Stopped("what came back is too large")
        return size

    @staticmethod
    def _frame(frame: bytes):
        line, _, rest = frame.partition(b"\n")
        try:
            head = json.loads(line)
            payloads, at = [], 0
            for size in head["sizes"]:
                payloads.append(rest[at : at + size])
                at += size
            head["kind"].lower()
        except Exception:
            raise Stopped("what came back is no answer") from None
        return head, payloads
