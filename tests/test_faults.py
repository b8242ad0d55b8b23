"""Faults of student code, through a live kernel: what is seen, how soon, and that nothing is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from faults import AT_TIME_OUT, CASES, FAULTS, IMPORTS
from kernels import MARK, CellError, Kernel, gone, marked

SOON = 30  # seconds: far less than a time-out that a message must not wait for
LAUNCH = "from ddp_course import launch, report, HangError, RankError\n"
TWO_RANKS = "print(launch(dist.get_rank, timeout=60).values)"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(IMPORTS + LAUNCH)
    yield kernel
    kernel.close()


def assert_well(kernel):
    """Nothing of ours is left, and the kernel launches again."""
    assert gone(kernel.left(), timeout=2)
    assert kernel.run(TWO_RANKS) == "[0, 1]\n"


def assert_seen(text, expected):
    for one in expected:
        choices = (one,) if isinstance(one, str) else one
        assert any(choice in text for choice in choices), f"{choices} not in:\n{text}"


@pytest.mark.parametrize(
    ("fault", "nproc", "bad"), CASES, ids=[f"{f.name}-{bad} of {n}" for f, n, bad in CASES]
)
def test_fault(kernel, fault, nproc, bad):
    began = time.monotonic()
    with pytest.raises(CellError) as caught:
        call = f"launch(worker, {bad}, nproc={nproc}, timeout={fault.timeout})"
        kernel.run(f"{fault.source}\n{call}")
    seconds = time.monotonic() - began
    shown = caught.value.shown

    def place(line):
        return f"Cell In[{caught.value.cell}], line {line}"

    assert re.match(r"(\w+): ", shown)[1] in fault.error.split()
    assert_seen(shown, fault.expected(bad, nproc, place))
    assert seconds < SOON
    assert len(shown.splitlines()) < 40 and "ddp_course" not in shown
    assert_well(kernel)
