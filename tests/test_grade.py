"""The grader on real ranks: marks, hostile submissions, resuming, and what it leaves behind."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_course.grading import data, sandbox
from ddp_course.grading.result import load

COURSE = Path(__file__).parents[1]
HOSTILE = sorted((Path(__file__).parent / "hostile").glob("*.py"))
NAME = "07_accumulate_window"
FULL = 8
BODY = 2  # seconds; a hang must not take long here

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="grading needs Linux"),
    pytest.mark.timeout(900),
]

RIGHT = """
import torch.nn.functional as F
def accumulate_window(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward()
        total += loss.item()
    return total
"""


def command(*arguments, temporary):
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONWARNINGS": "error"}
    line = [sys.executable, "-m", "ddp_course", "grade", *map(str, arguments)]
    return subprocess.Popen(
        line,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=temporary,
        start_new_session=True,
    )


def grade(*paths, out, options=(), code=0):
    """Grade in a process of its own; return {student: Result}."""
    temporary = out.parent / f"{out.name}-tmp"
    temporary.mkdir(exist_ok=True)
    fixed = ("--exercise", NAME, "--out", out)
    process = command(*paths, *fixed, *options, temporary=temporary)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == code, errors
    assert survivors(temporary) == [] and list(temporary.glob("ddp-course-*")) == []
    found = {file.stem: load(file) for file in (out / "results").glob("*.json")}
    return found, output + errors


def survivors(temporary) -> list[str]:
    """Return the processes that run with this TMPDIR, or one below it, in their environment."""
    mark, found = f"TMPDIR={temporary}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Results of all hostile submissions, graded among three honest ones."""
    folder = tmp_path_factory.mktemp("class")
    for file in HOSTILE:
        shutil.copy(file, folder)
    for name in ("a_honest", "m_honest", "z_honest"):
        (folder / f"{name}.py").write_text(RIGHT)
    started = time.monotonic()
    out = tmp_path_factory.mktemp("hostile") / "out"
    results, text = grade(folder, out=out, options=("--jobs", "2", "--timeout", BODY))
    print(f"{len(results)} submissions in {time.monotonic() - started:.0f} s")
    return results


needs_walls = pytest.mark.skipif(
    sandbox.landlock_version() < 6,
    reason="needs Landlock with signals (Linux 6.12); without it only a container protects",
)


@needs_walls
@pytest.mark.slow
@pytest.mark.parametrize("name", [file.stem for file in HOSTILE])
def test_hostile_submissions_score_nothing(hostile, name):
    result = hostile[name]
    assert (result.points, result.of) == (0, FULL)
    assert any(check.message for check in result.checks)
    assert not result.broken and not any("grading broke" in note for note in result.notes)


REPLACES = [file.stem for file in HOSTILE if file.stem.startswith("patch_")]
REPLACES = sorted(set(REPLACES) - {"patch_builtins", "patch_modules"})  # these break their rank
LEAVES = [file.stem for file in HOSTILE if file.stem.startswith("session_")]


@needs_walls
@pytest.mark.parametrize("name", REPLACES)
def test_replaced_functions_are_named_in_a_check_of_their_own(hostile, name):
    assert any(check.message.startswith("it replaces ") for check in hostile[name].checks)


@needs_walls
@pytest.mark.parametrize("name", LEAVES)
def test_processes_left_behind_are_named_in_a_check_of_their_own(hostile, name):
    assert any(check.message.startswith("it leaves behind ") for check in hostile[name].checks)


@needs_walls
def test_an_honest_submission_beside_them_keeps_full_marks(hostile):
    for name in ("a_honest", "m_honest", "z_honest"):
        assert hostile[name].points == FULL, hostile[name].checks


def test_there_are_enough_hostile_submissions():
    assert len(HOSTILE) >= 30


HARMLESS = {
    "warns": "import warnings\n" + RIGHT + "    warnings.warn('odd')\n",
    "copied": "def accumulate_window(model, window):\n    return 0.0\n" + RIGHT,
    "shows": RIGHT + "print(accumulate_window(1, 2))\nimport nothing_like_it\nshow(3)\n",
    "aborts_late": "import atexit, os\n" + RIGHT.replace(
        "samples, total", "atexit.register(os.abort)\n    samples, total"
    ),
    "prints": RIGHT.replace("total += ", "print('x' * 1000)\n        total += "),
    "thread": "import threading, time\n" + RIGHT.replace(
        "samples, total",
        "threading.Thread(target=time.sleep, args=[99]).start()\n    samples, total",
    ),
    "helpers": RIGHT.replace("def accumulate_window", "def mine")
    + "from functools import partial\naccumulate_window = partial(mine)\n",
}  # fmt: skip
WRONG = {
    "stub": ("def accumulate_window(model, window):\n    raise NotImplementedError('Goal: g')\n",
             "not written yet. Goal: g"),
    "signature": ("def accumulate_window(model):\n    pass\n", "it will be called as"),
    "no_import": ("import nothing_like_it as n\ndef accumulate_window(model, window):\n"
                  "    return n.mean(window)\n", "No module named 'nothing_like_it'"),
    "half": (RIGHT.replace("/ samples", "/ len(y) / len(window)"), "mean of the micro-batches"),
}  # fmt: skip


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others")
    for name, text in {**HARMLESS, **{name: text for name, (text, _) in WRONG.items()}}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "empty.py").write_text("")
    (folder / "broken.ipynb").write_text('{"cells": [')
    out = tmp_path_factory.mktemp("others-out") / "out"
    return (*grade(folder, out=out, options=("--jobs", "2", "--timeout", "8")), out, folder)


@pytest.mark.parametrize("name", HARMLESS)
def test_oddities_cost_nothing(others, name):
    assert others[0][name].points == FULL, others[0][name].checks
    assert not [note for note in others[0][name].notes if "asked for" in note]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_told_why(others, name):
    result = others[0][name]
    assert result.points < FULL
    assert WRONG[name][1] in "\n".join(check.message for check in result.checks)


def test_partial_credit_is_the_sum_of_the_passed_checks(others):
    assert others[0]["half"].points == 3  # four equal ones, and one alone


def test_bad_files_have_a_result_with_one_clear_line(others):
    results, output, _, _ = others
    assert results["empty"].notes == ["empty.py is empty"]
    assert "broken JSON" in results["broken"].notes[0]
    assert results["empty"].points == results["broken"].points == 0
    assert "Traceback" not in output


def test_what_is_done_is_not_done_again(others):
    _, _, out, folder = others
    kept = {file: file.stat().st_mtime_ns for file in (out / "results").glob("*.json")}
    (folder / "stub.py").write_text(RIGHT)
    results, _ = grade(folder, out=out, options=("--timeout", "8"))
    again = {file.stem for file in kept if file.stat().st_mtime_ns != kept[file]}
    assert again == {"stub"} and results["stub"].points == FULL


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_run_that_is_ended_half_way_leaves_nothing_and_goes_on(tmp_path, end):
    folder, out = tmp_path / "class", tmp_path / "out"
    folder.mkdir()
    (folder / "a.py").write_text(RIGHT)
    (folder / "b.py").write_text("def accumulate_window(model, window):\n    while True: pass\n")
    (folder / "c.py").write_text(RIGHT)
    options = ("--exercise", NAME, "--out", out, "--timeout", "60")
    process = command(folder, *options, temporary=tmp_path)
    wait_for((out / "results" / "a.json").exists)
    getattr(process, end)()
    process.wait(60)
    wait_for(lambda: survivors(tmp_path) == [])
    first = load(out / "results" / "a.json")
    if end == "kill":
        (folder / "b.py").write_text(RIGHT)
        results, _ = grade(folder, out=out, options=("--timeout", "60"))
        assert results["a"] == first and [results[name].points for name in "abc"] == [FULL] * 3


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        ([__file__, "--exercise", "07_acumulate"], "did you mean 07_accumulate_window"),
        ([__file__, "--jobs", "0"], "--jobs must be at least 1"),
        ([__file__, "--timeout", "-1"], "--timeout is a number of seconds above 0"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(tmp_path, arguments, text):
    process = command(*arguments, temporary=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (2, "")
    assert text in errors and len(errors.splitlines()) == 1


def test_plain_data_comes_back_as_it_was():
    import torch

    values = {
        "tensors": [torch.arange(6.0).reshape(2, 3).T, torch.zeros(0, 3), torch.tensor(True)],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "rest": (1, 2.5, None, "ü\udc80", True, float("inf")),
        3: [],
    }
    back = data.decode(data.encode(values))
    assert back["rest"] == values["rest"] and back[3] == [] and list(back) == list(values)
    pairs = zip([*values["tensors"], values["half"]], [*back["tensors"], back["half"]], strict=True)
    assert all(one.equal(two) and one.dtype == two.dtype for one, two in pairs)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 20,
        data._LENGTH.pack(2) + b"{}",
        data._LENGTH.pack(9) + b'["other"]',
        data._LENGTH.pack(4) + b"nope",
        data._LENGTH.pack(29) + b'["tensor", "float64", [1000]]',
        data._LENGTH.pack(26) + b'["tensor", "float64", [-1]]'[:26],
        data._LENGTH.pack(25) + b'["tensor", "object", [1]]',
        data._LENGTH.pack(200_000) + b"[" * 100_000 + b"]" * 100_000,
        data._LENGTH.pack(4) + b"1234" + b"left over",
    ],
)
def test_what_is_no_data_is_refused(message):
    with pytest.raises(ValueError, match="no data"):
        data.decode(message)


def test_only_plain_data_is_encoded():
    for value in (object(), {1.5: 1}, print, functools.partial(print), {1, 2}):
        with pytest.raises(TypeError):
            data.encode({"value": value})


def test_results_are_read_only_if_whole(tmp_path):
    for text in ("", "{}", "[]", json.dumps({"student": "a"}), '{"checks": [1]}'):
        (tmp_path / "x.json").write_text(text)
        assert load(tmp_path / "x.json") is None
