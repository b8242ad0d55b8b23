"""Live Jupyter kernels and scripts for tests."""

import os
import subprocess
import sys

from ddp_course.bench.kernel import MARK, CellError, Kernel, gone, marked

__all__ = ["MARK", "CellError", "Kernel", "gone", "inside", "marked", "run_script", "why_not"]


def run_script(path, source, before=(), *arguments, **env) -> tuple[int, str, str]:
    """Run a script, behind the command `before`; return its exit code, output and error output."""
    path.write_text(source)
    ended = subprocess.run(
        [*before, sys.executable, str(path), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout, ended.stderr


def inside(setup: str, network=True) -> list[str]:
    """Return a command prefix: what follows sees mounts, host name (and network) of its own.

    `setup` is what a shell, which is root there, does first.
    """
    root = [] if hasattr(os, "geteuid") and os.geteuid() == 0 else ["--map-root-user"]
    spaces = ["--mount", "--uts", *([] if network else ["--net"])]
    return ["unshare", *root, *spaces, "sh", "-c", f'{setup}\nexec "$@"', "sh"]


def why_not(command: list[str]) -> str:
    """Return why this command cannot be run here, "" if it can."""
    try:
        ended = subprocess.run([*command], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return ended.stderr.strip() if ended.returncode else ""
