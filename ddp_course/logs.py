"""A training's records as TensorBoard's files: `tensorboard --logdir FOLDER` draws them."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

from .process_group import this_rank

SCALARS = ("loss", "learning_rate", "grad_norm", "loss_scale", "samples_per_s", "communication")


def check(folder: str) -> None:
    """Raise ValueError if logs are asked for and cannot be written."""
    if folder and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("logs for TensorBoard need a package: pip install tensorboard.")


@contextlib.contextmanager
def tensorboard(folder: str) -> Iterator[Callable[[dict], None]]:
    """Yield what writes a record of `train.run`, on rank 0; it does nothing without a folder."""
    if not folder or this_rank().rank != 0:
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as board:

        def write(record):
            for name in SCALARS:
                if name in record:
                    board.add_scalar(name, record[name], record["step"])

        yield write
