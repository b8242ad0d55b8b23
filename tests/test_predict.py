"""Predictions: what a guess holds, how it is asked, what is shown beside the measurement."""

import re

import ipywidgets
import pytest
from kernels import Kernel

from ddp_course import plots, predict, widgets


@pytest.fixture
def person(monkeypatch):
    """Somebody in front of the notebook: questions become widgets; what was displayed."""
    shown = []
    monkeypatch.setattr(predict, "interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    yield shown
    for box in shown:
        widgets.close(box)


def parts(box, kind):
    found = [box] if isinstance(box, kind) else []
    return found + [part for child in getattr(box, "children", ()) for part in parts(child, kind)]


def press(box, words):
    (button,) = [b for b in parts(box, ipywidgets.Button) if b.description == words]
    button.click()


# ---- without widgets: the start value counts, and is printed


def test_a_question_is_printed_with_the_value_that_counts(capsys):
    guess = predict.number("How many `all_reduce`s?", start=4, unit="a window")
    assert guess.value == 4
    assert capsys.readouterr().out == (
        "Predict: How many all_reduces?\n  4 a window (what the course set)\n"
    )
    assert predict.choose("Which?", ["this", "that"], start="that").value == "that"
    assert predict.choose("Which?", ["this", "that"]).value == "this"
    assert predict.order("Fastest first?", ["b", "a"]).value == ["b", "a"]


def test_a_value_may_be_set_from_code_and_is_checked():
    guess = predict.number("?", start=1, low=0, high=2)
    guess.value = 2
    assert guess.value == 2
    with pytest.raises(ValueError, match="3 is out of bounds: 0 … 2"):
        guess.value = 3
    assert guess.value == 2


# ---- with widgets


def test_the_number_in_the_widget_is_the_value_until_it_is_committed(person):
    guess = predict.number("How long?", start=1.5, unit="ms", low=0, high=10)
    (box,) = person
    (slider,) = parts(box, ipywidgets.FloatSlider)
    assert slider.description == "Prediction (ms)" and slider.readout
    slider.value = 7.5
    assert guess.value == 7.5
    guess.value = 3
    assert slider.value == 3
    press(box, "Commit")
    assert slider.disabled
    assert any("Noted: 3 ms." in text.value for text in parts(box, ipywidgets.HTML))


def test_a_number_without_bounds_is_typed_and_one_bound_holds(person):
    guess = predict.number("How many?", start=10, low=0)
    (field,) = parts(person[0], ipywidgets.FloatText)
    field.value = 1e9
    assert guess.value == 1e9
    field.value = -1
    assert guess.value == field.value == 1e9


def test_a_choice_is_made_with_buttons(person):
    guess = predict.choose("Which?", ["this", "that"])
    (choices,) = parts(person[0], ipywidgets.ToggleButtons)
    choices.value = "that"
    assert guess.value == "that"
    guess.value = "this"
    assert choices.value == "this"


def test_items_are_moved_up(person):
    guess = predict.order("Fastest first?", ["a", "b", "c"])
    ups = [b for b in parts(person[0], ipywidgets.Button) if b.description == "▲"]
    shown = parts(person[0], ipywidgets.HTML)[1:4]
    assert [up.disabled for up in ups] == [True, False, False]
    ups[2].click()
    assert guess.value == ["a", "c", "b"]
    ups[1].click()
    assert guess.value == ["c", "a", "b"]
    assert [text.value for text in shown] == ["1. c", "2. a", "3. b"]
    guess.value = ["b", "a", "c"]
    assert shown[0].value == "1. b"
    press(person[0], "Commit")
    assert all(up.disabled for up in ups)


def test_a_cell_that_runs_again_leaves_no_widget_behind(person):
    predict.number("How long, again?", start=1)
    before = len(ipywidgets.widgets.widget._instances)
    for _ in range(3):
        predict.number("How long, again?", start=1)
    assert len(ipywidgets.widgets.widget._instances) == before


def test_who_is_there_is_told_by_the_request():
    kernel = Kernel()
    code = "from ddp_course import predict\nguess = predict.number('How long?', start=1)"
    with_a_person = kernel.run(code)
    request = kernel.client.execute(code, allow_stdin=False)  # as nbclient and nbval do
    without = kernel.finish(request)
    kernel.close()
    assert "Predict:" not in with_a_person
    assert without.startswith("Predict: How long?\n  1 (what the course set)")


# ---- beside the measurement


def test_a_number_is_drawn_beside_the_measured_one():
    guess = predict.number("How long?", start=1, unit="ms")
    guess.value = 3
    picture = guess.compare(7.5)
    assert isinstance(picture, plots.Picture)
    assert picture.get_suptitle() == "Predicted 3 ms, measured 7.5 ms (2.5 times the prediction)"
    assert guess.compare(7.5, title="So long").get_suptitle() == "So long"
    assert guess.compare(7.5, unit="s").axes[0].get_xlabel() == "s"


def test_what_nobody_has_predicted_is_called_the_start_value():
    guess = predict.number("How long?", start=3, unit="ms")
    told = guess.compare(7.5).get_suptitle()
    assert told == "Start value 3 ms, measured 7.5 ms (2.5 times the start value)"
    assert "start value 3" in predict.compare({"a": (guess, 4), "b": (2, 9)}).alternative_text
    chosen = predict.choose("Which?", ["this", "that"])
    assert "start value: this" in repr(chosen.compare("that"))
    assert "<th>start value</th>" in chosen.compare("this")._repr_html_()


def test_several_numbers_share_a_picture():
    guess = predict.number("How long?", start=1, unit="ms")
    guess.value = 3
    picture = predict.compare({"step": (guess, 3.1), "wait": (2, 9)}, title="T", unit="ms")
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == ["step", "wait"]
    assert "step: predicted 3 ms, measured 3.1 ms" in picture.alternative_text
    with pytest.raises(TypeError, match=r"step: give \(guess, measured\)"):
        predict.compare({"step": 3})


def test_a_choice_is_shown_beside_what_came_out():
    guess = predict.choose("Which <one>?", ["this", "that"])
    guess.value = "this"
    wrong, right = guess.compare("that"), guess.compare("this")
    assert (wrong.right, right.right) == (0, 1)
    assert repr(wrong) == "Which <one>?\n  ✗ predicted: this; measured: that"
    assert "✗ otherwise" in wrong._repr_html_() and "✓ the same" in right._repr_html_()
    assert "&lt;one&gt;" in right._repr_html_()
    with pytest.raises(ValueError, match="'other' is not one of the options: this, that"):
        guess.compare("other")


def test_an_order_is_shown_beside_the_measured_one_with_its_numbers():
    guess = predict.order("Fastest first?", ["c", "b", "a"])
    guess.value = ["a", "b", "c"]
    outcome = guess.compare({"b": 1.25, "a": 2, "c": 30}, unit="ms")
    assert outcome.right == 1
    assert repr(outcome).splitlines()[1:] == [
        "  1. ✗ predicted: a; measured: b (1.25 ms)",
        "  2. ✗ predicted: b; measured: a (2 ms)",
        "  3. ✓ predicted: c; measured: c (30 ms)",
    ]
    assert guess.compare(["a", "b", "c"]).right == 3
    with pytest.raises(ValueError, match="each of these once: c, b, a"):
        guess.compare(["a", "b"])


# ---- wrong arguments


@pytest.mark.parametrize(
    "ask, error, said",
    [
        (lambda: predict.number("?", start="3"), TypeError, "a prediction is a number, not '3'"),
        (lambda: predict.number("?", start=True), TypeError, "a number, not True"),
        (lambda: predict.number("?", start=float("nan")), ValueError, "a finite number"),
        (lambda: predict.number("?", start=5, low=0, high=3), ValueError, "5 is out of bounds"),
        (lambda: predict.number("?", start=5, low=6, high=3), ValueError, "must be below high=3"),
        (lambda: predict.choose("?", ["a"]), ValueError, "options: give two or more"),
        (lambda: predict.choose("?", ["a", "b"], start="c"), ValueError, "'c' is not one of"),
        (lambda: predict.order("?", ["a", "a"]), ValueError, "items: give two or more different"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(ask, error, said):
    with pytest.raises(error, match=re.escape(said)) as caught:
        ask()
    assert "\n" not in str(caught.value)
