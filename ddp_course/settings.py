"""One training run as plain settings: checked in one place, and a command line made from them."""

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import checkpoint, data, logs, models
from .amp import PRECISIONS, MixedPrecision
from .compression import COMPRESSIONS
from .process_group import this_rank

TASKS = {"digits": ("mlp", "cnn"), "text": ("gpt",)}  # the first is the default
STRATEGIES = ("ddp", "fsdp")
LIMITS = {"init_scale": 3e38}
MAY_BE_ZERO = ("warmup_steps", "seed", "ranks")


def _setting(default, help):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """One training run. The global batch is micro_batch × accumulation_steps × world_size."""

    task: str = _setting("digits", "data to train on: digits or text")
    model: str = _setting("", "mlp or cnn for digits, gpt for text (default: the first)")
    precision: str = _setting("fp32", "fp32, bf16 or fp16")
    epochs: int = _setting(20, "passes over the training data")
    micro_batch: int = _setting(32, "items per rank and forward pass")
    accumulation_steps: int = _setting(1, "micro-batches per optimizer step")
    ranks: int = _setting(
        0, "ranks that accumulation_steps is for: on more or fewer the global batch stays (0: off)"
    )
    learning_rate: float = _setting(2e-3, "peak learning rate of AdamW")
    warmup_steps: int = _setting(10, "optimizer steps of linear warm-up")
    max_norm: float = _setting(1.0, "clip the global gradient norm to this")
    init_scale: float = _setting(2.0**16, "first loss scale of fp16")
    growth_interval: int = _setting(
        2000, "fp16: steps without overflow before the loss scale doubles"
    )
    strategy: str = _setting("ddp", "ddp, or fsdp to shard weights, gradients and optimizer state")
    compression: str = _setting("none", "of gradients on their way: none, fp16, bf16 or powersgd")
    seed: int = _setting(0, "seed of split, weights and order")
    checkpoint: str = _setting("", "file to save after every epoch")
    resume: bool = _setting(False, "go on from the checkpoint file if it exists")
    tensorboard: str = _setting("", "folder to write logs for TensorBoard to")

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"unknown task {self.task!r}: choose from {', '.join(TASKS)}.")
        object.__setattr__(self, "model", self.model or TASKS[self.task][0])
        if self.model not in TASKS[self.task]:
            choices = " or ".join(TASKS[self.task])
            raise ValueError(
                f"model {self.model!r} does not fit task {self.task!r}: choose {choices}."
            )
        for name, known in (("strategy", STRATEGIES), ("compression", COMPRESSIONS)):
            if getattr(self, name) not in known:
                choices = ", ".join(known)
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: choose from {choices}.")
        if self.strategy == "fsdp" and self.compression != "none":
            raise ValueError(
                "compression is for DDP's all-reduces: none with strategy fsdp."
            )
        for setting in dataclasses.fields(self):
            value, least = getattr(self, setting.name), 0 if setting.name in MAY_BE_ZERO else 1e-30
            kinds = (int, float) if setting.type is float else setting.type
            if not isinstance(value, kinds) or (setting.type is not bool and value is True):
                kind = setting.type.__name__
                raise ValueError(f"{setting.name} must be of type {kind}, not {value!r}.")
            if setting.type in (int, float) and not least <= value < LIMITS.get(
                setting.name, 2**62
            ):
                least = "at least 0" if least == 0 else "above 0"
                raise ValueError(f"{setting.name} must be {least} and sensible, not {value}.")
        if self.resume and not self.checkpoint:
            raise ValueError("resume needs to know the file: give --checkpoint FILE as well.")

    def window(self, world_size: int) -> int:
        """Return the micro-batches a window on this many ranks; ValueError if there is no such.

        With `ranks` the global batch is that of so many ranks, whatever their number now: a run
        that goes on with fewer machines takes the same steps on the same samples.
        """
        if not self.ranks:
            return self.accumulation_steps
        micro_batches, rest = divmod(self.accumulation_steps * self.ranks, world_size)
        if rest:
            raise ValueError(
                f"{self.accumulation_steps} × {self.ranks} micro-batches (accumulation_steps × "
                f"ranks) cannot be dealt out to {world_size} ranks equally."
            )
        return micro_batches

    def check(self) -> None:
        """Raise ValueError for what this machine cannot do, before any process starts."""
        logs.check(self.tensorboard)
        self.check_place()
        self.window(this_rank().world_size)
        self.mixed_precision().check_model(self.build_model(self.load_data()[0]))

    def check_place(self) -> None:
        """Raise ValueError if the checkpoint could not be written, or would replace a file."""
        if not self.checkpoint:
            return
        path = Path(self.checkpoint)
        if path.is_file() and self.resume:
            try:
                checkpoint.read(path)
            except (OSError, RuntimeError) as error:
                raise ValueError(f"cannot resume: {error}.") from None
        if path.exists() and not self.resume:
            raise ValueError(
                f"{path} exists: --resume goes on from it (resume=True), or choose another name."
            )
        folder = _existing(path.absolute().parent)
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(
                f"the checkpoint {path} cannot be written there: choose another place."
            )

    def identity(self) -> dict:
        """Return what must be equal for a resume: all but places, and who holds which shard."""
        place = ("checkpoint", "resume", "tensorboard", "strategy")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in place}

    def mixed_precision(self) -> MixedPrecision:
        return MixedPrecision(
            self.precision, this_rank().device, self.max_norm, self.init_scale, self.growth_interval
        )

    def load_data(self):
        return data.digits(self.seed) if self.task == "digits" else data.characters(seed=self.seed)

    def build_model(self, train_set) -> torch.nn.Module:
        sizes = {"vocabulary": len(train_set.vocabulary)} if self.model == "gpt" else {}
        return models.build(self.model, **sizes)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists: the rest can be made."""
    return folder if folder.exists() else _existing(folder.parent)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a command line an option for each field of `Settings`."""
    choices = {"task": list(TASKS), "precision": PRECISIONS, "model": sum(TASKS.values(), ())}
    choices |= {"strategy": STRATEGIES, "compression": COMPRESSIONS}
    for setting in dataclasses.fields(Settings):
        name, text = "--" + setting.name.replace("_", "-"), setting.metadata["help"]
        if setting.type is bool:
            parser.add_argument(name, action="store_true", help=text)
        else:
            shown = f"{text} (default: {setting.default})" if setting.default != "" else text
            parser.add_argument(
                name, type=setting.type, default=setting.default, choices=choices.get(setting.name),
                metavar=setting.type.__name__.upper() if setting.name not in choices else None,
                help=shown,
            )  # fmt: skip


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Return the `Settings` that a parsed command line asks for; ValueError for a bad one."""
    names = [setting.name for setting in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(arguments, name) for name in names})
    settings.check()
    return settings


class Parser(argparse.ArgumentParser):
    """argparse with one clear line for a bad command, instead of a usage text and a line."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")
