"""Reports are valid in their formats, escape what students write, and agree with one another."""

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddp_course.grading import autograder, reports
from ddp_course.grading.result import Check, Result, clean, load, save

EVIL = clean('</pre><script>alert("&")</script>\x00\x1b[2J\udc80 ]]> ü')


def results():
    return [
        Result(
            "ann",
            [Check("07_a", "easy", 2, 2, "", 0.5), Check("07_a", "hard", 0, 3, EVIL, 1.25)],
            ["=cmd()|a", EVIL],
            seed=5,
            key="k",
        ),
        Result("=bob", [Check("07_a", "easy", 0, 2, "no"), Check("07_a", "hard", 0, 3, "no")]),
        Result("eve", [Check("07_a", "easy", 0, 2, "no"), Check("07_a", "left", 0, 0, "left")]),
    ]


def test_a_result_survives_its_file(tmp_path):
    for one in results():
        save(one, tmp_path / "x.json")
        assert load(tmp_path / "x.json") == one
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_text_is_cleaned_and_cut():
    assert clean("a\x00b\x1b\udc80\n\tü") == "a�b�\\udc80\n\tü"
    assert len(clean("x" * 10**6)) < 5000


def test_the_table_has_a_line_a_student():
    lines = reports.table(results()).splitlines()
    assert len(lines) == 5
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["ann", "2/5", "2/5"],
        ["=bob", "0/5", "0/5"],
    ]


def test_the_csv_has_points_and_no_formulas():
    rows = list(csv.DictReader(io.StringIO(reports.class_csv(results()))))
    assert [(r["student"], r["07_a"], r["points"], r["of"]) for r in rows] == [
        ("ann", "2", "2", "5"),
        ("'=bob", "0", "0", "5"),
        ("eve", "0", "0", "2"),
    ]
    assert rows[0]["notes"].startswith("'=cmd()")


def test_the_xml_can_be_read_and_counts_failures():
    root = ElementTree.fromstring(reports.junit(results()).encode())
    ann = root.find("testsuite")
    assert (ann.get("tests"), ann.get("failures")) == ("2", "1")
    assert ann.findall("testcase")[1].find("failure").text == EVIL


def test_gradescope_gets_a_score_that_is_the_sum_of_its_tests():
    told = json.loads(reports.gradescope_json(results()[0]))
    assert told["score"] == sum(test["score"] for test in told["tests"]) == 2
    assert [test["max_score"] for test in told["tests"]] == [2, 3]
    assert told["tests"][1]["status"] == "failed" and told["tests"][1]["output"] == EVIL
    none = json.loads(reports.gradescope_json(results()[1]))  # a sum of zero is no full mark
    assert none["score"] == 0 and all(test["score"] == 0 for test in none["tests"])


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


def test_feedback_shows_what_students_wrote_as_text():
    page = Page(reports.feedback(results()[0]))
    assert "script" not in page.tags and EVIL in page.text
    assert "2 of 5 points" in page.text and "seed=5" in page.text


def test_all_reports_are_written(tmp_path):
    files = reports.write_all(results(), tmp_path)
    assert all(file.exists() for file in files) and not (tmp_path / "results.json").exists()
    reports.write_all(results()[:1], tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["score"] == 2


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package as Gradescope lays it out: /autograder/source, submission, results."""
    root = tmp_path_factory.mktemp("autograder")
    autograder.build(root / "autograder.zip", ["07_accumulate_window"])
    (root / "source").mkdir()
    for folder in ("submission", "results"):
        (root / folder).mkdir()
    with zipfile.ZipFile(root / "autograder.zip") as archive:
        archive.extractall(root / "source")
    return root


def run_autograder(root, **environment):
    program = (root / "source" / "run_autograder").read_text()
    done = subprocess.run(
        ["bash", "-c", program],
        env={**os.environ, "AUTOGRADER": str(root), "PYTHON": sys.executable, **environment},
        cwd=root / "source" / "course",  # grades with the course in the zip
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0
    return json.loads((root / "results" / "results.json").read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="grading needs Linux")
def test_the_autograder_grades_a_submission_in_gradescopes_layout(package):
    with zipfile.ZipFile(package / "autograder.zip") as archive:
        modes = {i.filename: i.external_attr >> 16 & 0o777 for i in archive.infolist()}
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755
    assert not any("__pycache__" in name for name in modes)
    course = Path(__file__).parents[1]
    solution = (course / "solutions" / "07_accumulate_window.ipynb").read_text()
    (package / "submission" / "work.ipynb").write_text(solution)
    told = run_autograder(package)
    assert told["score"] == sum(test["max_score"] for test in told["tests"]) == 8


def test_the_autograder_is_never_silent(package):
    told = run_autograder(package, PYTHON="/nowhere/python")
    assert told["score"] == 0 and "gave no result" in told["output"]
    told = run_autograder(package, LIMIT="0.05")
    assert told["score"] == 0 and "gave no result" in told["output"]


def test_the_set_up_is_a_program_that_bash_can_read(package):
    for name in ("setup.sh", "run_autograder"):
        assert subprocess.run(["bash", "-n", package / "source" / name]).returncode == 0
