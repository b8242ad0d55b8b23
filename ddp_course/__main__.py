"""The command line: `ddp-course doctor · lab · train · progress · grade · autograder · bench`.

The same as `python -m ddp_course …`.
"""

import os
import sys
from pathlib import Path

from .bench import command as bench
from .settings import Parser, add_arguments, settings_from

FIRST_LESSON = "notebooks/00_start_here.ipynb"


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit code: 0 only for success, 2 for a bad command line."""
    parser = Parser(prog="ddp-course", description="A course on distributed training in PyTorch.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    doctor = commands.add_parser(
        "doctor", help="what this machine can do, and how to fix what it cannot"
    )
    doctor.add_argument(
        "--cluster", action="store_true", help="under torchrun: can these machines train together?"
    )
    doctor.set_defaults(command=_doctor, parser=doctor)
    lab = commands.add_parser(
        "lab",
        help="open JupyterLab on the first lesson",
        epilog="Further options go to JupyterLab.",
    )
    lab.set_defaults(command=_lab)
    _add_train(commands)
    _add_grading(commands)
    bench.add(commands)
    progress = commands.add_parser("progress", help="which exercises are solved")
    progress.set_defaults(command=_progress, parser=progress)
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command is not _lab:
        arguments.parser.error(f"unknown option {rest[0]}")
    arguments.rest = rest
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # … | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _add_train(commands):
    train = commands.add_parser(
        "train", help="train a real model on real data with DDP, accumulation and mixed precision"
    )
    train.add_argument("--nproc", type=int, default=2, help="ranks on this machine (default: 2)")
    train.add_argument("--timeout", type=float, default=None, help="seconds (default: no limit)")
    train.add_argument(
        "--plot", metavar="FILE.png", help="save loss, loss scale and throughput here"
    )
    train.add_argument(
        "--every", type=int, default=10, help="print every so many steps (default: 10)"
    )
    add_arguments(train)
    train.set_defaults(command=_train, parser=train)


def _add_grading(commands):
    from .grading import autograder, command

    command.add(commands)
    autograder.add(commands)


def _doctor(arguments) -> int:
    from . import cluster, doctor

    return cluster.main() if arguments.cluster else doctor.main()


def _progress(_) -> int:
    from .grading import progress

    print(progress.table())
    return 0


def _lab(arguments) -> int:
    """Become JupyterLab, so that signals and the exit code are its own; returns if it cannot."""
    course = Path(__file__).parents[1]
    if not (course / FIRST_LESSON).exists():
        return _fail("lab", f"{course / FIRST_LESSON} is not there: run this from a clone.")
    # As in an activated environment: a cell that says !torchrun must find this one's.
    programs = str(Path(sys.executable).parent)
    os.environ["PATH"] = programs + os.pathsep + os.environ.get("PATH", "")
    os.environ["VIRTUAL_ENV"] = sys.prefix
    options = [f"--ServerApp.root_dir={course}", f"--LabApp.default_url=/lab/tree/{FIRST_LESSON}"]
    command = [sys.executable, "-m", "jupyterlab", *options, *arguments.rest]
    return os.execv(sys.executable, command)


def _train(arguments) -> int:
    from . import HangError, RankError, launch
    from .train import describe, run, summary

    if arguments.every < 1:
        return _fail("train", f"--every must be at least 1, not {arguments.every}")

    def show(record):
        last = record["step"] + 1 == record["steps"]
        if record["rank"] == 0 and (
            record["step"] % arguments.every == 0 or record["skipped"] or last
        ):
            print(describe(record), flush=True)

    try:
        plot = _picture(arguments.plot)
        settings = settings_from(arguments)
        settings.window(arguments.nproc)
        done = launch(
            run, settings, nproc=arguments.nproc, timeout=arguments.timeout, on_record=show
        )
    except (ValueError, TypeError) as error:
        return _fail("train", error)
    except (RankError, HangError) as error:
        print(f"ddp-course train: {error}", file=sys.stderr)
        return 1
    print(summary(done.values[0]))
    if plot:
        from . import plots

        if not done.records:
            print("nothing was left to train: no picture")
            return 0
        plots.summary(done).savefig(plot)
        print(f"picture saved as {plot}")
    return 0


def _picture(name: str | None) -> Path | None:
    """Return where the picture goes; ValueError, before the run, for a bad place."""
    if name is None:
        return None
    path = Path(name)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {name}: the name must end in .png, .svg or .pdf")
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ValueError(f"--plot {name}: cannot write there")
    return path


def _fail(command: str, message) -> int:
    print(f"ddp-course {command}: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
