"""Every wrong answer in the zoo gets its own message, every right one passes, on real ranks."""

import importlib
from pathlib import Path

import pytest

from ddp_course.grading import check
from ddp_course.grading.check import try_case
from ddp_course.grading.exercise import Case, hung, raised
from ddp_course.grading.table import EXERCISES, find

ZOO = Path(__file__).parent / "zoo"
NAMES = sorted(path.stem[1:] for path in ZOO.glob("z*.py"))
SEED = 20


def zoo(name):
    return importlib.import_module(f"zoo.z{name}")


WRONG = [(name, fn) for name in NAMES for fn in zoo(name).WRONG]
RIGHT = [(name, fn) for name in NAMES for fn in zoo(name).RIGHT]


def named(value):
    return getattr(value, "__name__", value)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_COURSE_HOME", str(tmp_path))


@pytest.mark.parametrize(("name", "fn"), WRONG, ids=named)
def test_a_wrong_answer_gets_its_own_message(name, fn):
    report = check(name, fn, seed=SEED)
    told = "\n".join(verdict.wrong or "" for verdict in report.verdicts)
    assert not report and zoo(name).WRONG[fn] in told


@pytest.mark.parametrize(("name", "fn"), RIGHT, ids=named)
def test_a_right_answer_passes(name, fn):
    report = check(name, fn)
    assert report, report.verdicts


def lost(*arguments):
    return {}["nothing here"]


@pytest.mark.parametrize("name", EXERCISES)
def test_an_error_is_told_from_the_students_line_on_and_not_as_a_hang(name):
    case = max(find(name).cases, key=lambda case: len(case.stuck))
    told = try_case(case, lost, SEED).split("\n\n")
    start, *_, end = told[1].splitlines()
    assert start.startswith(f"{__file__}, line ") and end == "KeyError: 'nothing here'"
    assert "Likely" not in "".join(told) and len(told) == 2


def test_what_is_likely_is_said_of_ranks_that_wait_or_lose_one_another():
    case = Case("", 1, None, None, stuck="Stuck.", errors={"no such file": "Files."})
    peer = "RuntimeError: [gloo/pair.cc:1] Connection closed by peer"
    assert hung(case, 2, "…").endswith("Stuck.") and "Stuck." not in hung(case, 1, "…")
    for world_size, error, likely in (
        (2, peer, "Stuck."),
        (2, "The process of rank 1 died of SIGABRT (…).", "Stuck."),
        (1, peer, peer),
        (2, "TypeError: Connection is no peer", "TypeError: Connection is no peer"),
        (1, "OSError: no such file", "Files."),
    ):
        assert raised(case, world_size, error, error).splitlines()[-1] == likely


@pytest.mark.parametrize("name", EXERCISES)
def test_the_zoo_has_enough_of_both(name):
    messages = list(zoo(name).WRONG.values())
    assert len(messages) >= 5 and len(set(messages)) == len(messages)
    assert len(zoo(name).RIGHT) >= 3
