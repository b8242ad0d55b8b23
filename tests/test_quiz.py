"""Quizzes: what is said about a reply, what is asked anew, what a notebook gets to see."""

import random
import re
from pathlib import Path

import ipywidgets
import pytest
from kernels import Kernel
from torch.utils.data import DistributedSampler

from ddp_course import memory, quiz, quizzes, widgets
from ddp_course.quizzes import q01, q05
from ddp_course.quizzes.forms import ChoiceForm, NumberForm, parse

LESSONS = [path.stem[1:] for path in sorted(Path(quizzes.__file__).parent.glob("q??.py"))]
DRAWS = 20


def parts(box, kind):
    found = [box] if isinstance(box, kind) else []
    return found + [part for child in getattr(box, "children", ()) for part in parts(child, kind)]


# ---- replies


@pytest.mark.parametrize(
    "text, unit, value",
    [
        ("40", "GB", 40),
        ("40 GB", "GB", 40),
        ("40gb", "GB", 40),
        ("4e1", "GB", 40),
        ("40,000", "", 40_000),
        ("1,437,000.5", "", 1_437_000.5),
        ("0,5", "", 0.5),
        ("1/3", "", 1 / 3),
        ("3 / 4 ms", "ms", 0.75),
        (".5", "", 0.5),
        ("−3", "", -3),
        ("0.04 TB", "GB", 40),
        ("40,000 MB", "GB in all", 40),
        ("12 step", "steps", 12),
        ("50 %", "%", 50),
    ],
)
def test_a_number_may_be_written_in_many_ways(text, unit, value):
    assert parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text, unit, said",
    [
        ("forty", "GB", "Give a number"),
        ("", "GB", "Give a number"),
        ("1/0", "", "divides by zero"),
        ("40 ms", "GB", "Give it in GB."),
        ("40 apples", "", "without a unit"),
        ("1,2,3", "", "such as 40,000 or 0.5"),
    ],
)
def test_what_is_no_number_is_told_what_to_do(text, unit, said):
    with pytest.raises(ValueError, match=said):
        parse(text, unit)
    assert not NumberForm("?", 40, "because", unit).judge(text)[0]


def test_a_wrong_number_gets_its_explanation_or_how_far_it_is_off():
    form = NumberForm("?", 160, "4 × 40", "GB", {40: "That is one GPU's."})
    assert form.judge("160 GB") == (True, "Right. 4 × 40")
    assert form.judge("161") == (True, "Right. 4 × 40")  # within 1 %
    assert form.judge("40") == (False, "Not so. That is one GPU's.")
    assert form.judge("80") == (False, "Not so: too low, by a factor of 2.")
    assert form.judge("480") == (False, "Not so: too high, by a factor of 3.")
    assert form.judge("164") == (False, "Not so: too high, by 2.5 %.")
    assert form.judge("-160") == (False, "Not so: too low.")


def test_the_right_number_is_right_even_where_a_mistake_leads_to_it():
    assert NumberForm("?", 4, "2 + 2", mistakes={4: "You multiplied."}).judge("4")[0]


def test_zero_is_an_answer():
    form = NumberForm("?", 0, "nothing")
    assert form.judge("0")[0] and form.judge("1") == (False, "Not so: too high.")


def test_a_choice_is_answered_by_letter_or_by_its_text():
    form = ChoiceForm("Which?", ["this", "that"], "that", "it is", {"this": "it is not"})
    assert form.text() == "Which?\n   a) this\n   b) that"
    for reply in ("b", "B", "b)", " b. ", "that"):
        assert form.judge(reply) == (True, "Right. it is")
    assert form.judge("a") == form.judge("this") == (False, "Not so. it is not")
    assert form.judge("c") == (False, "Answer with one of the letters a, b.")


# ---- every quiz of the course


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_asks_three_to_six_questions_and_one_for_a_number(lesson):
    questions = quiz.load(lesson)
    assert 3 <= len(questions) <= 6
    assert any(isinstance(question, quiz.Number) for question in questions)


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_answer_is_right_and_every_mistake_is_explained(lesson):
    for seed in [None, *range(DRAWS)]:
        for form in quiz.Quiz(lesson, seed).forms:
            assert form.question.strip() and form.why.strip()
            if isinstance(form, ChoiceForm):
                assert sorted(form.letters.values()) == sorted([form.right, *form.wrong])
                for letter, words in form.letters.items():
                    assert form.judge(letter)[0] == (words == form.right)
                assert all(len(said) > 15 for said in form.wrong.values())
            else:
                assert form.judge(f"{form.answer!r} {form.unit}") == (True, f"Right. {form.why}")
                assert not form.judge(repr(form.answer * 1.5 + 1))[0]
                assert all(isinstance(wrong, int | float) for wrong in form.mistakes)


@pytest.mark.parametrize("lesson", LESSONS)
def test_numbers_are_fresh_at_each_draw_and_choices_change_places(lesson):
    quizzes_drawn = [quiz.Quiz(lesson, seed) for seed in range(DRAWS)]
    for index, question in enumerate(quiz.load(lesson)):
        assert len({drawn.forms[index].text() for drawn in quizzes_drawn}) > 1, question


def sampled(samples, ranks):
    dealt = [
        DistributedSampler(range(samples), ranks, rank, shuffle=False) for rank in range(ranks)
    ]
    return [index for own in dealt for index in own]


@pytest.mark.parametrize("samples, ranks", [(22, 4), (21, 4), (17, 8), (1437, 6)])
def test_what_lesson_05_asks_about_padding_is_what_the_sampler_does(samples, ranks):
    processed = sampled(samples, ranks)
    assert q05.processed(random, samples, ranks)["answer"] == len(processed)
    wrong = range(-samples % ranks)  # the first samples, dealt twice
    share = sum(index not in wrong for index in processed) / len(processed)
    asked = q05.padded_accuracy(random, samples, ranks, right=samples - len(wrong))
    assert asked["answer"] == pytest.approx(share)


def test_what_lesson_01_asks_about_memory_and_days_is_what_the_formulas_say():
    for seed in range(DRAWS):
        asked = q01.gpus_needed(random.Random(seed))
        billions, size = map(int, re.findall(r"(\d+) (?:billion|GB)", asked["question"]))
        total = memory.training_memory(billions * 1e9).total
        assert (asked["answer"] - 1) * size * 1e9 < total <= asked["answer"] * size * 1e9
        asked = q01.days(random.Random(seed))
        numbers = re.findall(r"\d+(?= billion| GPUs|e12)", asked["question"])
        billions, tokens, gpus, peak = map(int, numbers)
        said = memory.training_time(billions * 1e9, tokens * 1e9, gpus=gpus, peak=peak * 1e12)
        assert asked["answer"] == pytest.approx(said.value)


# ---- asking


def test_the_first_draw_has_the_original_numbers():
    asked = quiz.number(
        lambda dice, batch=None: {
            "question": f"batch {batch or dice.randint(200, 300)}?", "answer": 1, "why": "so",
        },
        original={"batch": 128},
    )  # fmt: skip
    assert asked.draw(random.Random(0), first=True).question == "batch 128?"
    assert asked.draw(random.Random(0), first=False).question != "batch 128?"
    asked = quiz.number(asked.make, tolerance=0.2)
    assert asked.draw(random.Random(0), first=True).judge("1.15")[0]


def test_without_widgets_a_quiz_is_text_that_says_how_to_answer(capsys):
    quiz.ask("00_start_here")
    printed = capsys.readouterr().out
    for line in ("1. ", "   a) ", "   (a number"):
        assert line in printed
    command = re.search(r'quiz\.answer\("00", 1, "a"\)', printed).group()
    said = eval(command, {"quiz": quiz})
    assert said[0] in "✓✗" and "of 4 right)" in said
    assert repr(said) == said  # a cell shows it in lines, without quotes


def test_the_same_text_each_time_and_another_one_with_a_seed(capsys):
    printed = []
    for seed in (None, None, 1, 2):
        quiz.ask("00", seed)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(set(printed)) == 3


def test_answers_are_about_the_quiz_that_was_asked_and_count():
    quiz.ask("00", seed=3)
    forms = quiz._asked["00"].forms
    for done, form in enumerate(forms, 1):
        right = form.right if isinstance(form, ChoiceForm) else repr(form.answer)
        assert quiz.answer("00", done, right).endswith(f"({done} of 4 right)")
    quiz.ask("00")
    assert "(0 of 4 right)" in quiz.answer("00", 2, "-1")  # asked again: afresh


def test_no_answer_is_in_what_a_notebook_shows(capsys):
    quiz.ask("00")
    text, box = capsys.readouterr().out, quiz.widget(quiz.Quiz("00"))
    state = text + str({k: w.get_state() for k, w in ipywidgets.widgets.widget._instances.items()})
    for form in quiz.Quiz("00").forms:
        said = [form.why, *(form.wrong if isinstance(form, ChoiceForm) else form.mistakes).values()]
        assert all(explanation not in state for explanation in said)
    widgets.close(box)


# ---- widgets


@pytest.fixture
def box():
    box = quiz.widget(quiz.Quiz("00"), dice=random.Random(1))
    yield box
    widgets.close(box)


def button(question, words):
    (found,) = [b for b in parts(question, ipywidgets.Button) if b.description == words]
    return found


def answers(question):
    """The buttons with an answer on them, by its text."""
    found = parts(question, ipywidgets.Button)
    texts = [b.description.lstrip("✓✗ ") for b in found]
    return {text[3:]: b for text, b in zip(texts, found, strict=True) if text[1:3] == ") "}


def test_a_choice_is_answered_by_a_button_and_asked_in_a_new_order(box):
    question, progress = box.children[0], box.children[-1]
    said = question.children[-2]
    answers(question)["Four"].click()
    assert "✗ Not so. Threads" in said.value and "0 of 4 right" in progress.value
    assert answers(question)["Four"].description[0] == "✗"
    answers(question)["None"].click()
    assert "✓ Right." in said.value and "1 of 4 right" in progress.value
    marks = {text: button.description[0] for text, button in answers(question).items()}
    assert marks["None"] == "✓" and "✗" not in marks.values()  # the last one chosen, and only it
    before = list(answers(question))
    while list(answers(question)) == before:
        button(question, "New order").click()
    assert said.value == "" and "0 of 4 right" in progress.value
    assert sorted(answers(question)) == sorted(before)
    answers(question)["None"].click()  # the buttons moved with their answers
    assert "✓ Right." in said.value


def test_a_number_is_checked_on_enter_and_asked_with_new_numbers(box):
    question, progress = box.children[1], box.children[-1]
    (field,) = parts(question, ipywidgets.Text)
    text, said = question.children[0], question.children[-2]
    button(question, "Check").click()
    assert "Give a number" in said.value
    field.value = "21"
    assert "Ranks count from 0" in said.value
    field.value = "15"
    assert "✓ Right." in said.value and "1 of 4 right" in progress.value
    before = text.value
    while text.value == before:
        button(question, "New numbers").click()
    assert field.value == "" and said.value == "" and "0 of 4 right" in progress.value


def test_a_cell_that_runs_again_leaves_no_widget_behind(monkeypatch):
    shown = []
    monkeypatch.setattr(quiz, "interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    quiz.ask("00")
    before = len(ipywidgets.widgets.widget._instances)
    quiz.ask("00")
    assert len(ipywidgets.widgets.widget._instances) == before
    widgets.close(shown[-1])


def test_a_notebook_with_a_person_gets_widgets_and_one_without_gets_text():
    kernel = Kernel()
    code = "from ddp_course import quiz; quiz.ask('00')"
    with_a_person = kernel.run(code)
    without = kernel.finish(kernel.client.execute(code, allow_stdin=False))
    kernel.close()
    assert "quiz.answer" not in with_a_person
    assert "quiz.answer" in without


# ---- wrong arguments


@pytest.mark.parametrize(
    "call, error, said",
    [
        (lambda: quiz.ask("99_nothing"), ValueError, "no quiz '99_nothing': there are quizzes for"),
        (lambda: quiz.ask("start"), ValueError, "no quiz 'start'"),
        (lambda: quiz.answer("00", 9, "a"), ValueError, "question 9: there are questions 1 to 4"),
        (lambda: quiz.number("40"), TypeError, "needs a function draw(random)"),
        (lambda: quiz.choice("?", right="a", why="", wrong={}), ValueError, "?: wrong={answer"),
        (lambda: quiz.choice("?", right="a", why="", wrong={"a": "b"}), ValueError, "?: wrong="),
    ],
)
def test_wrong_arguments_are_told_in_one_line(call, error, said):
    with pytest.raises(error, match=re.escape(said)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("2^14", 16384), ("2**-3", 0.125), ("1 024", 1024)])
def test_numbers_as_people_write_them(text, value):
    assert parse(text) == value
