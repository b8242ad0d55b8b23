"""Faults of student code, through live kernels and scripts: what is seen, nothing is left."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from faults import FAULTS, IMPORTS, positions
from kernels import MARK, CellError, Kernel, gone, marked

SOON = 20  # seconds: far less than a time-out that a message must not wait for
COURSE = "from ddp_course import launch, report, HangError, RankError\n"
BY_NAME = {fault.name: fault for fault in FAULTS}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def new_kernel():
    kernel = Kernel()
    kernel.run(IMPORTS + COURSE)
    return kernel


@pytest.fixture(scope="module")
def kernels():
    """One for each position of a fault: launches mostly wait, so they go side by side."""
    with ThreadPoolExecutor() as pool:
        kernels = [job.result() for job in [pool.submit(new_kernel) for _ in positions(4)]]
    yield kernels
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(kernels):
    yield kernels[0]
    assert_well(kernels[0])


@pytest.fixture
def own_kernel():
    kernel = new_kernel()
    yield kernel
    with contextlib.suppress(psutil.NoSuchProcess):
        kernel.close()


def assert_well(kernel):
    """Nothing of ours is left, and the kernel launches again."""
    assert gone(kernel.left(), timeout=2)
    assert kernel.run("print(launch(dist.get_rank, timeout=60).values)") == "[0, 1]\n"


def assert_seen(text, expected):
    for one in expected:
        choices = (one,) if isinstance(one, str) else one
        assert any(choice in text for choice in choices), f"{' | '.join(choices)}\nnot in:\n{text}"


def fails(kernel, code) -> CellError:
    """Run a cell that must raise, and soon; return the error."""
    request = kernel.start(code)
    try:
        printed = kernel.finish(request, timeout=SOON)
    except CellError as error:
        return error
    except queue.Empty:
        kernel.manager.interrupt_kernel()
        with pytest.raises(CellError):
            kernel.finish(request)
        return pytest.fail(f"nothing was seen in {SOON} s")
    return pytest.fail(f"no error, but {printed!r}")


# what students do


@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told(kernels, fault, nproc):
    with ThreadPoolExecutor() as pool:
        places = zip(kernels, positions(nproc), strict=False)
        jobs = [pool.submit(check, kernel, fault, nproc, bad) for kernel, bad in places]
    for job in jobs:
        job.result()


def check(kernel, fault, nproc, bad):
    call = f"launch(worker, {bad}, nproc={nproc}, timeout={fault.timeout})"
    error = fails(kernel, f"{fault.source}\n{call}")

    def place(line):
        return f"Cell In[{error.cell}], line {line}"

    assert re.match(r"\w+", error.shown)[0] in fault.error.split()
    assert_seen(error.shown, fault.expected(bad, nproc, place))
    assert error.shown.count("\n") < 40 and "ddp_course" not in error.shown
    assert error.shown.count("ValueError: bad luck") <= 1  # said once, however many ranks said it
    assert error.printed == ""  # nothing of what PyTorch's C++ code had to say
    assert_well(kernel)


@pytest.mark.parametrize("first", [0, 1])
def test_the_first_error_is_named_even_when_its_message_comes_last(kernel, first, tmp_path):
    """The second rank raises once the first one's error is being described, which takes a while."""
    error = fails(
        kernel,
        f"""
class Slow(Exception):
    def __str__(self):
        open({str(tmp_path / "described")!r}, "w").close()
        return str(sum(range(3_000_000)))

def worker():
    if dist.get_rank() == {first}:
        raise Slow()
    while not os.path.exists({str(tmp_path / "described")!r}):
        pass
    raise ValueError("second")
launch(worker, timeout=60)""",
    )
    expected = [f"rank {first} failed first", f"rank {1 - first} failed too: ValueError: second"]
    assert_seen(error.shown, expected)


def test_the_exception_keeps_the_record(kernel):
    fault = BY_NAME["one batch fewer"]
    fails(kernel, f"{fault.source}\nprint('hello')\nlaunch(worker, 1, timeout=120)")
    show = "import sys; error = sys.last_value\n"
    stack = kernel.run(show + "print(error.stacks[0])")
    assert 0 < stack.index("average(torch.ones(4))") < stack.index("dist.all_reduce(x)")
    calls = kernel.run(show + "print([[str(c) for c in calls] for calls in error.collectives])")
    assert eval(calls) == [["all_reduce(float32[4])"] * 3, ["all_reduce(float32[4])"] * 2]


def test_what_a_crash_prints_is_kept_and_not_shown(kernel):
    error = fails(kernel, f"{BY_NAME['leaves with os.abort()'].source}\nlaunch(worker, 1)")
    assert error.printed == "" and "most recent call first" not in error.shown
    kept = kernel.run(
        "import sys\nprint([line for rank, line in sys.last_value.output if rank == 1])"
    )
    assert "Fatal Python error: Aborted" in kept and "in worker" in kept


def test_a_line_without_an_end_is_seen_when_its_rank_hangs(kernel):
    error = fails(
        kernel,
        "def worker():\n"
        "    print('almost there', end='', flush=True)\n"
        "    if dist.get_rank() == 1:\n"
        "        dist.barrier()\n"
        "launch(worker, timeout=120)",
    )
    assert "[rank 1] almost there\n" in error.printed
    kept = kernel.run("import sys\nprint(sys.last_value.output)")
    assert eval(kept) == [(0, "almost there"), (1, "almost there")]


@pytest.mark.parametrize("when", ["while ranks start", "later"])
def test_ranks_without_their_guardian_end_the_run_at_once(own_kernel, when):
    error = fails(
        own_kernel,
        """
class KillsWhenItArrives:
    def __reduce__(self):
        return eval, ("__import__('os').kill(__import__('os').getppid(), 9)",)

def worker(arguments):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)
"""
        + f"launch(worker, {'KillsWhenItArrives()' if when == 'while ranks start' else None})",
    )
    assert error.shown.startswith("RankError: ")
    assert_well(own_kernel)


def test_a_rank_that_stops_its_guardian_does_not_stop_the_notebook(own_kernel):
    error = fails(
        own_kernel,
        "def worker():\n"
        "    if dist.get_rank() == 1:\n"
        "        os.kill(os.getppid(), signal.SIGSTOP)\n"
        "    time.sleep(1000)\n"
        "launch(worker, timeout=1)",
    )
    assert error.shown.startswith("HangError: no result after 1 s")
    assert_well(own_kernel)


# what students press

UP = "    print('up', flush=True)\n"
BLOCKED = {
    "in collectives that never match": "    dist.recv(torch.ones(1)) if rank else dist.barrier()",
    "in a loop that ignores signals": """\
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass""",
    "in C code that lets no thread run": "    ctypes.PyDLL(None).sleep(1000)",
    "while it floods the notebook": "    while True:\n        print(100 * 'spam')",
}


def blocked(source, **options) -> str:
    options = {"timeout": 600, **options}
    arguments = ", ".join(f"{name}={value}" for name, value in options.items())
    return f"def worker():\n    rank = dist.get_rank()\n{UP}{source}\nlaunch(worker, {arguments})"


def interrupted(kernel, request, presses=1):
    try:
        printed = kernel.finish(request, timeout=SOON)
    except CellError as error:
        assert "Interrupt" in error.shown
    else:
        # IPython cannot show a frame without a line number, and prints Python's own traceback then;
        # and a second interrupt may meet it as it is to show the first.
        assert "KeyboardInterrupt" in printed or presses > 1


@pytest.mark.parametrize("where", BLOCKED)
def test_interrupts_in_a_row_and_the_same_cell_again_at_once(kernel, where):
    for presses in (1, 2, 3):
        request = kernel.start(blocked(BLOCKED[where]))
        kernel.wait_for("[rank 1] up")
        for _ in range(presses):
            os.kill(kernel.pid, signal.SIGINT)
        interrupted(kernel, request, presses)
        assert gone(kernel.left(), timeout=1)


def test_interrupts_while_ranks_start(kernel):
    """Again and again, to meet different moments; the first time the fork server starts, too."""
    next(p for p in kernel.descendants() if p.ppid() == kernel.pid).kill()
    for _ in range(10):
        request = kernel.start("print('go', flush=True)\n" + blocked(BLOCKED[next(iter(BLOCKED))]))
        kernel.wait_for("go")
        kernel.manager.interrupt_kernel()
        interrupted(kernel, request)
        assert gone(kernel.left(), timeout=2)


def test_an_interrupt_reaches_a_callback(kernel):
    code = "report(step=0)\n    time.sleep(1000)"
    callback = "lambda record: (print('called', flush=True), time.sleep(1000))"
    request = kernel.start(blocked("    " + code, on_record=callback))
    kernel.wait_for("called")
    kernel.manager.interrupt_kernel()
    interrupted(kernel, request)


def test_a_restarted_kernel_launches(own_kernel):
    own_kernel.start(blocked(BLOCKED["in C code that lets no thread run"]))
    own_kernel.wait_for("[rank 1] up")
    family = own_kernel.left()
    own_kernel.manager.restart_kernel(now=True)
    own_kernel.client.wait_for_ready(timeout=60)
    assert gone(family)
    own_kernel.run(IMPORTS + COURSE)
    assert_well(own_kernel)


@pytest.mark.parametrize("when", ["while ranks start", "with daemons of ranks"])
def test_a_killed_kernel_leaves_nothing(own_kernel, when):
    if when == "while ranks start":
        own_kernel.start("print('up', flush=True)\nlaunch(lambda: time.sleep(1000))")
        own_kernel.wait_for("up")
    else:
        own_kernel.start(
            "def worker():\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0:\n"
            "            print('up', flush=True)\n"
            "            time.sleep(1000)\n"
            "        os._exit(0)\n"
            "    dist.barrier()\n"
            "    ctypes.PyDLL(None).sleep(1000)\n"
            "launch(worker)"
        )
        own_kernel.wait_for("[rank 1] up")
    psutil.Process(own_kernel.pid).kill()
    assert gone(marked(own_kernel.mark))


@pytest.mark.parametrize("end", ["killed", "shut down"])
@pytest.mark.parametrize("wait", [True, False])
def test_what_ranks_started_ends_with_the_kernel(own_kernel, end, wait):
    own_kernel.start(
        "def worker():\n"
        "    for _ in range(10):\n"
        "        subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    dist.barrier()\n"
        "    time.sleep(1000)\n"
        f"run = launch(worker, timeout=None, wait={wait})"
    )

    def sleepers():
        return [p for p in marked(own_kernel.mark) if p.name() == "sleep"]

    deadline = time.monotonic() + 60
    while len(sleepers()) < 20:
        assert time.monotonic() < deadline
    family = sleepers()
    if end == "killed":
        psutil.Process(own_kernel.pid).kill()
    else:
        own_kernel.manager.shutdown_kernel(now=wait)  # a busy kernel would not hear of it
    assert gone(family)


# from a script


@contextlib.contextmanager
def script(folder, source):
    """Start a script in a process group of its own; yield it, its path and its mark."""
    path, mark = folder / "script.py", uuid.uuid4().hex
    path.write_text(IMPORTS + COURSE + source)
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, str(path), mark
    finally:
        process.kill()
        process.communicate()


DRIVER = """

def try_all():
    import json
    for program, timeout in zip(programs, {timeouts}):
        try:
            launch(program, 1, timeout=timeout)
            said = "no error", ""
        except Exception as error:
            said = type(error).__name__, str(error)
        print("SAID", json.dumps(said), flush=True)

try_all()
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """What one script that meets all faults, one after the other, says: {name: (error, text)}."""
    source, lines = "programs = []\n", {}
    for fault in FAULTS:
        lines[fault.name] = (IMPORTS + COURSE + source).count("\n")
        source += f"{fault.source}\nprograms.append(worker)\n"
    source += DRIVER.format(timeouts=[fault.timeout for fault in FAULTS])
    with script(tmp_path_factory.mktemp("script"), source) as made:
        process, path, mark = made
        printed, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        assert gone(marked(mark))
    said = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("SAID ")]
    told = {fault.name: one for fault, one in zip(FAULTS, said, strict=True)}
    return lambda fault: (
        *told[fault.name],
        lambda line: f"{path}, line {line + lines[fault.name]}",
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_script_is_told_the_same(scripted, fault):
    error, text, place = scripted(fault)
    assert error in fault.error.split()
    assert_seen(text, fault.expected(1, 2, place))


PLAIN_SIGNALS = """\
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and & pass on SIG_IGN
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_a_signal_to_a_script_ends_all_of_it(tmp_path, name):
    source = PLAIN_SIGNALS + blocked(BLOCKED["in a loop that ignores signals"])
    with script(tmp_path, source) as (process, _, mark):
        while "[rank 1] up" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, getattr(signal, name))
        process.communicate(timeout=SOON)
        assert gone(marked(mark))
