"""Cases as a table of text."""

from .cases import Case


def lines(case: Case) -> list[str]:
    """Return a case as lines: median, smallest to largest, and this course's factor."""
    better = "more" if case.more_is_better else "less"
    found = [f"{case.name}  ({case.unit}, {better} is better)"]
    for contender, samples in case.samples.items():
        done = case.done(contender)
        if not done:
            found.append(f"  {contender:34} did not come to an end")
            continue
        spread = f"{number(min(done))} … {number(max(done))}"
        factor = "" if contender == case.ours else _factor(case, contender)
        lost = len(samples) - len(done)
        lost = f", {lost} of {len(samples)} did not come to an end" if lost else ""
        median = number(case.median(contender))
        found.append(f"  {contender:34} {median:>9}   {spread:21} {factor}{lost}")
    found += [f"  {note}" for note in case.notes]
    return found + [f"  {_told(verdict)}" for verdict in case.verdicts()]


def _factor(case: Case, contender: str) -> str:
    times = case.times(contender)
    return "" if times is None else f"{case.ours}: × {number(times)}"


def _told(verdict: dict) -> str:
    word = {True: "met", False: "NOT MET", None: "not measured"}[verdict["met"]]
    measured = "" if verdict["measured"] is None else f" ({number(verdict['measured'])})"
    return f"goal {word}: {verdict['goal']}{measured}"


def number(value: float) -> str:
    """Return a number with three digits that count."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
