"""Live Jupyter kernels and scripts for tests, and a look at the processes they have."""

import contextlib
import os
import subprocess
import sys
import time
import uuid

import psutil
from jupyter_client import KernelManager

MARK = "DDP_COURSE_TEST"  # in the environment of a kernel, and so of everything that it starts


class Kernel:
    """One kernel; `run(code)` returns what the cell printed, or raises CellError."""

    def __init__(self, env=(), **options):
        self.mark = uuid.uuid4().hex
        options["env"] = {**os.environ, **dict(env), MARK: self.mark}
        self.manager = KernelManager(kernel_name="python3")
        # this interpreter, whatever an installed kernel spec says; a history of its own
        self.manager.kernel_spec.argv[:] = [
            sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
            "--HistoryManager.hist_file=:memory:",
        ]  # fmt: skip
        self.manager.start_kernel(**options)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def start(self, code: str) -> str:
        """Send a cell without waiting for its end."""
        return self.client.execute(code)

    def wait_for(self, text: str, timeout=60) -> str:
        """Return what was printed up to and with `text`."""
        seen = ""
        while text not in seen:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["msg_type"] == "stream":
                seen += message["content"]["text"]
            if message["msg_type"] == "error":
                raise CellError("\n".join(message["content"]["traceback"]), seen)
        return seen

    def finish(self, request: str, timeout=120) -> str:
        """Return what a started cell printed, once it has ended; raise queue.Empty if too late."""
        printed, error, cell = "", None, None
        deadline = time.monotonic() + timeout
        while True:
            message = self.client.get_iopub_msg(timeout=max(0, deadline - time.monotonic()))
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_input":
                cell = content["execution_count"]
            elif kind == "execute_result":
                printed += content["data"]["text/plain"]
            elif kind == "error":
                error = content
            elif kind == "status" and content["execution_state"] == "idle":
                if error is not None:
                    brief = f"{error['ename']}: {error['evalue']}"
                    raise CellError("\n".join(error["traceback"]), printed, cell, brief)
                return printed

    def run(self, code: str, timeout=120) -> str:
        return self.finish(self.start(code), timeout)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def left(self) -> list[psutil.Process]:
        """Return what cells started and what still lives, without the fork server."""
        return [p for p in marked(self.mark) if p.pid != self.pid and not self._is_server(p)]

    def _is_server(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # guardians and ranks have its command line too
            return process.ppid() == self.pid and "fork_server" in " ".join(process.cmdline())
        return False

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


class CellError(Exception):
    """A cell raised: what the notebook has `shown` of it, what was `printed` before.

    `cell` is its number, as in In[3]; `brief` the error without traceback.
    """

    def __init__(self, shown, printed, cell=None, brief=""):
        super().__init__(shown)
        self.shown, self.printed, self.cell, self.brief = shown, printed, cell, brief


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes with this mark in their environment, whoever their parents are."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def gone(processes, timeout=10) -> bool:
    """Return whether all these processes end within `timeout` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not alive


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
