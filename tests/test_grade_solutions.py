"""The solutions have full marks from `ddp-course grade`: all of them, as one student hands in."""

import sys
from pathlib import Path

import pytest
from test_grade import command, survivors

from ddp_course.grading.result import load
from ddp_course.grading.table import EXERCISES

SOLUTIONS = Path(__file__).parents[1] / "solutions"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="grading needs Linux"),
    pytest.mark.timeout(900),
]


def marks(tmp_path, *names) -> dict[str, tuple[int, int]]:
    """Return {check: (points, of)} for one submission that holds the solutions of these names."""
    student = tmp_path / "class" / "student"
    student.mkdir(parents=True)
    for name in names:
        (student / f"{name}.ipynb").write_bytes((SOLUTIONS / f"{name}.ipynb").read_bytes())
    chosen = [option for name in names for option in ("--exercise", name)]
    out = tmp_path / "out"
    process = command(tmp_path / "class", "--out", out, *chosen, temporary=tmp_path)
    output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, output + errors
    assert survivors(tmp_path) == []
    result = load(out / "results" / "student.json")
    return {
        f"{check.exercise}: {check.name}: {check.message}": (check.points, check.of)
        for check in result.checks
    }


def test_all_solutions_have_full_marks(tmp_path):
    told = marks(tmp_path, *EXERCISES)
    assert [line for line, (points, of) in told.items() if points < of] == []
    assert sum(of for _, of in told.values()) == sum(e.points for e in EXERCISES.values())


def test_an_optimizer_in_the_first_exercise_is_no_replaced_function(tmp_path):
    told = marks(tmp_path, "08_dynamic_scaler")
    assert [line for line, (points, of) in told.items() if points < of] == []
