"""The doctor's judgement of facts handed to it, and one look at this machine."""

import os
import subprocess
import sys

import pytest
import torch

from ddp_course import doctor, machine


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10, 9), "FAIL"), ((3, 11, 0), "ok"), ((3, 14, 2), "ok"), ((3, 15, 0), "note")],
)
def test_python_versions(version, level):
    assert doctor.python(version, "/course/.venv", "/usr").level == level


def test_python_outside_a_virtual_environment_says_so():
    assert "no virtual environment" in doctor.python((3, 12, 0), "/usr", "/usr").text
    assert "no virtual environment" not in doctor.python((3, 12, 0), "/course/.venv", "/usr").text


def test_torch_below_the_oldest_fails_with_the_command_that_mends_it():
    old = doctor.pytorch("2.5.1+cpu", None)
    assert (old.level, "pip install" in old.fix) == ("FAIL", True)
    assert doctor.pytorch("2.6.0", "12.4").level == "ok"
    assert doctor.pytorch("2.13.0+cpu", None).level == "ok"  # 13 > 6, though "13" < "6"


def test_kernel_of_another_python(tmp_path):
    mine = str(tmp_path / "mine" / "python")
    other = doctor.kernel(str(tmp_path / "other" / "python"), mine)
    assert (other.level, mine in other.fix) == ("note", True)
    assert doctor.kernel(str(tmp_path / "mine" / "python3"), mine).level == "ok"
    assert doctor.kernel("python", mine).level == "ok"  # whichever runs JupyterLab
    assert doctor.kernel(None, mine).level == "FAIL"


def test_few_cores_and_little_memory():
    assert doctor.cores(8, 8).level == "ok"
    assert "1.5" in doctor.cores(8, 1.5).text and doctor.cores(8, 1.5).level == "note"
    assert [doctor.memory(free).level for free in (4e9, 1.2e9, 0.7e9)] == ["ok", "note", "FAIL"]


def test_gpu_that_pytorch_cannot_use_says_why():
    assert doctor.gpus(["H200 (139 GiB)"], 1, "13.0", None).text == "H200 (139 GiB)"
    assert doctor.gpus([], 0, None, None).level == "ok"
    cpu_build = doctor.gpus([], 2, None, None)
    assert "built for the CPU" in cpu_build.text and "pip install" in cpu_build.fix
    assert "unset CUDA_VISIBLE_DEVICES" in doctor.gpus([], 2, "13.0", "").fix
    assert "driver" in doctor.gpus([], 2, "13.0", None).fix


def test_ranks_by_what_there_is():
    assert doctor.ranks(False, True, 2, 8).level == "FAIL"
    assert "4 thread(s)" in doctor.ranks(True, False, 0, 8).text
    assert "up to 2: a GPU each, by nccl" in doctor.ranks(True, True, 2, 8).text
    assert "gloo" in doctor.ranks(True, False, 2, 8).text


def test_precision():
    assert "2.5 times" in doctor.bf16(2.5).text and doctor.bf16(None).level == "note"
    assert doctor.fp16(1.0, False, "cuda").level == doctor.fp16(None, True, "cuda").level == "note"
    assert "Convolutions" in doctor.fp16(0.5, True, "cpu").text
    assert "Convolutions" not in doctor.fp16(8.0, True, "cuda").text


def test_network_and_shared_memory():
    assert doctor.loopback(False).level == "FAIL"
    assert "/etc/hosts" in doctor.hostname("box", False).fix
    assert "--shm-size" in doctor.shared_memory(2**26).fix
    assert doctor.shared_memory(None).level == doctor.shared_memory(2**30).level == "ok"


def test_a_gpu_that_cuda_visible_devices_does_not_show():
    for visible in ("7", "-1", "", "none"):
        assert "unset CUDA_VISIBLE_DEVICES" in doctor.gpus([], 2, "13.0", visible).fix
    for visible in ("1", "0,7", "GPU-8932f937"):
        assert "driver" in doctor.gpus([], 2, "13.0", visible).fix


def test_a_disk_that_is_full_or_not_to_be_written_to():
    assert doctor.temporary("/tmp", 5e9).level == "ok"
    assert "TMPDIR" in doctor.temporary("/tmp", 2e8).fix
    assert doctor.temporary(None, 0).level == "FAIL"


def test_the_temporary_folder_is_read(tmp_path):
    code = "from ddp_course import machine; print(machine.temporary_space()[0])"
    run = {"env": {**os.environ, "TMPDIR": str(tmp_path)}, "text": True}
    assert subprocess.check_output([sys.executable, "-c", code], **run).strip() == str(tmp_path)


def test_files_that_hide_a_module(tmp_path):
    for name in ("torch.py", "random.py", "mine.py", "queue.txt"):
        (tmp_path / name).touch()
    (tmp_path / "ddp_course").mkdir()  # the course's own folder
    found = doctor.shadows(str(tmp_path), os.listdir(tmp_path))
    assert [finding.text.split()[0] for finding in found] == ["random.py", "torch.py"]
    assert all("rename" in finding.fix for finding in found)


def test_wsl_is_known_by_its_kernel():
    (found,) = doctor.wsl("5.15.167.4-microsoft-standard-WSL2")
    assert found.level == "note" and ".wslconfig" in found.fix
    assert doctor.wsl("6.1.0-28-amd64") == []


def test_every_note_on_cores_and_threads_says_what_to_do():
    (threads,) = doctor.variables({"OMP_NUM_THREADS": "64"}, "/course")
    assert "unset OMP_NUM_THREADS" in threads.fix and doctor.cores(1, 1).fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "1"),
        ("MASTER_ADDR", "node7"),
        ("GLOO_SOCKET_IFNAME", "^lo,docker0"),
        ("OMP_NUM_THREADS", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("VIRTUAL_ENV", "/elsewhere"),
    ],
)
def test_variable_that_changes_what_ranks_do(name, value, tmp_path):
    (found,) = doctor.variables({name: value, "HOME": "/root"}, str(tmp_path))
    assert found.level == "note" and f"{name}={value}" in found.text


def test_harmless_variables(tmp_path):
    harmless = {"GLOO_SOCKET_IFNAME": "lo", "VIRTUAL_ENV": str(tmp_path), "HTTP_PROXY": "x"}
    (found,) = doctor.variables(harmless, str(tmp_path))
    assert found.level == "ok"


def test_container_limits_are_read(tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("300000000\n")
    (tmp_path / "memory.current").write_text("100000000\n")
    assert machine.cores(tmp_path)[1] == 0.5
    assert machine.free_memory(tmp_path) == 2e8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cores(tmp_path)[1] >= 1
    assert machine.free_memory(tmp_path) > 3e8


def test_precision_is_measured():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert machine.matmul_speed(torch.bfloat16, device) > 0
    assert machine.scaler_works(device)


def test_report_fits_a_screen_and_exit_code_follows_the_worst(monkeypatch, capsys):
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 40 and max(map(len, printed.splitlines())) <= 100
    assert "The course can run here" in printed
    monkeypatch.setattr(machine, "loopback_works", lambda: False)
    assert doctor.main() == 1
    assert "First mend: Loopback." in capsys.readouterr().out


def test_help_and_bad_option():
    for option, code in (("--help", 0), ("--nope", 2)):
        command = [sys.executable, "-m", "ddp_course", "doctor", option]
        assert subprocess.run(command, capture_output=True).returncode == code
