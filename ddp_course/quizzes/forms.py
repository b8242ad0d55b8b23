"""A question as it is asked once: its text, and what is to be said about a reply."""

import math
import re
import string

BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "pb": 1e15}


class ChoiceForm:
    """A choice in one order of its answers: `letters` is {"a": answer, ...}."""

    has_numbers = False

    def __init__(self, question, answers, right, why, wrong):
        self.question, self.right, self.why, self.wrong = question, right, why, wrong
        self.letters = dict(zip(string.ascii_lowercase, answers, strict=False))

    def text(self) -> str:
        return "\n".join(
            [self.question, *(f"   {k}) {answer}" for k, answer in self.letters.items())]
        )

    def judge(self, reply) -> tuple[bool, str]:
        """Return (right or not, explanation) for a letter or the text of an answer."""
        words = self.letters.get(str(reply).strip().lower().rstrip(")."), reply)
        if words == self.right:
            return True, f"Right. {self.why}"
        if words in self.wrong:
            return False, f"Not so. {self.wrong[words]}"
        return False, f"Answer with one of the letters {', '.join(self.letters)}."


class NumberForm:
    """A number to be found, `mistakes` being {wrong number: why it is wrong}."""

    has_numbers = True

    def __init__(self, question, answer, why, unit="", mistakes=None, tolerance=0.01):
        self.question, self.answer, self.why, self.unit = question, float(answer), why, unit
        self.tolerance = tolerance
        self.mistakes = dict(mistakes or {})

    def text(self) -> str:
        return f"{self.question}\n   (a number{f', in {self.unit}' if self.unit else ''})"

    def judge(self, reply) -> tuple[bool, str]:
        """Return (right or not, explanation) for a text such as "40", "40 GB", "4e1", "1/3"."""
        try:
            value = parse(str(reply), self.unit)
        except ValueError as error:
            return False, str(error)
        if self._near(value, self.answer):  # first: by chance a mistake may give the right number
            return True, f"Right. {self.why}"
        for wrong, said in self.mistakes.items():
            if self._near(value, wrong):
                return False, f"Not so. {said}"
        return False, f"Not so: {_off(value, self.answer)}."

    def _near(self, value, wanted) -> bool:
        return math.isclose(value, wanted, rel_tol=self.tolerance, abs_tol=1e-12)


def parse(text: str, unit: str = "") -> float:
    """Return the number that a text says, in `unit`; raise ValueError with what to do instead.

    Understands 40, 40 GB, 4e1, 40,000, 0.5, 0,5 and 1/3. Bytes given in another unit than asked
    for (0.04 TB) are converted.
    """
    text = text.strip().replace("−", "-").replace("\N{NO-BREAK SPACE}", " ")
    text = re.sub(r"(?<=\d)[ _](?=\d{3}(?!\d))", "", text)  # 1 024, 1_024
    digits = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
    if power := re.fullmatch(r"(\d+)\s*(?:\^|\*\*)\s*([-+]?\d{1,3})", text):
        return float(power[1]) ** int(power[2])
    found = re.fullmatch(rf"({digits})(?:\s*/\s*({digits}))?\s*(.*)", text)
    if not found:
        raise ValueError("Give a number, such as 40, 1/3 or 4e9.")
    value = _plain(found[1])
    if found[2]:
        if not (divisor := _plain(found[2])):
            raise ValueError("That divides by zero.")
        value /= divisor
    return value * _factor(found[3].strip().lower(), unit)


def _plain(digits: str) -> float:
    if re.match(r"[-+]?[1-9]\d{0,2}(,\d{3})+(?!\d|,)", digits):  # thousands
        return float(digits.replace(",", ""))
    if digits.count(",") > 1 or ("," in digits and "." in digits):
        raise ValueError("Give a number, such as 40,000 or 0.5.")
    return float(digits.replace(",", "."))  # a decimal comma


def _factor(given: str, unit: str) -> float:
    """Return what turns a number in the given unit into the unit asked for."""
    asked = unit.lower()
    wanted = asked.partition(" ")[0]
    if given in ("", asked, wanted) or given.rstrip("s") == wanted.rstrip("s"):
        return 1.0
    if given in BYTES and wanted in BYTES:
        return BYTES[given] / BYTES[wanted]
    raise ValueError(f"Give it in {unit}." if unit else "Give the number alone, without a unit.")


def _off(value: float, answer: float) -> str:
    """Return how a wrong number is wrong."""
    where = "too high" if value > answer else "too low"
    if value * answer <= 0:
        return where
    factor = max(value / answer, answer / value)
    if factor < 1.1:
        return f"{where}, by {100 * (factor - 1):.2g} %"
    return f"{where}, by a factor of {factor:,.3g}"
