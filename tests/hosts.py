"""Several hosts on one machine: network namespaces that are joined by a switch, for tests.

Each host has an interface eth0 at 10.99.0.1, 10.99.0.2, … and a name of its own, host1, host2, …;
files and processors are shared. All namespaces go when the processes in them have gone.
"""

import contextlib
import os
import signal
import subprocess
import sys

ROOT = [] if hasattr(os, "geteuid") and os.geteuid() == 0 else ["--user", "--map-root-user"]
SWITCH = """
mount -t tmpfs none /run && mkdir /run/netns
ip link set lo up && ip link add switch type bridge && ip link set switch up
"""
HOST = """
ip netns add host{n} && ip link add port{n} type veth peer name eth0 netns host{n}
ip link set port{n} master switch up && ip -n host{n} link set lo up
ip -n host{n} addr add 10.99.0.{n}/24 dev eth0 && ip -n host{n} link set eth0 up
"""


class Hosts:
    """A context manager: `count` hosts, numbered from 1."""

    def __init__(self, count: int):
        setup = "set -e\n" + SWITCH + "".join(HOST.format(n=n + 1) for n in range(count))
        self.count = count
        self._holder = subprocess.Popen(
            ["unshare", *ROOT, "--mount", "--net", "sh", "-c", f"{setup}\necho up\nexec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if self._holder.stdout.readline() != "up\n":
            self._holder.wait()
            raise OSError(self._holder.stderr.read().strip() or "no namespaces")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in range(1, self.count + 1):
            self.power_off(number)
        self._holder.communicate()  # the end of its input is the end of `cat`

    def _inside(self) -> list[str]:
        user = ["--user", "--preserve-credentials"] if ROOT else []
        return ["nsenter", "--target", str(self._holder.pid), *user, "--mount", "--net"]

    def ip(self, command: str) -> str:
        """Run the command `ip` where the switch and all its ports are; return what it prints."""
        whole = [*self._inside(), "ip", *command.split()]
        return subprocess.run(whole, check=True, capture_output=True, text=True).stdout

    def cut(self, number: int) -> None:
        """Pull a host's cable."""
        self.ip(f"link set port{number} down")

    def heal(self, number: int) -> None:
        """Put a host's cable back."""
        self.ip(f"link set port{number} up")

    def power_off(self, number: int) -> None:
        """Kill every process of a host."""
        for pid in self.ip(f"netns pids host{number}").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def sent_again(self) -> int:
        """Return how many TCP segments all hosts have sent once more, having heard nothing."""
        return sum(self._sent_again(number + 1) for number in range(self.count))

    def _sent_again(self, number: int) -> int:
        told = self.ip(f"netns exec host{number} cat /proc/net/snmp")
        names, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def start(self, number: int, *command: str, **env) -> subprocess.Popen:
        """Start a command on a host, in a session of its own; its output is one text stream."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{number}"]
        return subprocess.Popen(
            [*self._inside(), "ip", "netns", "exec", f"host{number}", *named, *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **env},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def torchrun(self, number: int, nodes: int | str, *arguments: str, ranks=1, **env):
        """Start torchrun on a host, one of so many `nodes` ("1:2"); host 1 holds the rendezvous."""
        return self.start(
            number, sys.executable, "-m", "torch.distributed.run",
            f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--local-addr=10.99.0.{number}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=10.99.0.1:29400",
            f"--rdzv-conf=is_host={int(number == 1)},last_call_timeout=5", *arguments, **env,
        )  # fmt: skip


def why_not() -> str:
    """Return why there can be no hosts here, "" if there can."""
    try:
        with Hosts(1):
            return ""
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"
