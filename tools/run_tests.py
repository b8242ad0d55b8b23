"""Everything `make test` runs, with the current Python: `python tools/run_tests.py [PART …]`.

Parts: style (ruff), sync (notebooks against their text sources), tests (the package), lessons
(every notebook executed again and compared with its stored outputs). All of them run, also after
one has failed; the exit code is 0 only if all passed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TWO = ("-n", "2", "--dist", "loadfile")  # files at a time: they mostly wait
NBVAL = ("-m", "pytest", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120")


def notebooks() -> list[str]:
    """The notebooks to run again, relative to the root; a tree may still have none."""
    found = [
        *ROOT.glob("notebooks/*.ipynb"),
        *ROOT.glob("notebooks/demos/*.ipynb"),
        *ROOT.glob("solutions/*.ipynb"),
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


PARTS = {
    "style": lambda: ["-m", "ruff", "check", "."],
    "sync": lambda: ["tools/notebooks.py", "check"],
    "tests": lambda: ["-m", "pytest", "tests", *TWO],
    "lessons": lambda: [*NBVAL, *notebooks()],
}


def run(part: str, environment: dict[str, str]) -> tuple[bool, float]:
    """Whether a part passed, and its seconds. pytest's 5, no test found, is a failure too."""
    print(f"\n==== {part}", flush=True)
    if part == "lessons" and not notebooks():
        print("no notebook to run")
        return True, 0.0
    start = time.monotonic()
    done = subprocess.run([sys.executable, *PARTS[part]()], cwd=ROOT, env=environment)
    return done.returncode == 0, time.monotonic() - start


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no part {unknown[0]!r}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    beside_python = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": beside_python + os.pathsep + os.environ.get("PATH", "")}
    results = {name: run(name, environment) for name in names or PARTS}
    print("\n==== all parts")
    for name, (passed, seconds) in results.items():
        print(f"{name:8} {'passed' if passed else 'FAILED'} {seconds:7.1f} s")
    failed = [name for name, (passed, _) in results.items() if not passed]
    print(f"FAILED: {', '.join(failed)}" if failed else "Everything passed.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
