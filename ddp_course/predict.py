"""Predict first: the student commits to a number, a choice or an order, then sees what came out.

    guess = predict.number("How many times as long?", start=1.5, low=0, high=10)
    ...measure...
    guess.compare(measured)                                     # a picture of both

In a notebook each question is a widget that works with the keyboard. Where nobody can press a
button (nbval, nbconvert, a terminal) it is a line of text, and the start value counts.
"""

import html
import math

from . import plots
from .widgets import controls, interactive, markup, paragraph, place, plain

PREDICTED, START = "predicted", "start value"


class Guess:
    """What the student predicts: `value`, and `compare(measured)` to see it beside the result.

    The value may be set from code as well; a wrong one raises ValueError. Until the student has
    moved or committed anything it is the course's start value, and called so.
    """

    def __init__(self, question: str, start):
        self.question, self.own = question, False
        self._box = self._inputs = None
        self._value = self.checked(start)
        if interactive():
            self._ask()
        else:
            print(f"Predict: {plain(question)}\n  {self.in_words()} (what the course set)")

    @property
    def value(self):
        return self._value

    @property
    def name(self) -> str:
        """What a picture calls the value."""
        return PREDICTED if self.own else START

    @value.setter
    def value(self, value):
        self._note(self.checked(value))
        if self._box is not None:
            self.write()

    def _note(self, value):
        self._value, self.own = value, True

    def __repr__(self):
        return f"<prediction: {self.in_words()}>"

    def write(self):  # into the widget
        self._inputs[0].value = self._value

    def _ask(self):
        import ipywidgets

        self._inputs = self.inputs()
        button = ipywidgets.Button(description="Commit", tooltip="This is my prediction")
        noted = ipywidgets.HTML()

        def commit(_):
            self.own = True
            for part in controls(self._box):
                part.disabled = True
            noted.value = f'<span role="status">Noted: {html.escape(self.in_words())}.</span>'

        button.on_click(commit)
        asked = ipywidgets.HTML(paragraph(f"<b>Predict.</b> {markup(self.question)}"))
        self._box = ipywidgets.VBox([asked, *self._inputs, ipywidgets.HBox([button, noted])])
        place((type(self).__name__, self.question), self._box)


class Number(Guess):
    """Ask for a number, between `low` and `high` if they are given."""

    def __init__(self, question, start, unit="", low=None, high=None):
        self.unit = unit
        self.low, self.high = (None if end is None else _number(end) for end in (low, high))
        if None not in (self.low, self.high) and not self.low < self.high:
            raise ValueError(f"low={low} must be below high={high}.")
        super().__init__(question, start)

    def checked(self, value):
        value = _number(value)
        if self.low is not None and value < self.low or self.high is not None and value > self.high:
            ends = (word for word in (self.low, self.high) if word is not None)
            raise ValueError(f"{value:g} is out of bounds: {' … '.join(f'{e:g}' for e in ends)}.")
        return value

    def in_words(self):
        return f"{self.value:,.6g} {self.unit}".strip()

    def inputs(self):
        import ipywidgets

        name = f"Prediction{f' ({self.unit})' if self.unit else ''}"
        look = {"description": name, "style": {"description_width": "initial"}}
        if self.low is None or self.high is None:
            part = ipywidgets.FloatText(self._value, **look)
        else:
            step = 10.0 ** math.floor(math.log10((self.high - self.low) / 50))  # 50 to 500 of them
            look |= {"step": step, "readout_format": ".2f" if step < 1 else ".0f"}
            look["layout"] = {"width": "32em"}
            part = ipywidgets.FloatSlider(self._value, min=self.low, max=self.high, **look)
        part.observe(self._read, "value")
        return [part]

    def _read(self, change):
        try:
            value = self.checked(change["new"])
        except ValueError:  # beyond a bound: back to what it was
            self.write()
        else:
            self._note(value)

    def compare(self, measured, title=None, unit: str | None = None, source: str = "measured"):
        """Return a picture of the prediction beside the measured number, or a "computed" one."""
        unit = self.unit if unit is None else unit
        return plots.prediction({"": (self.value, measured)}, unit, title, source, self.name)


class Choice(Guess):
    """Ask for one of the options (texts), the first of them at the start."""

    def __init__(self, question, options, start=None):
        self.options = _items(options, "options")
        super().__init__(question, self.options[0] if start is None else start)

    def checked(self, value):
        if value not in self.options:
            raise ValueError(f"{value!r} is not one of the options: {', '.join(self.options)}.")
        return value

    def in_words(self):
        return self.value

    def inputs(self):
        import ipywidgets

        part = ipywidgets.ToggleButtons(options=self.options, value=self._value)
        part.style.button_width = "auto"
        part.observe(lambda change: self._note(change["new"]), "value")
        return [part]

    def compare(self, measured, title: str | None = None, unit: str | None = None):
        """Return a line with the prediction beside what came out, one of the options."""
        measured = self.checked(measured)
        return Outcome([("", self.value, measured, measured)], title or self.question, self.name)


class Order(Guess):
    """Ask for the order of these items (texts)."""

    def __init__(self, question, items):
        self.items = _items(items, "items")
        super().__init__(question, self.items)

    def checked(self, value):
        value = list(value)
        if sorted(value) != sorted(self.items):
            raise ValueError(f"an order has each of these once: {', '.join(self.items)}.")
        return value

    def in_words(self):
        return ", ".join(f"{position}. {item}" for position, item in enumerate(self.value, 1))

    def inputs(self):
        import ipywidgets

        rows = []
        self._texts = [ipywidgets.HTML() for _ in self.items]
        for row, text in enumerate(self._texts):
            up = ipywidgets.Button(description="▲", tooltip="move up", disabled=row == 0)
            up.layout.width = "3em"
            up.on_click(lambda _, row=row: self._move_up(row))
            rows.append(ipywidgets.HBox([up, text]))
        self.write()
        return rows

    def _move_up(self, row):
        self._value.insert(row - 1, self._value.pop(row))
        self._note(self._value)
        self.write()

    def write(self):
        for position, (text, item) in enumerate(zip(self._texts, self._value, strict=True), 1):
            text.value = f"{position}. {markup(item)}"

    def compare(self, measured, title: str | None = None, unit: str | None = None):
        """Return a table of the predicted order beside the measured one.

        `measured`: the items in the order that came out, or {item: number} in that order.
        """
        order = self.checked(measured)
        numbers = measured if isinstance(measured, dict) else {}
        unit = f" {unit}" if unit else ""
        rows = []
        for position, (guess, item) in enumerate(zip(self.value, order, strict=True), 1):
            number = f" ({numbers[item]:,.4g}{unit})" if item in numbers else ""
            rows.append((f"{position}.", guess, item, item + number))
        return Outcome(rows, title or self.question, self.name)


class Outcome:
    """Predicted beside measured, row by row; `right` counts the rows that agree, of `total`."""

    def __init__(self, rows, title, name):
        self.rows, self.title, self.name = rows, title, name
        self.right, self.total = sum(guess == came for _, guess, came, _ in rows), len(rows)

    def __repr__(self):
        lines = [plain(self.title)]
        for position, guess, came, shown in self.rows:
            sign = "✓" if guess == came else "✗"
            words = f"{sign} {self.name}: {guess}; measured: {shown}"
            lines.append(f"  {position} {words}" if position else f"  {words}")
        return "\n".join(lines)

    def _repr_html_(self):
        rows = ""
        for position, guess, came, shown in self.rows:
            mark = "✓ the same" if guess == came else "✗ otherwise"
            cells = (f"<td>{markup(cell)}</td>" for cell in (position, guess, shown, mark))
            rows += f"<tr>{''.join(cells)}</tr>"
        heads = "".join(f"<th>{head}</th>" for head in ("", self.name, "measured", ""))
        return f"<p><b>{markup(self.title)}</b></p><table><tr>{heads}</tr>{rows}</table>"


number, choose, order = Number, Choice, Order  # as they read in a lesson


def compare(pairs: dict, title: str | None = None, unit: str = "", source: str = "measured"):
    """Return one picture of {"what": (guess, measured), ...}; a guess may be a plain number."""
    guesses = [pair[0] for pair in pairs.values() if isinstance(pair, tuple | list) and pair]
    own = all(guess.own for guess in guesses if isinstance(guess, Guess))
    pairs = {what: _pair(what, pair) for what, pair in pairs.items()}
    return plots.prediction(pairs, unit, title, source, PREDICTED if own else START)


def _pair(what, pair) -> tuple:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{what}: give (guess, measured), not {pair!r}.")
    guess, measured = pair
    return (guess.value if isinstance(guess, Guess) else guess), measured


def _number(value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a prediction is a number, not {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"a prediction is a finite number, not {value}.")
    return value


def _items(items, name) -> list[str]:
    items = list(items)
    if len(items) < 2 or len(set(items)) < len(items) or not all(isinstance(i, str) for i in items):
        raise ValueError(f"{name}: give two or more different texts, not {items!r}.")
    return items
