"""Every wrong answer in the zoo gets its own message, every right one passes, on real ranks."""

import importlib
from pathlib import Path

import pytest

from ddp_course.grading import check
from ddp_course.grading.table import EXERCISES

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


@pytest.mark.parametrize("name", EXERCISES)
def test_the_zoo_has_enough_of_both(name):
    messages = list(zoo(name).WRONG.values())
    assert len(messages) >= 5 and len(set(messages)) == len(messages)
    assert len(zoo(name).RIGHT) >= 3
