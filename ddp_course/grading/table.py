"""The table of all exercises: adding one means one module below `exercises` and one line here."""

import difflib
import importlib
from collections.abc import Mapping

from .exercise import Exercise

MODULES = (
    "e01_memory_ledger",
    "e02_ring_all_reduce",
    "e03_dp_vs_ddp",
    "e04_average_gradients",
    "e04_bucketed_ddp",
    "e05_exact_accuracy",
    "e05_shard_indices",
    "e06_train_ddp",
    "e07_accumulate_window",
    "e07_no_sync_window",
    "e07_token_mean",
    "e08_amp_step",
    "e08_dynamic_scaler",
    "e09_full_step",
    "e09_resume",
    "e10_scaling_report",
    "e11_find_the_hang",
    "e12_torchrun_script",
    "e13_zero1_optimizer",
    "e14_capstone",
)


class _Table(Mapping):
    """{name: Exercise}; a module is imported when it is looked up."""

    def __getitem__(self, name: str) -> Exercise:
        module = f"e{name}"
        if module not in MODULES:
            raise KeyError(name)
        return importlib.import_module(f"{__package__}.exercises.{module}").EXERCISE

    def __iter__(self):
        return (module[1:] for module in MODULES)

    def __len__(self):
        return len(MODULES)


EXERCISES = _Table()


def find(name: str) -> Exercise:
    """Return the exercise of this name; raise ValueError, with the nearest names, if none is."""
    if name in EXERCISES:
        return EXERCISES[name]
    near = difflib.get_close_matches(str(name), list(EXERCISES), n=3, cutoff=0.3)
    raise ValueError(f"there is no exercise {name!r}: did you mean {', '.join(near or EXERCISES)}?")
