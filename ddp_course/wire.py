"""What crosses the pipes between the notebook and a rank: length-prefixed pickles, tensors as CPU
copies.

Nothing is ever shared between processes: `torch.multiprocessing` would hand every rank the *same*
storage of a CPU tensor, and a model that is never synchronised would then look synchronised.
"""

import importlib
import io
import os
import pickle
import struct
import sys
import types

import cloudpickle

_LENGTH = struct.Struct("<Q")


def dumps(value) -> bytes:
    """Pickle `value`: functions and classes of a notebook by value, tensors as detached CPU copies.

    Raises whatever pickle raises for something that cannot leave its process.
    """
    import torch  # here, so that importing the package does not wait for torch

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj):
            if isinstance(obj, torch.Tensor) and not isinstance(obj, torch.nn.Parameter):
                # clone: a slice would otherwise carry the whole storage it looks into
                return obj.detach().cpu().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(obj, torch.nn.parallel.DistributedDataParallel):
                raise pickle.PicklingError(
                    "a model inside DDP stays in its rank: take model.module"
                )
            if isinstance(obj, types.ModuleType) and sys.modules.get(obj.__name__) is obj:
                return importlib.import_module, (obj.__name__,)  # torch.backends.cudnn is special
            if isinstance(obj, types.CodeType):
                # cloudpickle hides the file name; tracebacks need it to find the cell
                make, state = self.dispatch_table[types.CodeType](obj)
                hidden = "<dynamic-code>"
                return make, tuple(obj.co_filename if part == hidden else part for part in state)
            return super().reducer_override(obj)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


loads = pickle.loads


def unpicklable(value, name: str, depth: int = 5) -> str | None:
    """Say in a few words which part of `value` cannot be pickled, or None if all of it can."""
    try:
        dumps(value)
        return None
    except Exception as error:  # pickle raises TypeError, PicklingError, RuntimeError and more
        reason = error
    parts = []
    if not depth:  # it may hold itself
        pass
    elif isinstance(value, dict):
        parts = [(item, f"{name}[{key!r}]") for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(item, f"{name}[{index}]") for index, item in enumerate(value)]
    for part, label in parts:
        if found := unpicklable(part, label, depth - 1):
            return found
    return f"{name} (a {type(value).__module__}.{type(value).__qualname__}: {reason})"


def write(fd: int, frame: bytes) -> None:
    """Write one length-prefixed frame to a blocking descriptor, whole."""
    view = memoryview(_LENGTH.pack(len(frame)) + frame)
    while view:
        view = view[os.write(fd, view) :]


def read(fd: int) -> bytes | None:
    """Read one frame from a blocking descriptor; None at its end."""
    head = _read_exactly(fd, _LENGTH.size)
    return None if head is None else _read_exactly(fd, _LENGTH.unpack(head)[0])


def _read_exactly(fd: int, size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = os.read(fd, min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


class Frames:
    """Cuts a byte stream, fed in pieces of any size, into the frames that `write` made."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        frames, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames
