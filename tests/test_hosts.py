"""Several machines, in network namespaces: the same numbers as one, and when one of them goes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from hosts import Hosts, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
TRAIN = ("-m", "ddp_course.train", "--epochs=2", "--micro-batch=96")
PATIENCE = 100  # seconds for a training, on a busy machine


class Running:
    """One torchrun, of which the output is read line by line; killed when it takes too long."""

    def __init__(self, process):
        self.process, self.output, self.late = process, "", False
        self._timer = threading.Timer(PATIENCE, self._end)
        self._timer.start()

    def _end(self):
        self.late = True
        self.kill()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def until(self, text: str) -> None:
        """Wait until it prints a line that holds `text`."""
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}:\n{self.output}")

    def finish(self, code: int | None = 0) -> str:
        """Return all that it printed, once it has ended, with this exit code, if one is given."""
        self.output += self.process.stdout.read()
        ended = self.process.wait()
        self._timer.cancel()
        assert not self.late, f"after {PATIENCE} s it still ran:\n{self.output}"
        assert code in (ended, None), self.output
        return self.output


def start_all(hosts, nodes: int | str, *arguments, **env) -> list[Running]:
    numbers = range(1, hosts.count + 1)
    return [Running(hosts.torchrun(n, nodes, *arguments, **env)) for n in numbers]


def losses(output: str) -> list[str]:
    """What a training says, without its speed: steps with their losses, and the test's."""
    steps = re.findall(r"^(step.*?)  \d+ samples/s", output, re.MULTILINE)
    return steps + re.findall(r"^test loss.*", output, re.MULTILINE)


def one_host(ranks: int, *options: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks}", *TRAIN, *options], capture_output=True, text=True,
        timeout=PATIENCE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.mark.parametrize("count", (2, 3))
def test_hosts_train_as_one(count):
    with Hosts(count) as hosts:
        outputs = [run.finish() for run in start_all(hosts, count, *TRAIN)]
    told = [losses(output) for output in outputs if losses(output)]
    assert told == [one_host(count)]  # by one rank only, and to the last digit


def test_a_host_that_is_lost_and_comes_back_costs_no_step(tmp_path):
    options = ("--max-restarts=3", *TRAIN, f"--checkpoint={tmp_path / 'run.pt'}", "--resume")
    # Without it torchrun (2.13) does not tell a node that is new where the old ones meet.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Hosts(2) as hosts:
        first, second = start_all(hosts, 2, *options, **env)
        first.until("step   12/")  # of 16: in the second epoch, after the first checkpoint
        hosts.power_off(2)
        second.process.communicate()
        again = Running(hosts.torchrun(2, 2, *options, **env))
        told = losses(first.finish())
        again.finish()
    assert told[-9:] == one_host(2)[-9:]  # the second epoch, whole, and the test


def test_a_host_that_stays_away_leaves_the_others_with_the_same_global_batches(tmp_path):
    options = (*TRAIN, f"--checkpoint={tmp_path / 'run.pt'}", "--resume", "--ranks=2")
    with Hosts(2) as hosts:
        first, second = start_all(hosts, "1:2", "--max-restarts=3", *options)
        first.until("step   12/")
        hosts.power_off(2)
        second.process.communicate()
        told = steps(first.finish())
    expected = steps("\n".join(one_host(2)))
    assert [step for step, _ in told[-8:]] == [step for step, _ in expected[-8:]]
    # but for the sample with which two ranks fill up the last window of an epoch
    mine, theirs = ([loss for _, loss in run[-8:]] for run in (told, expected))
    assert mine[0] == theirs[0] and mine == pytest.approx(theirs, rel=0.02)


def steps(output: str) -> list[tuple[int, float]]:
    """The number and the loss of each step."""
    return [(int(n), float(x)) for n, x in re.findall(r"step +(\d+)/\d+  loss ([\d.]+)", output)]


def test_a_cable_that_is_pulled_and_put_back_changes_nothing():
    with Hosts(2) as hosts:
        first, second = start_all(hosts, 2, *TRAIN)
        first.until("step    3/")
        sent_again = hosts.sent_again()
        hosts.cut(2)
        while hosts.sent_again() == sent_again:  # one of them tries, in vain
            pass
        hosts.heal(2)
        told = losses(first.finish())
        second.finish()
    assert told == one_host(2)
