"""Questions at the end of a lesson: choices and numbers, each wrong answer explained.

    quiz.ask("06_ddp_training_loop")        # in a lesson
    quiz.answer("06", 1, "b")               # where there are no widgets; what is printed says how

A lesson's questions are in ddp_course/quizzes, not in its notebook, so that no cell and no saved
output holds an answer. (The package jupyterquiz writes questions together with their answers as
JavaScript into the output, asks the same numbers each time, and has no form for a terminal.)
"""

import importlib
import random
import re

from . import quizzes
from .quizzes.forms import ChoiceForm, NumberForm
from .widgets import interactive, markup, paragraph, place

_asked = {}  # the quiz of each lesson as asked last: answer() is about that one


class Choice:
    """A question with one right answer among several."""

    def __init__(self, question, right, why, wrong, name=None):
        if not isinstance(wrong, dict) or not wrong or right in wrong:
            raise ValueError(f"{question}: wrong={{answer: why it is wrong}}, none of them right.")
        self.name = name
        self.parts = {"question": question, "right": right, "why": why, "wrong": dict(wrong)}

    def draw(self, dice: random.Random, first: bool) -> ChoiceForm:
        """Return the question with its answers in another order."""
        answers = [self.parts["right"], *self.parts["wrong"]]
        dice.shuffle(answers)
        return ChoiceForm(answers=answers, **self.parts)


class Number:
    """A question for a number, made anew at each draw."""

    def __init__(self, make, original=None, tolerance=0.01, name=None):
        if not callable(make):
            raise TypeError(f"number() needs a function draw(random) -> dict, not {make!r}.")
        self.make, self.original = make, original or {}
        self.tolerance, self.name = tolerance, name

    def draw(self, dice: random.Random, first: bool) -> NumberForm:
        """Return the question with other numbers; the first time with the original ones."""
        numbers = self.original if first else {}
        parts = self.make(dice, **numbers)
        return NumberForm(**{"tolerance": self.tolerance} | parts)


def choice(question: str, *, right: str, why: str, wrong: dict, name=None) -> Choice:
    """Return a question with one right answer; `wrong` is {answer: why it is wrong}.

    `name`: what the course calls it elsewhere, such as "Q4".
    """
    return Choice(question, right, why, wrong, name)


def number(draw, *, original: dict | None = None, tolerance: float = 0.01, name=None) -> Number:
    """Return a question for a number, asked with other numbers each time.

    `draw(random)` returns dict(question=, answer=, unit=, why=, mistakes={wrong number: why it is
    wrong}, tolerance=), all but question, answer and why optional; `tolerance` is relative.
    `original`: keyword arguments of `draw` for the first time, such as dict(batch=128).
    """
    return Number(draw, original, tolerance, name)


def load(name: str) -> list:
    """Return the questions of a lesson, by its name or number; ValueError if there are none."""
    digits = re.match(r"\d\d", str(name))
    known = [path.stem[1:] for path in sorted(_folder().glob("q[0-9][0-9].py"))]
    if not digits or digits.group() not in known:
        raise ValueError(f"no quiz {name!r}: there are quizzes for lessons {', '.join(known)}.")
    return importlib.import_module(f"{quizzes.__name__}.q{digits.group()}").QUESTIONS


def _folder():
    from pathlib import Path

    return Path(quizzes.__file__).parent


class Quiz:
    """The questions of a lesson as they are asked now, and which of them were answered rightly."""

    def __init__(self, name: str, seed: int | None = None):
        self.questions, self.number = load(name), str(name)[:2]
        dice = random.Random(self.number if seed is None else seed)
        self.forms = [question.draw(dice, first=seed is None) for question in self.questions]
        self.right = [False] * len(self.forms)

    def judge(self, index: int, reply) -> str:
        """Return what is to be said about a reply to a question, counted from 0."""
        right, said = self.forms[index].judge(reply)
        self.right[index] = right
        return f"{'✓' if right else '✗'} {said}"

    def redraw(self, index: int, dice: random.Random) -> None:
        """Ask a question anew: other numbers, or another order."""
        self.forms[index] = self.questions[index].draw(dice, first=False)
        self.right[index] = False

    def progress(self) -> str:
        """Return "3 of 4 right"."""
        return f"{sum(self.right)} of {len(self.right)} right"

    def text(self) -> str:
        """Return all questions for a terminal, and how to answer there."""
        asked = [f"{i}. {form.text()}" for i, form in enumerate(self.forms, 1)]
        reply = '"40"' if self.forms[0].has_numbers else '"a"'
        how = f'Answer with quiz.answer("{self.number}", 1, {reply}); other numbers: '
        return "\n\n".join([*asked, f'{how}quiz.ask("{self.number}", seed=1)'])


class Said(str):
    """Text that a cell shows as it is, without quotes."""

    __repr__ = str.__str__


def ask(name: str, seed: int | None = None) -> None:
    """Ask the questions of a lesson: with widgets where somebody can use them, else as text.

    `seed` draws other numbers. A cell that runs again starts afresh.
    """
    quiz = Quiz(name, seed)
    _asked[quiz.number] = quiz
    if interactive():
        place(("quiz", quiz.number), widget(quiz))
    else:
        print(quiz.text())


def answer(name: str, question: int, reply) -> Said:
    """Return what is to be said about a reply to a question (from 1) of the quiz asked last."""
    quiz = _asked.get(str(name)[:2]) or Quiz(name)
    _asked[quiz.number] = quiz
    if question not in range(1, len(quiz.forms) + 1):
        raise ValueError(f"question {question!r}: there are questions 1 to {len(quiz.forms)}.")
    return Said(f"{quiz.judge(question - 1, reply)}\n({quiz.progress()})")


# ---- widgets: buttons and text fields only. JupyterLab takes the arrow keys, and letters, from
# radio buttons and lists that have the focus, for its own commands.

LOOK = """<style>.jupyter-button.ddp-answer {width: 100%; height: auto; margin: 2px 0;
white-space: normal; text-align: left; line-height: 1.4; padding: 4px 8px}</style>"""


def widget(quiz: Quiz, dice: random.Random | None = None):
    """Return a box with all questions; `dice` draws the new numbers."""
    import ipywidgets

    dice, progress = dice or random.Random(), ipywidgets.HTML()

    def tell():
        progress.value = f'{LOOK}<b role="status">{quiz.progress()}</b>'

    tell()
    asked = [_question(quiz, index, dice, tell) for index in range(len(quiz.forms))]
    return ipywidgets.VBox([*asked, progress])


def _question(quiz: Quiz, index: int, dice: random.Random, tell):
    """Return the box of one question: its text, where to reply, what is said, a new draw."""
    import ipywidgets

    numbers = quiz.forms[index].has_numbers
    text, said = ipywidgets.HTMLMath(), ipywidgets.HTML()
    new = ipywidgets.Button(description="New numbers" if numbers else "New order")

    def judge(reply: str) -> bool:
        said.value = paragraph(markup(quiz.judge(index, reply)), 'role="status"')
        tell()
        return quiz.right[index]

    replies, write = (_field if numbers else _buttons)(quiz.forms[index], judge)

    def show():
        text.value = paragraph(f"<b>{index + 1}.</b> {markup(quiz.forms[index].question)}")
        said.value = ""
        write(quiz.forms[index])
        tell()

    def redraw(_):
        quiz.redraw(index, dice)
        show()

    show()
    new.on_click(redraw)
    return ipywidgets.VBox([text, *replies, said, new])


def _buttons(form: ChoiceForm, judge):
    """Return a button for each answer, and what writes another form on them."""
    import ipywidgets

    buttons = {letter: ipywidgets.Button() for letter in form.letters}

    def choose(letter: str):
        right = judge(letter)
        unmark()
        buttons[letter].button_style = "success" if right else "danger"
        buttons[letter].description = f"{'✓' if right else '✗'} {buttons[letter].description}"

    def unmark():
        for button in buttons.values():
            button.button_style = ""
            button.description = button.description.lstrip("✓✗ ")

    for letter, button in buttons.items():
        button.add_class("ddp-answer")
        button.on_click(lambda _, letter=letter: choose(letter))

    def write(form):
        unmark()
        for letter, button in buttons.items():
            button.description = f"{letter}) {form.letters[letter].replace('`', '')}"

    return buttons.values(), write


def _field(form: NumberForm, judge):
    """Return a field for a number with its button, and what empties it for another form."""
    import ipywidgets

    field = ipywidgets.Text(placeholder="a number, then Enter", continuous_update=False)
    field.style.description_width = "initial"
    check = ipywidgets.Button(description="Check")
    field.observe(lambda change: change["new"] and judge(change["new"]), "value")
    check.on_click(lambda _: judge(field.value))

    def write(form):
        field.description = f"Answer ({form.unit})" if form.unit else "Answer"
        field.value = ""

    return [ipywidgets.HBox([field, check])], write
