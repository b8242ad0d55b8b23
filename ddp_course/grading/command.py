"""`ddp-course grade`: from paths to a table on screen and reports in a folder."""

import signal
import sys
from pathlib import Path

from . import reports, submission
from .table import EXERCISES, find


def add(commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "grade",
        help="grade submissions, each in processes of its own",
        description="Grades notebooks and scripts: a file is one student; in a folder or zip, "
        "each entry (a file, or a folder) is one. Functions are found by name.",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, folders, zips")
    parser.add_argument(
        "--exercise", action="append", metavar="NAME", help="grade this one (more than once: these)"
    )
    parser.add_argument("--out", default="graded", help="folder for reports (default: graded)")
    parser.add_argument("--jobs", type=int, default=1, help="submissions at a time (default: 1)")
    parser.add_argument("--seed", type=int, help="draw these numbers again")
    parser.add_argument(
        "--timeout", type=float, default=None, help="seconds for one check (default: 10)"
    )
    parser.add_argument(
        "--gradescope",
        action="store_true",
        help="each PATH is one student; write results.json for the first",
    )
    parser.set_defaults(command=run, parser=parser)


def run(arguments) -> int:
    """Grade; return 0 if every submission has its result, 2 for a bad command line."""
    if sys.platform != "linux":
        return _fail("grading needs Linux (a container will do): see exercises/GRADING.md")
    from .grade import BODY, Plan, grade, seed_of

    body = BODY if arguments.timeout is None else arguments.timeout
    if arguments.jobs < 1:
        return _fail(f"--jobs must be at least 1, not {arguments.jobs}")
    if not 0 < body < 3600:
        return _fail(f"--timeout is a number of seconds above 0, not {body:g}")
    try:
        chosen = [find(name) for name in arguments.exercise or EXERCISES]
        found = submission.find(arguments.paths, one_each=arguments.gradescope)
        out = Path(arguments.out)
        seed = seed_of(out, arguments.seed)
    except (ValueError, OSError) as error:
        return _fail(error)
    if not found:
        return _fail(f"there is nothing to grade in {', '.join(arguments.paths)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: cleanly
    plan = Plan(chosen, seed, body, out)
    results = _with_bar(grade, found, plan, arguments.jobs)
    reports.write_all(results, out, arguments.gradescope)
    print(reports.details(results[0]) if len(results) == 1 else reports.table(results))
    print(f"seed {seed}; reports in {out}")
    return 1 if any(result.broken for result in results) else 0


def _with_bar(grade, found, plan, jobs):
    from tqdm import tqdm

    with tqdm(total=len(found), unit="student", disable=None) as bar:
        return grade(found, plan, jobs, on_result=lambda _: bar.update())


def _fail(message) -> int:
    print(f"ddp-course grade: {message}", file=sys.stderr)
    return 2
