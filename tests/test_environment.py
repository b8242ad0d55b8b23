"""What ranks print and report, machines that are set up oddly, limits, order of collectives."""

import contextlib
import functools
import gc
import math
import os
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import cloudpickle
import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import CellError, Kernel, gone, inside, run_script, why_not

from ddp_course import OrderError, RankError, fork_server, launch, report
from ddp_course.process_group import cores

SETUP = """
import os, sys, time, torch, torch.distributed as dist
from ddp_course import launch, report
"""
LAUNCH = functools.partial(launch, timeout=60)
MB = 1 << 20
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers travel as those of cells do


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Two notebooks in a folder whose name has spaces and letters of other languages."""
    folder = tmp_path_factory.mktemp("Übung 3 – 日本 naïve", numbered=False)
    with ThreadPoolExecutor() as pool:
        kernels = list(pool.map(lambda _: Kernel(cwd=str(folder)), range(2)))
        list(pool.map(lambda kernel: kernel.run(SETUP), kernels))
    for kernel in kernels:
        kernel.folder = folder
    yield kernels
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(kernels):
    yield kernels[0]
    assert gone(kernels[0].left(), timeout=2)


def total():
    """A worker: sum of 1 over the ranks."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


# what ranks print


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_flood_is_bounded_in_the_cell_and_in_memory(kernel, length):
    count = 100_000_000 // length
    kernel.run(
        "import psutil\n"
        "def worker():\n"
        "    if dist.get_rank() == 1:\n"
        f"        for number in range({count}):\n"
        f"            print(number, {length - 10} * 'x')\n"
        "before = psutil.Process().memory_info().rss"
    )
    shown = kernel.run("run = launch(worker, timeout=120)")
    assert len(shown) < 300_000 and "[rank 1] 0 xxx" in shown
    assert "prints too much to show: see .output" in shown
    grown = int(kernel.run("print(psutil.Process().memory_info().rss - before)"))
    assert grown < 50 * MB
    kept = eval(kernel.run("print([(rank, line[:40]) for rank, line in run.output])"))
    numbers = [int(line.split()[0]) for rank, line in kept if re.match(r"\d+ x", line)]
    assert numbers[0] == 0 and numbers[-1] == count - 1 and numbers == sorted(numbers)
    notes = [re.fullmatch(r"… (\d+) lines left out …", line) for _, line in kept]
    left_out = sum(int(note[1]) for note in notes if note)
    assert left_out == count - len(numbers)
    assert {rank for rank, _ in kept} == {1}


def test_a_line_of_ten_megabytes_arrives_whole(capfd):
    def worker():
        sys.stdout.write("aü€" * 1_700_000 + "\nthe next line\n")

    run = LAUNCH(worker, nproc=1)
    lines = [line for _, line in run.output]
    assert lines[-1] == "the next line"
    text = "".join(lines[:-1])
    assert text.count("aü€") == 1_700_000 and set(text) == set("aü€")
    assert len(capfd.readouterr().out) < 300_000


def test_bytes_that_are_no_text_do_no_harm(capfd):
    def worker():
        os.write(1, bytes(range(256)) * 100)
        print("\nand text again")

    run = LAUNCH(worker)
    assert [line for _, line in run.output].count("and text again") == 2
    assert "[rank 1] and text again\n" in capfd.readouterr().out


def test_what_pytorchs_cpp_code_says_is_kept_and_not_shown(capfd):
    def worker():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        with contextlib.suppress(dist.DistNetworkError):
            dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(milliseconds=500))
        print("[Warm] my own line")

    run = LAUNCH(worker, nproc=1)
    printed = capfd.readouterr()
    assert printed.out.endswith("[rank 0] [Warm] my own line\n") and printed.err == ""
    assert not re.search(r"\[c10d\]|frame #|Exception raised", printed.out)
    assert any("socket.cpp" in line for _, line in run.output)


def test_a_healthy_run_prints_nothing(capfd):
    def worker():
        train_with_ddp()
        group = dist.new_group([0])
        dist.barrier()
        dist.destroy_process_group(group)

    LAUNCH(worker)
    LAUNCH(dist.destroy_process_group)
    assert capfd.readouterr() == ("", "")


def test_pythons_warnings_are_shown(capfd):
    def worker():
        import warnings

        warnings.warn("the learning rate is odd", stacklevel=2)

    LAUNCH(worker, nproc=1)
    assert "UserWarning: the learning rate is odd" in capfd.readouterr().out


def test_a_progress_bar_of_each_rank_is_one_line(capfd):
    def worker():
        from tqdm.auto import tqdm

        for _ in tqdm(range(5000), mininterval=0, miniters=1, desc="epoch"):
            pass

    LAUNCH(worker)
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2
    for rank in (0, 1):
        assert any(re.match(rf"\[rank {rank}\] epoch: 100%.*5000/5000", line) for line in lines)


# what ranks report


def test_many_records_arrive_all_and_in_order():
    def worker():
        for step in range(25_000):
            report(step=step, loss=0.5)

    seen = []
    run = LAUNCH(worker, on_record=seen.append)
    assert len(seen) == 50_000 and seen == run.records
    for rank in (0, 1):
        steps = [record["step"] for record in seen if record["rank"] == rank]
        assert steps == list(range(25_000))


def test_records_of_every_kind_arrive():
    def worker():
        weight = torch.nn.Parameter(torch.ones(2, 2))
        report(
            tensor=(weight * 2)[:, 0],
            parameter=weight,
            half=torch.tensor(0.5, dtype=torch.bfloat16),
            nan=torch.tensor(math.nan),
            infinite=-math.inf,
            scalar=numpy.float32(0.25),
            count=numpy.int64(7),
            array=numpy.arange(3),
            nested={"ranks": [(0, torch.arange(2))]},
            large=torch.zeros(4_000_000),
            nothing=None,
        )

    record = LAUNCH(worker, nproc=1).records[0]
    assert record["tensor"].tolist() == [2, 2] and not record["tensor"].requires_grad
    assert record["parameter"].tolist() == [[1, 1], [1, 1]]
    assert record["half"] == 0.5 and isinstance(record["half"], float)
    assert math.isnan(record["nan"]) and record["infinite"] == -math.inf
    assert (record["scalar"], record["count"]) == (0.25, 7)
    assert record["array"].tolist() == [0, 1, 2]
    assert record["nested"]["ranks"][0][1].tolist() == [0, 1]
    assert record["large"].numel() == 4_000_000 and record["nothing"] is None


@pytest.mark.parametrize("value", ["threading.Lock()", "socket.socket()", "(i for i in ())"])
def test_a_record_that_cannot_be_sent_says_which_and_the_rank_may_go_on(value):
    def worker(value):
        try:
            names = {"threading": threading, "socket": socket}
            report(step=1, odd={"deep": [eval(value, names)]})
        except TypeError as error:
            report(said=str(error))
        return "went on"

    run = LAUNCH(worker, value, nproc=1)
    assert run.values == ["went on"] and len(run.records) == 1
    assert "report['odd']['deep'][0]" in run.records[0]["said"]


# variables of the notebook

ODD = {
    "stray places": {"MASTER_ADDR": "no.such.host.invalid", "RANK": "3", "WORLD_SIZE": "7"},
    "a stray launcher": {
        **dict.fromkeys(["RANK", "LOCAL_RANK", "GROUP_RANK"], "1"),
        **dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], "2"),
        **dict.fromkeys(["MASTER_ADDR", "TORCHELASTIC_RUN_ID"], "10.255.255.1"),
        **dict.fromkeys(["TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"], "0"),
    },
    "no numbers": {"MASTER_PORT": "http", "RANK": "first", "WORLD_SIZE": "all"},
    "proxies": dict.fromkeys(
        ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"],
        "http://proxy.invalid:3128",
    ),
    "nccl's syntax": {"GLOO_SOCKET_IFNAME": "^lo", "NCCL_SOCKET_IFNAME": "^lo,docker"},
    "an interface that is not there": {"GLOO_SOCKET_IFNAME": "eth99", "TP_SOCKET_IFNAME": "eth99"},
    "debug": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_CPP_LOG_LEVEL": "INFO"},
    "no record of collectives": {"TORCH_FR_BUFFER_SIZE": "0"},
    "no libuv": {"USE_LIBUV": "0"},
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "plain ASCII": {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"},
    "no temporary folder": dict.fromkeys(["TMPDIR", "TEMP", "TMP"], "/no/such/folder"),
    "no home": {"HOME": "/no/such/folder"},
    "no threads": {"OMP_NUM_THREADS": "nonsense"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_variables_do_no_harm(monkeypatch, capfd, name):
    for variable, value in ODD[name].items():
        monkeypatch.setenv(variable, value)

    def worker():
        print("ü")
        return total()

    assert LAUNCH(worker).values == [2, 2]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] ü", "[rank 1] ü"]


def test_omp_num_threads_decides_how_many_threads_a_rank_has(monkeypatch):
    for threads in (1, 3):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        assert LAUNCH(torch.get_num_threads).values == [threads] * 2


# what the notebook has done before


def test_a_process_that_has_used_all_kinds_of_threads_launches():
    busy = torch.randn(400, 400, requires_grad=True)
    (busy @ busy).tanh().sum().backward()
    list(torch.utils.data.DataLoader(torch.arange(8), num_workers=2))
    numpy.linalg.inv(numpy.random.rand(400, 400))
    stop = threading.Event()
    crowd = [threading.Thread(target=stop.wait) for _ in range(20)]
    for thread in crowd:
        thread.start()
    try:
        assert (
            LAUNCH(lambda: float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())).values
            == [64e6] * 2
        )
    finally:
        stop.set()


def test_a_process_group_of_the_notebooks_own_stays_as_it_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert LAUNCH(total, nproc=3).values == [3, 3, 3]
        assert dist.get_world_size() == 1 and total() == 1
    finally:
        dist.destroy_process_group()


def test_a_deleted_folder(kernel):
    kernel.run("os.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')")
    try:
        assert kernel.run("print(launch(dist.get_rank, timeout=60).values)") == "[0, 1]\n"
    finally:
        kernel.run(f"os.chdir({str(kernel.folder)!r})")


@pytest.mark.parametrize("imported", [False, True], ids=["by ranks only", "by the notebook too"])
def test_new_code_of_a_module_beside_the_notebook_runs(kernel, imported):
    """Also if it was edited within a second and is as long as before: neither tells it apart."""
    name = f"beside_{imported}".lower()
    path = kernel.folder / f"{name}.py"
    path.write_text("def answer():\n    return 41\n")
    before = path.stat()
    if imported:
        kernel.run(f"import {name}\nprint({name}.answer())")
    kernel.run(f"def worker():\n    import {name}\n    return {name}.answer()")
    assert kernel.run("print(launch(worker, timeout=60).values)") == "[41, 41]\n"
    path.write_text("def answer():\n    return 42\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kernel.run("print(launch(worker, timeout=60).values)") == "[42, 42]\n"


def test_an_error_in_a_module_beside_the_notebook_names_its_file(kernel):
    (kernel.folder / "faulty.py").write_text("def fail():\n    raise ValueError('bad luck')\n")
    kernel.run("def worker():\n    import faulty\n    faulty.fail()")
    with pytest.raises(CellError) as caught:
        kernel.run("launch(worker, timeout=60)")
    shown = caught.value.shown
    assert f"{kernel.folder / 'faulty.py'}, line 2, in fail" in shown
    assert "raise ValueError('bad luck')" in shown


# machines

ALL_WELL = """
import sys
from ddp_course import launch
import torch, torch.distributed as dist

def worker(path):
    x = torch.ones(1)
    dist.all_reduce(x)
    return int(x)

print([launch(worker, None, timeout=60).values for _ in range(2)])
"""


def needs(command):
    reason = why_not(command)
    return pytest.mark.skipif(bool(reason), reason=f"{command[0]} does not work here: {reason}")


MACHINES = {
    "a host name that does not resolve": "hostname no-such-host.invalid",
    "no network": "ip link set lo up",
    "full temporary folders": """
        mkdir "$TMPDIR/full"; mount -t tmpfs -o size=64k tmpfs "$TMPDIR/full"
        mount -t tmpfs -o size=64k tmpfs /dev/shm
        export TMPDIR="$TMPDIR/full"
        for folder in "$TMPDIR" /dev/shm; do cat /dev/zero > "$folder/filler" 2> /dev/null; done""",
    "a read-only folder": 'mount -t tmpfs -o ro tmpfs "$TMPDIR"; cd "$TMPDIR"',
}


@needs(inside("true"))
@pytest.mark.parametrize("name", MACHINES)
def test_launches_on_a_machine_with(tmp_path, name):
    (tmp_path / "tmp").mkdir()
    prefix = inside(MACHINES[name], network=name != "no network")
    code, out, error = run_script(
        tmp_path / "script.py", ALL_WELL, prefix, TMPDIR=str(tmp_path / "tmp")
    )
    assert (code, out) == (0, "[[2, 2], [2, 2]]\n")
    # PyTorch's store says one line where 127.0.0.1 has no name
    assert not [line for line in error.splitlines() if "hostname of the client socket" not in line]


HANGS = """
from ddp_course import HangError, launch
import torch, torch.distributed as dist

def worker():
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(4))

try:
    launch(worker, timeout=60)
except HangError as error:
    print(torch.__file__, error, error.stacks[1], sep="\\n")
"""


def test_torch_may_be_installed_elsewhere(tmp_path):
    """As with pip install --user, or in the Python below a virtual environment."""
    elsewhere = tmp_path / "site-packages"
    elsewhere.symlink_to(Path(torch.__file__).parents[1])
    paths = [str(elsewhere), *sys.path]
    code, printed, _ = run_script(
        tmp_path / "script.py", HANGS, PYTHONPATH=os.pathsep.join(filter(None, paths))
    )
    place = f"{tmp_path / 'script.py'}, line 7"
    assert code == 0 and printed.startswith(str(elsewhere))
    assert f"rank 1 waits in all_reduce(float32[4]) ({place})" in printed


NAME_SERVER = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.9.9.9", 53))
"""
QUESTIONS = """
server.setblocking(False)
try:
    print("asked for", server.recv(1000))
except BlockingIOError:
    pass
"""


@needs(inside("true"))
def test_a_silent_name_server_does_not_stop_a_launch(tmp_path):
    """PyTorch's store asks for the name of 127.0.0.1; nobody answers, as in a train."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.9.9.9\noptions timeout:1 attempts:1\n")
    setup = f'ip link set lo up; mount --bind "{tmp_path}/resolv.conf" /etc/resolv.conf'
    source = NAME_SERVER + ALL_WELL + QUESTIONS
    code, out, _ = run_script(tmp_path / "script.py", source, inside(setup, network=False))
    assert code == 0 and out.startswith("[[2, 2], [2, 2]]\n")


TOO_MANY = """
import resource, sys, torch.distributed as dist
from ddp_course import launch

print(launch(dist.get_rank).values)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
if sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (26, most))
try:
    launch(dist.get_rank, nproc=8)
except Exception as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(launch(dist.get_rank, nproc=1).values)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_too_few_descriptors_are_said_and_later_launches_work(tmp_path):
    code, printed, _ = run_script(tmp_path / "script.py", TOO_MANY, (), "limit")
    first, *message, last = printed.splitlines()
    assert code == 0 and first == "[0, 1]" and last == "[0]"
    assert len(message) == 1 and "open files" in message[0]


# root may start any number of processes: another user, who can read root's interpreter
OTHER_USER = [
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *(f"--{kind}=-all,+dac_override" for kind in ("inh-caps", "ambient-caps", "bounding-set")),
]
FEW = [*(OTHER_USER if os.name == "posix" and os.geteuid() == 0 else ()), "prlimit", "--nproc=22"]


@needs([*FEW, "true"])
def test_too_few_processes_are_said_and_later_launches_work(tmp_path):
    tmp_path.chmod(0o755)
    code, printed, error = run_script(tmp_path / "script.py", TOO_MANY, FEW)
    lines = printed.splitlines()
    assert code == 0 and lines[0] == "[0, 1]" and lines[-1] == "[0]"
    assert "ulimit -u" in printed and "Traceback" not in printed
    assert len(lines) < 40 and error == ""


# limits


def test_64_launches_leak_nothing():
    def fail():
        raise ValueError("bad luck")

    def some():
        for _ in range(7):
            assert LAUNCH(total).values == [2, 2]
        with pytest.raises(RankError):
            LAUNCH(fail)

    some()
    server = psutil.Process(fork_server.client._process.pid)
    before = state(server)
    for _ in range(8):
        some()
    assert state(server) == before


def state(server):
    gc.collect()
    process = psutil.Process()
    family = {child.pid for child in process.children(recursive=True)} - {server.pid}
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    threads = threading.active_count()
    return process.num_fds(), threads, server.num_fds(), server.num_threads(), family, shared


def test_two_notebooks_launch_at_the_same_time(kernels):
    """The ranks of each go on once they see that those of the other run."""
    for number, kernel in enumerate(kernels):
        kernel.run(
            "def worker():\n"
            f"    open('here {number}', 'w').close()\n"
            f"    while not os.path.exists('here {1 - number}'):\n"
            "        pass\n"
            "    dist.barrier()\n"
            f"    return {number}, dist.get_rank()"
        )
    requests = [kernel.start("print(launch(worker, timeout=60).values)") for kernel in kernels]
    printed = [kernel.finish(request) for kernel, request in zip(kernels, requests, strict=True)]
    assert printed == ["[(0, 0), (0, 1)]\n", "[(1, 0), (1, 1)]\n"]


def test_threads_of_a_notebook_launch_beside_its_cells(kernel):
    """Both ends of a rendezvous run at once; an error stays with its own launch."""
    printed = kernel.run(
        """
import threading
from ddp_course import RankError

def worker(mine, others):
    open(mine, 'w').close()
    while not os.path.exists(others):
        pass
    if mine == 'thread':
        raise ValueError('bad luck')
    return dist.get_world_size()

def in_thread():
    try:
        launch(worker, 'thread', 'cell', nproc=3, timeout=60)
    except RankError as error:
        caught.append(str(error).splitlines()[0])

caught = []
thread = threading.Thread(target=in_thread)
thread.start()
values = launch(worker, 'cell', 'thread', timeout=60).values
thread.join()
print(values, caught)"""
    )
    assert printed == "[2, 2] ['the same error on all ranks.']\n"


def test_a_launch_inside_a_rank_is_refused_in_one_line(kernel):
    kernel.run("def worker():\n    launch(dist.get_rank)")
    with pytest.raises(CellError) as caught:
        kernel.run("launch(worker, timeout=60)")
    assert "RuntimeError: launch() was called inside a rank" in caught.value.shown
    assert "Cell In[" in caught.value.shown and caught.value.shown.count("Error: ") == 2


def test_more_ranks_than_cores_work_and_are_said():
    many = 4 * cores() + 1
    with pytest.warns(UserWarning, match="ranks will mostly wait for one another"):
        assert LAUNCH(total, nproc=many).values == [many] * many


# check_order


def swapped(odd_one):
    a, b = torch.ones(2), torch.full((2,), 10.0)
    if dist.get_rank() == odd_one:
        dist.all_reduce(b)  # b first
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)  # a first
        dist.all_reduce(b)
    return a.tolist()


def line_of(ending) -> str:
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(ending))
    return f"test_environment.py, line {number}"


@pytest.mark.parametrize(("nproc", "odd_one"), [(2, 0), (2, 1), (4, 1), (4, 3)])
def test_two_swapped_sums_are_found_on_request(nproc, odd_one):
    assert (
        LAUNCH(swapped, odd_one, nproc=nproc).values != [[nproc, nproc]] * nproc
    )  # wrong, no word
    with pytest.raises(OrderError) as caught:
        LAUNCH(swapped, odd_one, nproc=nproc, check_order=True)
    said = str(caught.value).splitlines()
    assert said[0] == "collective number 1 is not the same on all ranks:"
    for rank in range(nproc):
        where = line_of("# b first" if rank == odd_one else "# a first")
        assert (
            said[1 + rank].startswith(f"  rank {rank} all_reduce(float32[2])")
            and where in said[1 + rank]
        )


def train_with_ddp():
    """A correct program: DDP, accumulation, a rank that prints, groups, uneven but right calls."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        x = torch.randn(4, 8) + dist.get_rank()
        with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            model(x).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        loss = torch.ones(1)
        dist.all_reduce(loss)
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, {"rank": dist.get_rank()})
    dist.barrier()
    return sum(parameter.sum().item() for parameter in model.parameters())


@pytest.mark.parametrize("nproc", [2, 4])
def test_a_correct_program_is_not_suspected(nproc):
    def worker():
        halves = [dist.new_group([0]), dist.new_group(list(range(1, nproc)))]
        mine = halves[min(dist.get_rank(), 1)]
        for _ in range(1 + min(dist.get_rank(), 1)):  # groups may differ in how often they call
            dist.all_reduce(torch.ones(1), group=mine)
        return train_with_ddp()

    values = LAUNCH(worker, nproc=nproc, check_order=True).values
    assert len(set(values)) == 1
