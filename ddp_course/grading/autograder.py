"""`ddp-course autograder`: the package that Gradescope runs.

A zip with setup.sh (once, when the image is built), run_autograder (for each submission) and this
course. Layout: https://gradescope-autograders.readthedocs.io ("Autograder Specifications").
"""

import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

SETUP = """#!/usr/bin/env bash
# Once, when the image is built: Python, PyTorch for the CPU, and the course.
set -euo pipefail
AUTOGRADER="${AUTOGRADER:-/autograder}"
PYTHON="${PYTHON:-python3}"
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
fi
"$PYTHON" -m venv "$AUTOGRADER/venv"
"$AUTOGRADER/venv/bin/python" -m pip install --index-url https://download.pytorch.org/whl/cpu torch
"$AUTOGRADER/venv/bin/python" -m pip install "$AUTOGRADER/source/course"
"""

RUN = """#!/usr/bin/env bash
# For each submission. Whatever happens, there is a results.json with a score.
AUTOGRADER="${AUTOGRADER:-/autograder}"
PYTHON="${PYTHON:-$AUTOGRADER/venv/bin/python}"
RESULTS="$AUTOGRADER/results"
OUT="$(mktemp -d)"
mkdir -p "$RESULTS"
rm -f "$RESULTS/results.json"
timeout --kill-after=30 "${LIMIT:-2400}" \\
    "$PYTHON" -m ddp_course grade "$AUTOGRADER/submission" --gradescope --out "$OUT" @OPTIONS@
code=$?
if ! cp "$OUT/results.json" "$RESULTS/results.json"; then
    message="The autograder ended with code $code and gave no result. Please tell your instructor."
    echo "{\\"score\\": 0, \\"output\\": \\"$message\\"}" > "$RESULTS/results.json"
fi
rm -rf "$OUT"
exit 0
"""


def add(commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser("autograder", help="make the package that Gradescope runs")
    parser.add_argument("--out", default="autograder.zip", help="default: autograder.zip")
    parser.add_argument(
        "--exercise", action="append", metavar="NAME", help="grade this one (more than once: these)"
    )
    parser.set_defaults(command=run, parser=parser)


def run(arguments) -> int:
    """Write the zip; return 0, or 2 for a bad command line."""
    from .table import find

    project = PACKAGE.parent / "pyproject.toml"
    try:
        for name in arguments.exercise or ():
            find(name)
        if not project.exists():
            raise ValueError(f"{project} is not there: run this from a clone of the course.")
        files = build(Path(arguments.out), arguments.exercise or [])
    except (ValueError, OSError) as error:
        print(f"ddp-course autograder: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {files} files. Upload it as the autograder of the assignment.")
    return 0


def build(out: Path, exercises: list[str]) -> int:
    """Write the zip and return how many files are in it."""
    options = " ".join(f"--exercise {name}" for name in exercises)
    root = PACKAGE.parent
    course = [root / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    course += [file for file in sorted(PACKAGE.rglob("*")) if file.is_file()]
    course = [file for file in course if "__pycache__" not in file.parts and file.exists()]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        _program(archive, "setup.sh", SETUP)
        _program(archive, "run_autograder", RUN.replace("@OPTIONS@", options))
        for file in course:
            archive.write(file, f"course/{file.relative_to(root).as_posix()}")
    return len(course) + 2


def _program(archive, name: str, text: str) -> None:
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o755 << 16
    member.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(member, text)
