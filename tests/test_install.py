"""Setting up: pins, environment.yml, and tools/setup_env.py on a small stand-in for the course."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import types
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import run_tests
import setup_env

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]
]
CUDA = re.compile(r"nvidia-|cuda-|triton$")
posix = pytest.mark.skipif(os.name == "nt", reason="make lab is for Linux and macOS")


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


# ---- pins and environment.yml


def test_every_dependency_is_pinned_within_its_range():
    pinned = {canonicalize_name(pin.name): pin for pin in pins()}
    assert len(pinned) == len(pins())
    for requirement in DIRECT:
        (exact,) = pinned[canonicalize_name(requirement.name)].specifier
        assert exact.operator == "==" and exact.version in requirement.specifier, requirement


def test_everything_that_comes_along_is_pinned():
    pinned = {canonicalize_name(pin.name) for pin in pins()}
    todo, seen = [(r, "") for r in DIRECT], set()
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if (marker and not marker.evaluate({"extra": extra})) or CUDA.match(name):
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                todo += [(Requirement(r), wanted) for r in metadata.requires(name) or ()]
    assert {name for name, _ in seen} <= pinned


def test_pins_that_only_one_system_has_say_so():
    marked = {pin.name: str(pin.marker) for pin in pins() if pin.marker}
    assert "win32" in marked["colorama"] and "nt" in marked["pywinpty"]
    assert not [pin.name for pin in pins() if CUDA.match(pin.name)]
    assert "://" not in (ROOT / "constraints.txt").read_text()


def conda():
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def test_environment_yml_says_what_pyproject_says():
    assert conda()["name"] == PROJECT["name"]
    python, pip, part = conda()["dependencies"]
    major, minor = map(int, python.removeprefix("python=").split("."))
    assert setup_env.SUPPORTED[0] <= (major, minor) <= setup_env.SUPPORTED[1]
    assert PROJECT["requires-python"] == ">=3.11" and pip == "pip"
    assert part == {"pip": ["-c constraints.txt", "-e .[test]"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pip_part_of_environment_yml_makes_an_environment_that_imports_the_course(tmp_path):
    course = tmp_path / "course"
    leave = shutil.ignore_patterns(".*", "__pycache__", "notebooks", "exercises", "solutions")
    shutil.copytree(ROOT, course, ignore=leave)
    (course / "part.txt").write_text("\n".join(conda()["dependencies"][-1]["pip"]))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / Path(setup_env.PYTHON).relative_to(setup_env.VENV)
    pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
    if index := setup_env.cpu_index():  # the same PyTorch, without gigabytes of CUDA
        no_cuda = ["--no-deps", "--index-url", index, "-c", "constraints.txt", "torch"]
        subprocess.run([*pip, *no_cuda], cwd=course, check=True)
    subprocess.run([*pip, "-r", "part.txt"], cwd=course, check=True)
    code = "import ddp_course, jupyterlab, nbval, jupytext; print(ddp_course.__file__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert Path(done.stdout.decode().strip()) == course / "ddp_course" / "__init__.py"
    subprocess.run([python, "-m", "ddp_course", "--help"], cwd=tmp_path, check=True)


# ---- tools/setup_env.py, for real, on a project that needs no network

BACKEND = """
import os, pathlib, time, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    while (here / "hold").exists():
        (here / "held").touch()
        time.sleep(0.02)
    name = "course-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("course.pth", str(here / "modules"))
        wheel.writestr("course-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: course\\n"
            "Version: 1\\nProvides-Extra: test\\nRequires-Dist: torch\\n")
        wheel.writestr("course-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("course-1.dist-info/RECORD", "")
    return name
"""


def torch_wheel(folder, version, build):
    folder.mkdir(parents=True, exist_ok=True)
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", f"build = {build!r}")
        about = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        wheel.writestr(f"{info}/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def course(tmp_path):
    """A project with the same set-up script that installs in seconds, from files."""
    root = tmp_path / "a course"
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup_env.py", root / "tools")
    (root / "modules").mkdir()
    for name in ("sklearn", "matplotlib", "ipywidgets", "jupyterlab", "pytest"):
        (root / "modules" / f"{name}.py").touch()
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (root / "constraints.txt").write_text("torch==9.9\n")
    torch_wheel(tmp_path / "files", "9.9", "standard")
    torch_wheel(tmp_path / "index" / "torch", "9.9+cpu", "cpu")
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    return root


def environment(course, **changes):
    """No network, no configuration of this machine, and no NVIDIA GPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "VIRTUAL_ENV"))}
    here = course.parent
    return kept | {
        "PATH": f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": (here / "files").as_uri(),
        "TORCH_CPU_INDEX": "",
        **changes,
    }


def start(course, python=sys.executable, **changes):
    return subprocess.Popen(
        [python, str(course / "tools" / "setup_env.py")],
        cwd=course,
        env=environment(course, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As at a terminal, also where the tests run as a shell's background job, which ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def set_up(course, python=sys.executable, **changes):
    process = start(course, python, **changes)
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def torch_build(course):
    code = "import torch; print(torch.build)"
    return subprocess.check_output([course / ".venv/bin/python", "-c", code], text=True).strip()


@posix
def test_first_time_installs_second_time_does_nothing_and_new_pins_install_again(course):
    code, output, errors = set_up(course)
    assert (code, errors) == (0, "") and output.endswith("Ready\n") and output.count("\n") <= 5
    assert torch_build(course) == "standard"
    assert set_up(course) == (0, "", "")
    (course / "pyproject.toml").open("a").write("\n[tool.ruff]\nline-length = 100\n")
    assert set_up(course) == (0, "", ""), "a tool's settings call for no installation"
    torch_wheel(course.parent / "files", "9.10", "newer")
    (course / "constraints.txt").write_text("torch==9.10\n")
    code, output, errors = set_up(course)
    assert (code, errors) == (0, "") and "Creating" not in output
    assert torch_build(course) == "newer"


def start_and_hold(course):
    """A set-up that has come as far as installing, and stays there until `hold` is gone."""
    (course / "hold").touch()
    process = start(course)
    end = time.monotonic() + 60
    while not (course / "held").exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    return process


@posix
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_installation_is_made_again(course, how):
    process = start_and_hold(course)
    os.killpg(process.pid, how)
    errors = process.communicate(timeout=30)[1]
    assert errors == ("" if how == signal.SIGKILL else setup_env.INTERRUPTED + "\n")
    (course / "hold").unlink()
    code, output, errors = set_up(course)
    assert (code, errors) == (0, "") and "Replacing .venv, which is incomplete" in output
    assert set_up(course) == (0, "", "")


@posix
def test_two_at_once_install_once(course):
    first, second = start_and_hold(course), start(course)
    assert second.stdout.readline() == "Another set-up is at work here; waiting for it\n"
    (course / "hold").unlink()
    assert first.communicate(timeout=60)[0].endswith("Ready\n")
    assert second.communicate(timeout=60) == ("", "")
    assert (first.returncode, second.returncode) == (0, 0)


@posix
def test_half_made_and_broken_folders_are_made_again(course):
    (course / ".venv" / "bin").mkdir(parents=True)
    (course / ".venv" / "bin" / "python").symlink_to("/gone/python3")
    code, output, _ = set_up(course)
    assert code == 0 and "incomplete" in output
    # One that a student made by hand, in which torch is damaged: pip takes it for installed.
    (course / ".venv" / "ddp-course-state").unlink()
    next((course / ".venv").glob("lib/*/site-packages/torch.py")).unlink()
    code, output, _ = set_up(course)
    assert code == 0 and "broken" in output
    assert torch_build(course) == "standard"


@pytest.fixture
def index(tmp_path):
    """A web server for the stand-in of PyTorch's CPU index; its address."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    folder = tmp_path / "index"
    (folder / "torch").mkdir(parents=True, exist_ok=True)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=folder, **output) as server:
        port = re.search(r"port (\d+)", server.stdout.readline()).group(1)
        yield f"http://127.0.0.1:{port}"
        server.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's standard build carries CUDA")
def test_cpu_build_is_preferred_without_an_nvidia_gpu_where_its_index_answers(course, index):
    assert set_up(course, TORCH_CPU_INDEX=index, PIP_NO_INDEX="0")[0] == 0
    assert torch_build(course) == "cpu"


def test_no_cpu_index_with_a_gpu_or_when_it_does_not_answer(index, monkeypatch):
    monkeypatch.setattr(setup_env.sys, "platform", "linux")
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    monkeypatch.setenv("TORCH_CPU_INDEX", index)
    assert setup_env.cpu_index() == index
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    assert setup_env.cpu_index() is None
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    monkeypatch.setenv("TORCH_CPU_INDEX", index + "/elsewhere")
    assert setup_env.cpu_index() is None


# ---- what goes wrong: one line each


@posix
def test_no_network_is_one_line_that_names_the_log(course):
    (course.parent / "files" / "torch-9.9-py3-none-any.whl").unlink()
    closed = "http://127.0.0.1:1/simple"
    code, _, errors = set_up(course, PIP_NO_INDEX="0", PIP_INDEX_URL=closed)
    assert code == 1 and errors.count("\n") == 1
    assert "no network" in errors and ".venv-setup.log" in errors
    assert "127.0.0.1" in (course / ".venv-setup.log").read_text()


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk is full"),
        ("WARNING: Retrying: Name or service not known\nERROR: No matching", "no network"),
        ("SSLError: CERTIFICATE_VERIFY_FAILED", "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.13.0", "there is no torch==2.13.0"),
        ("blah\nERROR: Cannot do it\nERROR: for help visit a page\n", "Cannot do it"),
        ("PermissionError: [Errno 13] Permission denied: '/x'", "Permission denied: '/x'"),
    ],
)
def test_cause_of_a_failed_installation(output, line):
    assert line in setup_env.explain(output) and "\n" not in setup_env.explain(output)


def test_full_disk_is_seen_before_anything_is_made(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup_env, "VENV", str(tmp_path / ".venv"))
    monkeypatch.setattr(setup_env, "STATE", str(tmp_path / ".venv" / "state"))
    monkeypatch.setattr(setup_env, "PYTHON", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(setup_env, "LOG", str(tmp_path / "log"))
    usage = types.SimpleNamespace(free=10**8)
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda _: usage)
    assert setup_env.main() == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "only 0.1 GB of disk are free" in errors
    assert not (tmp_path / ".venv").exists()


def old_pythons():
    """Real interpreters too old for the course, where this machine has some."""
    names = [f"python3.{minor}" for minor in range(6, 11)]
    found = [Path(path) for name in names if (path := shutil.which(name)) and "shims" not in path]
    return found + sorted(Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python3"))


@posix
def test_too_old_python_reads_the_script_and_gets_one_line(course):
    ast.parse((ROOT / "tools" / "setup_env.py").read_text(), feature_version=(3, 6))
    for python in old_pythons():
        code, output, errors = set_up(course, python, PATH="/nowhere")
        assert (code, output) == (1, ""), python
        assert errors.startswith("Set-up stopped: Python 3.") and errors.count("\n") == 1
        assert "is too old: the course needs Python 3.11 to 3.14" in errors


@pytest.mark.parametrize(
    ("version", "has_venv", "line"),
    [
        ((3, 9), True, "is too old: the course needs Python 3.11 to 3.14"),
        ((3, 12), False, "python3.12 has no venv module. Debian, Ubuntu: sudo apt install python3"),
    ],
)
def test_python_that_will_not_do(monkeypatch, version, has_venv, line):
    monkeypatch.setattr(setup_env, "look_at", lambda path, code: (version, has_venv))
    monkeypatch.setattr(setup_env.sys, "version_info", (*version, 0))
    with pytest.raises(setup_env.SetupError, match=re.escape(line)):
        setup_env.find_python()


def test_newer_python_beside_an_old_one_is_taken(monkeypatch):
    versions = {sys.executable: ((3, 9), True), "/there/python3.13": ((3, 13), True)}
    there = {sys.executable: sys.executable, "python3.13": "/there/python3.13"}
    monkeypatch.setattr(setup_env.shutil, "which", there.get)
    monkeypatch.setattr(setup_env, "look_at", lambda path, code: versions[path])
    assert setup_env.find_python() == ("/there/python3.13", (3, 13))


@posix
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["lab", "PYTHON=no-such-python"], "there is no no-such-python here"),
        (["notebook", "PYTHON=true"], "Which one? For example: make notebook N=06"),
    ],
)
def test_make_says_what_is_missing_in_one_line(arguments, line):
    done = subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True)
    ours = [text for text in done.stderr.splitlines() if not text.startswith("make")]
    assert done.returncode and len(ours) == 1 and line in ours[0]


# ---- make test


def test_every_part_runs_and_one_failure_fails_the_whole(monkeypatch, capfd):
    def part(code):
        return lambda: ["-c", f"print('ran {code}'); raise SystemExit({code})"]

    monkeypatch.setattr(run_tests, "PARTS", {"a": part(0), "b": part(5), "c": part(0)})
    assert run_tests.main([]) == 1
    printed = capfd.readouterr().out
    assert printed.count("ran") == 3 and printed.endswith("FAILED: b\n")
    assert run_tests.main(["a", "c"]) == 0
    assert capfd.readouterr().out.endswith("Everything passed.\n")
    assert run_tests.main(["nope"]) == 2


def test_automatic_runs_use_the_same_commands():
    steps = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    systems = {name.split("-")[0] for name in steps["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    assert steps["strategy"]["matrix"]["python"] == ["3.11", "3.14"]
    commands = "\n".join(step.get("run", "") for step in steps["steps"])
    assert "make test" in commands and "tools/run_tests.py" in commands
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.name == "nt" or os.access(ROOT / ".ci" / "run", os.X_OK)
