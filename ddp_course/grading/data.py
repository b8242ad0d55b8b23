"""Plain data as bytes, and back: numbers, text, lists, dicts, tensors. Nothing in it can run.

What a submission's process sends is read with this alone; `pickle` would call what it is told to.
A message is the length of a JSON text, the text, then the elements of all tensors.
"""

import json
import struct

import torch

MOST_BYTES = 64 << 20  # of a message
MOST_PARTS = 200_000  # lists, numbers, texts … in it
DEEPEST = 30

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}
_LENGTH = struct.Struct("<Q")


class Broken(ValueError):
    """Bytes that `encode` has not made."""


def encode(value) -> bytes:
    """Return plain data as bytes; raise TypeError for anything else in it."""
    blobs = []
    text = json.dumps(_plain(value, blobs)).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def _plain(value, blobs):
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value, blobs)
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_plain(item, blobs) for item in value)]
    if isinstance(value, dict):
        return ["dict", *([_key(k), _plain(v, blobs)] for k, v in value.items())]
    raise TypeError(f"a {type(value).__name__} is no plain data")


def _key(key):
    if type(key) not in (str, int):
        raise TypeError(f"a {type(key).__name__} cannot be a key of plain data")
    return key


def _tensor(tensor, blobs):
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES or tensor.layout != torch.strided:
        raise TypeError(f"a tensor of {name}, {tensor.layout} is no plain data")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    blobs.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return ["tensor", name, list(tensor.shape)]


def decode(message: bytes):
    """Return the data in a message; raise Broken for anything that `encode` does not make."""
    try:
        return _Reader(message).value
    except Broken:
        raise
    except Exception as error:  # broken JSON has many ways to fail: too deep, no text …
        raise Broken(f"no data: {type(error).__name__}") from None


class _Reader:
    def __init__(self, message: bytes):
        if not _LENGTH.size <= len(message) <= MOST_BYTES:
            raise Broken(f"no data: {len(message)} bytes")
        end = _LENGTH.size + _LENGTH.unpack_from(message)[0]
        if end > len(message):
            raise Broken("no data: cut short")
        self._message, self._at, self._parts = message, end, 0
        self.value = self._value(json.loads(message[_LENGTH.size : end]), 0)
        if self._at != len(message):
            raise Broken("no data: bytes are left over")

    def _value(self, told, depth):
        self._parts += 1
        if self._parts > MOST_PARTS or depth > DEEPEST:
            raise Broken("no data: too many parts")
        if told is None or isinstance(told, bool | int | float | str):
            return told
        if not isinstance(told, list) or not told:
            raise Broken("no data: an unknown part")
        kind, *items = told
        if kind == "tensor":
            return self._tensor(*items)
        if kind == "dict":
            return {_key(k): self._value(v, depth + 1) for k, v in items}
        if kind in ("list", "tuple"):
            values = [self._value(item, depth + 1) for item in items]
            return values if kind == "list" else tuple(values)
        raise Broken("no data: an unknown part")

    def _tensor(self, name, shape):
        if any(type(n) is not int or n < 0 for n in shape) or len(shape) > DEEPEST:
            raise Broken("no data: the shape of a tensor")
        dtype, count = _DTYPES[name], 1
        for n in shape:
            count *= n
        end = self._at + count * dtype.itemsize
        if end > len(self._message):
            raise Broken("no data: a tensor is cut short")
        raw, self._at = bytearray(self._message[self._at : end]), end
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        if dtype == torch.bool:  # any byte but 0 and 1 is no bool
            flat = torch.frombuffer(raw, dtype=torch.uint8) != 0 if raw else flat
        return flat.reshape(shape)
