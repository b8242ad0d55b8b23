"""A live Jupyter kernel for tests, and a look at the processes it has."""

import contextlib
import sys

import psutil
from jupyter_client import KernelManager


class Kernel:
    """One kernel; `run(code)` returns what the cell printed, or raises CellError."""

    def __init__(self, **options):
        self.manager = KernelManager(kernel_name="python3")
        # this interpreter, whatever an installed kernel spec says
        self.manager.kernel_spec.argv[:] = [
            sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"
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
        """Return what a started cell printed, once it has ended."""
        printed, error = "", None
        while True:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "execute_result":
                printed += content["data"]["text/plain"]
            elif kind == "error":
                error = "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                if error is not None:
                    raise CellError(error, printed)
                return printed

    def run(self, code: str, timeout=120) -> str:
        return self.finish(self.start(code), timeout)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


class CellError(Exception):
    """A cell raised: `shown` is what the notebook displays, `printed` what came before."""

    def __init__(self, shown, printed):
        super().__init__(shown)
        self.shown, self.printed = shown, printed


def gone(processes, timeout=10) -> bool:
    """Return whether all these processes end within `timeout` seconds."""
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return not alive
