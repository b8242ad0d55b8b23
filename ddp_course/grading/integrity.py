"""Which functions a submission has replaced: a look before and after, in its own process.

It stops no one who takes the trouble. What counts is that expected values are out of reach.
"""

import sys
import types

MODULES = (
    "builtins",
    "inspect",
    "os",
    "random",
    "time",
    "torch",
    "torch.autograd",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    "torch.nn.functional",
    "torch.nn.parallel.distributed",
)
CLASSES = (
    "torch.Tensor",
    "torch.distributed.ProcessGroup",
    "torch.nn.Linear",
    "torch.nn.Module",
    "torch.nn.parallel.DistributedDataParallel",
)
CHECK = "the check"  # what `run` of a case calls
_CALLABLE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type),
    *(types.WrapperDescriptorType, staticmethod, classmethod, property),
)
_ADDED = object()


def snapshot(run) -> dict:
    """Return what is looked at: the functions of torch, Python, this package and of the check."""
    seen = {}
    own = [name for name in sys.modules if name.partition(".")[0] == "ddp_course"]
    for name in (*MODULES, *own):
        if name in sys.modules:
            _look(seen, name, vars(sys.modules[name]))
    for name in CLASSES:
        module, _, attribute = name.rpartition(".")
        for base in reversed(getattr(sys.modules[module], attribute).__mro__):  # as looked up
            _look(seen, name, vars(base))
    _look(seen, CHECK, run.__globals__)
    return seen


def _look(seen, owner, namespace):
    for name, value in list(namespace.items()):
        if isinstance(value, _CALLABLE):
            seen[owner, name] = value, getattr(value, "__code__", None)


def changed(before: dict, run) -> list[str]:
    """Return the names of functions that are no longer what they were, are gone, or hide others."""
    now, missing = snapshot(run), (_ADDED, None)
    names = [name for name in before if now.get(name, missing)[0] is not before[name][0]]
    names += [name for name in before if now.get(name, missing)[1] is not before[name][1]]
    names += [name for name in now if name[0] == CHECK and name not in before]
    return sorted({f"{owner}.{name}" for owner, name in names})
