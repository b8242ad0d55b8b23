"""What each rank has called: PyTorch's flight recorder, read in the ranks, compared outside.

PyTorch keeps the last collectives of a process in memory: operation, sizes, types, whether each is
done, and the Python line that called it. It costs next to nothing and needs no wrapper around
torch.distributed. (Point-to-point operations on gloo are not in it.)
"""

import pickle
from dataclasses import dataclass

from .errors import from_student

BUFFER = "2000"  # collectives to remember, for the variable TORCH_FR_BUFFER_SIZE
WHOLE_RUN = "200000"  # when the order of all of them is compared
_TYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool",
}  # fmt: skip
# Ranks may rightly differ in the sizes of these: only one rank has an input, or parts are uneven.
_UNEVEN = ("scatter", "gather", "all_to_all", "alltoall_base", "send", "recv")


@dataclass(frozen=True)
class Collective:
    """One collective as a rank called it: `number` counts those of its process group, from 1."""

    group: str
    number: int
    name: str
    tensors: str  # "float32[10]", "float32[10], int64[2, 3]", "" for a barrier
    done: bool
    frames: tuple = ()  # (file, line, function), outermost first, where they were asked for

    def __str__(self):
        return f"{self.name}({self.tensors})"

    @property
    def signature(self):
        return self.name if self.name in _UNEVEN else str(self)


def log(most: int | None = None, lines: bool = False) -> list[Collective]:
    """Return this process's last (`most`) collectives, oldest first; [] if none are kept.

    `lines` asks for the Python stacks as well: PyTorch then imports its compiler, which takes a
    second or two in a process that has not done so.
    """
    from torch._C import _distributed_c10d as c10d

    try:
        entries = pickle.loads(c10d._dump_fr_trace(True, lines, False)).get("entries", [])
    except (AttributeError, RuntimeError, TypeError):  # a PyTorch that keeps none for this backend
        return []
    return [_collective(entry) for entry in entries[-most if most else 0 :]]


def _collective(entry: dict) -> Collective:
    frames = entry.get("frames") or ()
    shapes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    return Collective(
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        name=entry["profiling_name"].rpartition(":")[2],
        tensors=", ".join(f"{_TYPES.get(kind, kind)}{list(size)}" for kind, size in shapes),
        done=entry["retired"],
        frames=tuple(
            from_student([(f["filename"], f["line"], f["name"]) for f in reversed(frames)])
        ),
    )


def pending(log: list[Collective]) -> Collective | None:
    """Return the oldest collective that a rank waits for, or None."""
    return next((collective for collective in log if not collective.done), None)


def disagreement(logs: dict[int, list[Collective]], key=lambda collective: collective.signature):
    """Return {rank: Collective} for the first place where ranks called different things, or None.

    Two ranks are compared over the collectives of a process group that both remember.
    """
    places = {}
    for rank, collectives in logs.items():
        for collective in collectives:
            places.setdefault((collective.group, collective.number), {})[rank] = collective
    for place in sorted(places, key=lambda place: place[1]):
        if len({key(collective) for collective in places[place].values()}) > 1:
            return places[place]
    return None
