"""Live Jupyter kernels to measure and to test in, and a look at the processes they have."""

import contextlib
import os
import queue
import sys
import time
import uuid

import psutil
from jupyter_client import KernelManager

MARK = "DDP_COURSE_KERNEL"  # in the environment of a kernel, and so of everything that it starts


class Kernel:
    """One kernel; `run(code)` returns what the cell printed, or raises CellError."""

    def __init__(self, env=(), **options):
        self.mark = uuid.uuid4().hex
        options["env"] = {**os.environ, **dict(env), MARK: self.mark}
        self.manager = KernelManager(kernel_name="python3")
        # this interpreter, whatever an installed kernel spec says; a history of its own
        self.manager.kernel_spec.argv[:] = [
            sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
            "--HistoryManager.hist_file=:memory:", "--log-level=ERROR",
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

    def number(self, expression: str, timeout=120) -> float | None:
        """Return what a numeric expression is there; None if that takes longer than `timeout`."""
        try:
            told = self.run(f"print('NUMBER', {expression})", timeout)
        except queue.Empty:
            return None
        return float(told.rpartition("NUMBER")[2].split()[0])

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

    def kill(self) -> None:
        """Close it, and kill what it leaves behind."""
        self.close()
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def kernel(folder=None):
    """Yield a kernel in this folder, and kill it and what it started afterwards."""
    live = Kernel(cwd=folder)
    try:
        yield live
    finally:
        live.kill()


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
