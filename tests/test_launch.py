"""`launch` through its public interface: values, records, output, errors, nothing left."""

import functools
import gc
import io
import os
import signal
import sys
import threading

import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import gone

from ddp_course import HangError, RankError, Run, fork_server, launch, machine, report, this_rank

LAUNCH = functools.partial(launch, timeout=60)


def left_behind() -> list[psutil.Process]:
    """Ranks and guardians of this process that still live (the fork server itself may)."""
    mine = psutil.Process().children(recursive=True)
    server = fork_server.client._process
    return [process for process in mine if server is None or process.pid != server.pid]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert gone(left_behind())


def test_a_closure_runs_on_every_rank_with_arguments_and_returns_by_rank():
    offset = 10

    def worker(a, *, b):
        total = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(total)
        return {"sum": total, "who": [dist.get_rank(), a + b + offset]}

    for nproc in (1, 2, 3):
        run = LAUNCH(worker, 1, b=2, nproc=nproc)
        assert isinstance(run, Run) and len(run.values) == nproc
        for rank, value in enumerate(run.values):
            assert value["who"] == [rank, 13]
            assert torch.equal(value["sum"], torch.full((3,), nproc * (nproc + 1) / 2))


def test_eight_ranks():
    assert LAUNCH(lambda: dist.get_world_size(), nproc=8).values == [8] * 8


def test_every_launch_starts_fresh_processes():
    def worker():
        os.environ["LEFT_OVER"] = "yes"
        return os.getpid()

    first, second = LAUNCH(worker).values, LAUNCH(worker).values
    assert len({*first, *second, os.getpid()}) == 5
    assert "LEFT_OVER" not in os.environ
    assert LAUNCH(lambda: os.environ.get("LEFT_OVER")).values == [None, None]


def test_arguments_and_values_are_copies_never_shared_memory():
    model, sliced = torch.nn.Linear(4, 4), torch.zeros(1_000_000)[:2]
    before = model.weight.detach().clone()

    def worker(model, sliced):
        with torch.no_grad():
            model.weight += 1 + dist.get_rank()
        sliced += 1
        dist.barrier()
        return model.weight, model, sliced

    values = LAUNCH(worker, model, sliced).values
    for rank, (weight, returned, _) in enumerate(values):
        assert torch.allclose(weight, before + 1 + rank)
        assert isinstance(returned.weight, torch.nn.Parameter)
    assert torch.equal(model.weight, before) and sliced.sum() == 0
    assert values[0][2].untyped_storage().nbytes() == 8  # not the million it was cut from


def test_records_stream_while_ranks_run_and_reach_on_record():
    seen = []

    def worker():
        for step in range(3):
            report(step=step, loss=torch.tensor(step / 2), many=torch.arange(3))
        report(step="last")

    run = LAUNCH(worker, on_record=seen.append)
    assert seen == run.records
    for rank in (0, 1):
        mine = [record for record in run.records if record["rank"] == rank]
        assert [record["step"] for record in mine] == [0, 1, 2, "last"]
        assert mine[1]["loss"] == 0.5 and isinstance(mine[1]["loss"], float)
        assert mine[1]["many"].tolist() == [0, 1, 2]
        times = [record["time"] for record in mine]
        assert times == sorted(times) and times[0] > 0


def test_a_record_arrives_before_the_run_has_ended(tmp_path):
    """Ranks go on until there is a file that only the callback makes."""
    flag = tmp_path / "seen"

    def worker():
        report(step=0)
        stop = torch.zeros(1)
        while not stop:
            stop[0] = float(flag.exists())
            dist.broadcast(stop, 0)
        return "released"

    assert LAUNCH(worker, on_record=lambda record: flag.touch()).values == ["released"] * 2


def test_an_error_in_on_record_ends_the_run():
    def worker():
        report(step=0)
        threading.Event().wait()

    with pytest.raises(ZeroDivisionError):
        LAUNCH(worker, on_record=lambda record: 1 / 0)


def test_output_is_whole_labelled_lines_from_python_and_below(capfd):
    def worker():
        rank = dist.get_rank()
        print("from", "print", rank, "ü")
        print("from stderr", rank, file=sys.stderr)
        os.write(1, b"from a descriptor\n")
        print("no newline at the end", end="")

    run = LAUNCH(worker)
    printed = capfd.readouterr()
    for rank in (0, 1):
        lines = [line for number, line in run.output if number == rank]
        assert lines == [
            f"from print {rank} ü",
            f"from stderr {rank}",
            "from a descriptor",
            "no newline at the end",
        ]
        for line in lines:
            assert f"[rank {rank}] {line}\n" in printed.out
    assert printed.err == ""


def test_the_environment_path_and_folder_are_the_notebooks(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MY_SETTING", "on")

    def worker():
        import beside

        return os.getcwd(), os.environ["MY_SETTING"], beside.answer()

    assert LAUNCH(worker).values == [(str(tmp_path), "on", 42)] * 2


def test_ranks_share_the_cores_and_know_their_place():
    def worker():
        me = this_rank()
        return me.rank, me.local_rank, me.world_size, me.local_world_size, torch.get_num_threads()

    cores = machine.cores()[1]
    assert LAUNCH(worker, nproc=2).values == [(r, r, 2, 2, max(1, int(cores) // 2)) for r in (0, 1)]


def test_numpy_and_python_random_differ_between_ranks():
    def worker():
        import random

        import numpy

        return numpy.random.rand(), random.random()

    first, second = LAUNCH(worker).values
    assert first[0] != second[0] and first[1] != second[1]


# errors


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_is_that_of_the_rank_that_failed_first(rank):
    def worker(bad):
        total = torch.ones(1)
        dist.all_reduce(total)
        if dist.get_rank() == bad:
            raise ValueError(f"bad luck on {bad}")
        dist.all_reduce(total)

    with pytest.raises(RankError) as caught:
        LAUNCH(worker, rank)
    error = caught.value
    assert error.rank == rank
    assert f"ValueError: bad luck on {rank}" in error.traceback
    assert 'raise ValueError(f"bad luck on {bad}")' in error.traceback  # the student's own line
    assert "ddp_course" not in error.traceback  # none of the launcher's own lines
    assert "all_reduce" in error.others[1 - rank]
    assert f"rank {rank} failed first" in str(error)


def test_causes_are_kept():
    def worker():
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("outer") from error

    with pytest.raises(RankError) as caught:
        LAUNCH(worker, nproc=1)
    trace = caught.value.traceback
    assert (
        trace.index("KeyError: 'missing'")
        < trace.index("direct cause")
        < trace.index("RuntimeError: outer")
    )


def test_an_error_on_all_ranks_is_said_once():
    def worker():
        dist.barrier()
        raise ValueError("the same everywhere")

    with pytest.raises(RankError, match="the same error on all ranks") as caught:
        LAUNCH(worker, nproc=3)
    assert str(caught.value).count("the same everywhere") == 2  # the line of code, and the error


@pytest.mark.parametrize("how", ["os._exit(0)", "os._exit(3)", "sys.exit(0)", "SIGKILL", "SIGSEGV"])
def test_a_rank_that_ends_without_a_value_has_failed(how):
    def worker(how):
        if dist.get_rank() == 1:
            if how.startswith("SIG"):
                os.kill(os.getpid(), getattr(signal, how))
            exec(how, {"os": os, "sys": sys})
        dist.barrier()

    with pytest.raises(RankError) as caught:
        LAUNCH(worker, how)
    assert caught.value.rank == 1
    word = {
        "os._exit(0)": "exit code 0",
        "os._exit(3)": "exit code 3",
        "sys.exit(0)": "SystemExit: 0",
    }
    assert word.get(how, how) in str(caught.value)


def test_a_value_that_cannot_be_sent_is_that_ranks_error():
    def worker():
        return {"lock": threading.Lock()} if dist.get_rank() == 1 else None

    with pytest.raises(RankError, match=r"value\['lock'\].*_thread\.lock") as caught:
        LAUNCH(worker)
    assert caught.value.rank == 1


def test_a_record_that_cannot_be_sent_names_the_field():
    with pytest.raises(RankError, match=r"report\['lock'\].*_thread\.lock"):
        LAUNCH(lambda: report(lock=threading.Lock()), nproc=1)


def test_a_hang_says_where_every_rank_is():
    def worker():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
        else:
            threading.Event().wait()  # never reaches the collective

    with pytest.raises(HangError) as caught:
        launch(worker, timeout=1)
    message, stacks = str(caught.value), caught.value.stacks
    assert "rank 0 waits in all_reduce" in message and "test_launch.py, line" in message
    assert "rank 1 is at" in message and "threading.Event().wait()" in message
    assert "rank 1 never called it" in message
    assert "dist.all_reduce(torch.ones(1))" in stacks[0] and "threading.Event().wait()" in stacks[1]


def test_a_rank_that_has_returned_is_named_in_a_hang():
    def worker():
        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(HangError, match="rank 1 had returned"):
        launch(worker, timeout=1)


def test_what_ranks_started_ends_with_them_also_in_its_own_session():
    def worker():
        import subprocess

        sleepers = [
            subprocess.Popen(["sleep", "1000"], start_new_session=own, stdin=subprocess.DEVNULL)
            for own in (False, True)
        ]
        return [sleeper.pid for sleeper in sleepers]

    for pid in sum(LAUNCH(worker).values, []):
        assert not psutil.pid_exists(pid)


def test_a_rank_that_ignores_signals_ends_too():
    def worker():
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        report(pid=os.getpid())
        while True:
            pass

    pids = []
    with pytest.raises(HangError):
        launch(worker, timeout=0.5, on_record=lambda record: pids.append(record["pid"]))
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def test_a_killed_server_is_replaced():
    LAUNCH(lambda: None)
    server = psutil.Process(fork_server.client._process.pid)
    server.kill()
    assert gone([server])
    assert LAUNCH(lambda: dist.get_rank()).values == [0, 1]


def test_a_launch_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(LAUNCH(lambda: dist.get_rank()).values))
    thread.start()
    assert LAUNCH(lambda: dist.get_rank() * 2).values == [0, 2]
    thread.join()
    assert found == [[0, 1]]


def test_launches_leak_nothing():
    LAUNCH(lambda: None)
    gc.collect()  # errors of other tests keep their runs
    process = psutil.Process()
    before = process.num_fds(), threading.active_count()
    for _ in range(10):
        LAUNCH(lambda: torch.ones(1000))
    assert (process.num_fds(), threading.active_count()) == before


# bad input: one clear line, before any process starts


@pytest.mark.parametrize(
    ("error", "line", "call"),
    [
        (ValueError, "at least one rank", {"nproc": 0}),
        (ValueError, "at least one rank", {"nproc": -2}),
        (TypeError, "whole number: got 2.0", {"nproc": 2.0}),
        (TypeError, "whole number: got '2'", {"nproc": "2"}),
        (TypeError, "whole number: got True", {"nproc": True}),
        (ValueError, "free memory for about", {"nproc": 100_000}),
        (ValueError, "unknown backend 'mpi'", {"backend": "mpi"}),
        (ValueError, "timeout is a number of seconds", {"timeout": 0}),
        (ValueError, "timeout is a number of seconds", {"timeout": "soon"}),
        (TypeError, "on_record must be a function", {"on_record": 3}),
        (TypeError, "needs a function to run", {"fn": 3}),
        (TypeError, "unexpected keyword argument 'typo'", {"typo": 1}),
    ],
)
def test_bad_arguments_fail_before_any_process_starts(monkeypatch, error, line, call):
    monkeypatch.setattr(
        "ddp_course.processes.start", lambda nproc: pytest.fail("a process started")
    )
    with pytest.raises(error, match=line) as caught:
        launch(**{"fn": lambda: None, **call})
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_without_a_gpu_says_so():
    with pytest.raises(ValueError, match="needs one GPU for each rank.*this machine has no GPU"):
        launch(lambda: None, backend="nccl")


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    with pytest.raises(TypeError, match="the variable 'lock'"):
        launch(lambda: lock)
    with pytest.raises(TypeError, match=r"argument 1\[1\]"):
        launch(lambda pair: None, [io.BytesIO(), lock])
    with pytest.raises(TypeError, match="argument 'guard'"):
        launch(lambda guard: None, guard=lock)


def test_many_ranks_a_core_warn():
    cores = int(machine.cores()[1])
    with pytest.warns(UserWarning, match="ranks will mostly wait"):
        from ddp_course.launch import check_nproc

        check_nproc(4 * cores + 1)


def test_a_launch_inside_a_rank_is_refused():
    with pytest.raises(RankError, match="ranks cannot launch ranks"):
        LAUNCH(lambda: launch(lambda: None))


# new interpreters instead of forks, as on Windows and macOS


def test_spawned_ranks_do_the_same(monkeypatch):
    monkeypatch.setenv("DDP_COURSE_START", "spawn")

    def worker(bad):
        report(step=dist.get_rank())
        print("hello")
        if bad and dist.get_rank() == 1:
            raise ValueError("bad luck")
        total = torch.ones(1)
        dist.all_reduce(total)
        return total

    run = LAUNCH(worker, False)
    assert [value.item() for value in run.values] == [2, 2]
    assert sorted(record["step"] for record in run.records) == [0, 1]
    assert sorted(run.output) == [(0, "hello"), (1, "hello")]
    with pytest.raises(RankError, match="rank 1 failed first"):
        LAUNCH(worker, True)


# what students do


def test_unseeded_ranks_differ_like_separate_processes():
    first, second = LAUNCH(lambda: torch.rand(3)).values
    assert not torch.equal(first, second)


def test_a_function_that_names_torch_backends_is_sent():
    def worker():
        torch.backends.cudnn.deterministic = True
        return torch.backends.cudnn.deterministic

    assert LAUNCH(worker).values == [True, True]


def test_a_wrapped_model_is_refused_with_advice():
    def worker():
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(RankError, match="take model.module"):
        LAUNCH(worker)


def test_a_rank_that_forks_returns_its_own_value():
    def worker():
        return "child" if os.fork() == 0 else "parent"

    assert LAUNCH(worker).values == ["parent", "parent"]


def test_this_rank_knows_a_group_that_was_set_up_by_hand(tmp_path):
    meeting = f"file://{tmp_path}/meeting"

    def worker():
        dist.destroy_process_group()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
        dist.init_process_group("gloo", meeting, rank=rank, world_size=world_size)
        return this_rank().rank, this_rank().world_size

    assert LAUNCH(worker).values == [(0, 2), (1, 2)]


def test_a_value_that_cannot_be_read_is_that_ranks_error():
    class Poison:
        def __reduce__(self):
            return eval, ("1 / 0",)

    with pytest.raises(RankError, match="ZeroDivisionError.*\n.*cannot be read here") as caught:
        LAUNCH(lambda: Poison() if dist.get_rank() == 1 else None)
    assert caught.value.rank == 1


def test_endless_recursion_is_told_briefly():
    def worker(n=0):
        return worker(n + 1)

    with pytest.raises(RankError, match="RecursionError") as caught:
        LAUNCH(worker)
    assert len(str(caught.value).splitlines()) < 40


@pytest.mark.parametrize("kind", ["async", "generator"])
def test_what_is_no_plain_function_is_refused(kind):
    async def coroutine():
        pass

    def generator():
        yield 1

    with pytest.raises(TypeError, match="give launch\\(\\) a plain function"):
        launch(coroutine if kind == "async" else generator)


def test_an_exception_that_cannot_be_printed_is_told_with_its_line():
    def worker():
        class Silent(Exception):
            def __str__(self):
                raise RuntimeError("no")

        raise Silent  # here

    with pytest.raises(RankError, match=r"raise Silent  # here(.|\n)*Silent: <exception str"):
        launch(worker)


def test_a_group_of_exceptions_is_told_whole():
    def worker():
        raise ExceptionGroup("many", [ValueError("one"), TypeError("two")])

    with pytest.raises(RankError, match=r"1\. ValueError: one\n  2\. TypeError: two"):
        launch(worker)


@pytest.mark.parametrize(("name", "other"), [("recv", "send"), ("send", "recv")])
def test_point_to_point_is_not_asked_of_every_rank(name, other):
    def worker():
        if dist.get_rank() == 0:
            getattr(dist, name)(torch.ones(1 << 22), 1)

    with pytest.raises(HangError, match=f"A {name} needs a {other} on the other rank: rank 1"):
        launch(worker, timeout=20)


def test_a_variable_that_pytorch_refuses_is_named(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "1")
    with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG=1 is set in this notebook"):
        launch(int)
