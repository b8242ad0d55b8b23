"""`ddp-course bench [TARGET …]`: measure, print a table, write JSON and a picture."""

import importlib
import json
import platform
import sys
import time
from pathlib import Path

import torch

from . import TARGETS, table

ROUNDS = 5


def add(commands) -> None:
    """Add the command to `ddp-course`."""
    bench = commands.add_parser(
        "bench",
        help="measure this course beside what would be used instead",
        epilog="Targets: " + "; ".join(f"{name}: {what}" for name, what in TARGETS.items()) + ".",
    )
    bench.add_argument("targets", nargs="*", metavar="TARGET", help="default: all, about an hour")
    bench.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    bench.add_argument("--out", default=".", metavar="FOLDER", help="for the JSON and the picture")
    bench.set_defaults(command=main, parser=bench)


def main(arguments) -> int:
    """Measure; return 0 if every goal is met, 1 if one is not, 2 for a bad command line."""
    names = arguments.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        return _refuse(f"no target {unknown[0]!r}: there are {', '.join(TARGETS)}")
    if arguments.rounds < 1:
        return _refuse(f"--rounds must be at least 1, not {arguments.rounds}")
    folder = Path(arguments.out)
    if not folder.is_dir():
        return _refuse(f"--out {folder}: there is no such folder")
    done = {}
    for name in names:
        print(f"\n==== {name}: {TARGETS[name]}", flush=True)
        module = importlib.import_module(f".{name}", __package__)
        done[name] = module.measure(arguments.rounds, _say)
        for case in done[name]:
            print("\n" + "\n".join(table.lines(case)), flush=True)
    stem = folder / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"  # a new name: nothing is overwritten
    return _keep(done, stem)


def _keep(done, stem: Path) -> int:
    """Write what was measured; return the exit code."""
    cases = {name: [case.as_dict() for case in found] for name, found in done.items()}
    path = stem.with_suffix(".json")
    path.write_text(json.dumps({"machine": machine(), "targets": cases}, indent=1))
    from .chart import chart, compared

    written = [path]
    if compared(found := [case for cases in done.values() for case in cases]):
        written.append(stem.with_suffix(".png"))
        written[-1].write_bytes(chart(found).png())
    verdicts = [v["met"] for case in found for v in case.verdicts()]
    print(f"\n{verdicts.count(True)} goals met, {verdicts.count(False)} not met, "
          f"{verdicts.count(None)} not measured")  # fmt: skip
    print("written: " + " and ".join(map(str, written)))
    return 1 if False in verdicts else 0


def machine() -> dict:
    """Return on what was measured."""
    from ..process_group import cores

    return {
        "system": platform.system(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count(),
    }


def _say(text: str) -> None:
    """Show, in a terminal, what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _refuse(message: str) -> int:
    print(f"ddp-course bench: {message}", file=sys.stderr)
    return 2
