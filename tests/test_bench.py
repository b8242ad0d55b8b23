"""`ddp-course bench`: when a goal is met, what a table says, and a small run of real targets."""

import json
import subprocess
import sys
import types

import pytest

from ddp_course.bench import TARGETS, cases, command, launchers, table, train
from ddp_course.bench.cases import COURSE, Case, Goal, in_turns, seconds_on_ranks
from ddp_course.bench.chart import chart
from ddp_course.launch import launch


def bench(*arguments, cwd):
    command = [sys.executable, "-m", "ddp_course", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def only(case):
    (verdict,) = case.verdicts()
    return verdict["met"]


@pytest.mark.parametrize(
    ("ours", "theirs", "more_is_better", "bound", "met"),
    [
        ([1.0], [30.0], False, 30, True),
        ([1.0], [29.0], False, 30, False),
        ([99.0], [100.0], True, 0.99, True),
        ([98.0], [100.0], True, 0.99, False),
        ([1.0, 5.0, 1.0], [2.0, 2.0, 2.0], False, 2, True),  # the median of the rounds' ratios
        ([1.0, 5.0, 5.0], [2.0, 2.0, 2.0], False, 2, False),
        ([1.0], [None], False, 30, True),  # it never came to an end
        ([None], [1.0], False, 30, None),
        ([1.0], [], False, 30, None),
    ],
)
def test_a_goal_against_another_holds_by_the_rounds_ratios(
    ours, theirs, more_is_better, bound, met
):
    samples = {COURSE: ours} | ({"other": theirs} if theirs else {})
    case = Case("a case", "s", samples, [Goal(bound, "other")], more_is_better)
    assert only(case) is met


def test_a_goal_by_itself_is_a_most():
    assert only(Case("a case", "s", {COURSE: [0.9, 1.0, 9.0]}, [Goal(1)])) is True
    assert only(Case("a case", "s", {COURSE: [1.1]}, [Goal(1)])) is False
    assert only(Case("a case", "ranks", {COURSE: [0, 0, 1]}, [Goal(0)])) is True
    assert only(Case("a case", "s", {}, [Goal(1)])) is None


def test_contenders_take_turns():
    order = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    case = in_turns(Case("a case", "s"), calls, rounds=2)
    assert order == ["a", "b", "a", "b"]
    assert case.samples == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def _work(rounds):
    import torch

    matrix = torch.ones(256, 256)
    once, many = lambda: matrix @ matrix, lambda: [matrix @ matrix for _ in range(20)]
    return seconds_on_ranks({"once": once, "many": many}, rounds, turn=0.01)


def test_on_ranks_more_work_takes_longer():
    for seconds in launch(_work, 5, nproc=2).values:
        case = Case("products", "s", seconds, ours="once")
        assert len(seconds["once"]) == len(seconds["many"]) == 5
        assert case.times("many") > 3


def test_the_table_says_median_spread_ratio_and_verdict():
    samples = {COURSE: [1.0, 2.0, 3.0], "other": [4.0, 4.0, None]}
    case = Case("a case", "s", samples, [Goal(3, "other")], notes=["third: left out"])
    told = "\n".join(table.lines(case))
    assert "2   1 … 3" in told
    assert "× 3" in told and "1 of 3 did not come to an end" in told
    assert "third: left out" in told
    assert "goal met: at least 3 times as good as other (3)" in told
    case.goals = [Goal(3.5, "other")]
    assert "goal NOT MET" in "\n".join(table.lines(case))


def test_the_picture_says_in_words_what_it_shows():
    case = Case("a case", "s", {COURSE: [1.0], "other": [4.0]})
    assert "a case: other × 4" in chart([case]).alternative_text
    with pytest.raises(ValueError, match="nothing to draw"):
        chart([Case("alone", "s", {COURSE: [1.0]})])


def test_a_missing_launcher_is_left_out_with_a_line(monkeypatch):
    absent = launchers.Launcher("Somebody's", launchers.course, "a_package_that_is_not_there")
    monkeypatch.setattr(launchers, "LAUNCHERS", [*launchers.LAUNCHERS[:1], absent])
    there, missing = launchers.available()
    assert [launcher.name for launcher in there] == [COURSE]
    assert len(missing) == 1 and "Somebody's: left out" in missing[0] and "peers" in missing[0]


def test_a_wrapper_that_trains_otherwise_is_not_compared():
    with pytest.raises(AssertionError):
        train._check_losses({train.PLAIN: [2.0, 1.9], "other": [2.0, 1.5]})
    train._check_losses({train.PLAIN: [2.0, 1.9], "other": [2.001, 1.899]})


def test_every_target_has_a_module():
    for target in TARGETS:
        __import__(f"ddp_course.bench.{target}")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rings"], "no target 'rings': there are launch, "),
        (["ring", "--rounds", "0"], "--rounds must be at least 1"),
        (["ring", "--out", "nowhere"], "nowhere: there is no such folder"),
    ],
)
def test_a_wrong_command_gets_one_line_and_measures_nothing(arguments, says, tmp_path):
    done = bench(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_an_unmet_goal_is_the_exit_code(monkeypatch, tmp_path, capsys):
    slow = types.SimpleNamespace(
        measure=lambda rounds, say: [Case("a case", "s", {COURSE: [2.0]}, [Goal(1)])]
    )
    monkeypatch.setattr(command.importlib, "import_module", lambda *_: slow)
    arguments = types.SimpleNamespace(targets=["ring"], rounds=1, out=str(tmp_path))
    assert command.main(arguments) == 1
    assert "0 goals met, 1 not met" in capsys.readouterr().out
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_a_run_writes_a_table_json_and_a_picture(tmp_path, monkeypatch):
    done = bench("ddp", "--rounds", "1", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    assert "DDP by hand, MLP" in done.stdout and "goal" in done.stdout
    (file,) = tmp_path.glob("bench-*.json")
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(file.read_text())
    assert told["machine"]["cores"] >= 1
    case, _ = told["targets"]["ddp"]
    assert case["unit"] == "samples/s" and case["medians"][COURSE] > 0
    ratio = case["medians"][COURSE] / case["medians"]["torch's DDP"]
    assert case["verdicts"][0]["measured"] == pytest.approx(ratio)
    assert cases.Goal(**case["goals"][0]) == Goal(0.9, "torch's DDP")


@pytest.mark.slow
def test_what_a_failed_rank_leaves_is_counted(tmp_path):
    done = bench("faults", "--rounds", "1", cwd=tmp_path)
    assert done.stdout.count("goal met: at most 0 ranks (0)") == 2, done.stdout + done.stderr
