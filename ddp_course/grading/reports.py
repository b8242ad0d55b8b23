"""One model of results, five forms: screen, CSV, JUnit XML, Gradescope's results.json, HTML.

Formats: https://gradescope-autograders.readthedocs.io ("Autograder Specifications"); the XML schema
of Apache Ant's JUnit task, as Jenkins and GitLab read it.
"""

import csv
import html
import io
import json
from pathlib import Path
from xml.etree import ElementTree

from .result import Check, Result, write

_MARKS = {True: "✓ passed", False: "✗ failed"}


def write_all(results: list[Result], out: Path, gradescope: bool = False) -> list[Path]:
    """Write all reports below `out`; results.json for one student, or if it is asked for."""
    files = {
        out / "class.csv": class_csv(results),
        out / "junit.xml": junit(results),
        **{out / "feedback" / f"{r.student}.html": feedback(r) for r in results},
    }
    if gradescope or len(results) == 1:
        files[out / "results.json"] = gradescope_json(results[0])
    for file, text in files.items():
        write(file, text)
    return list(files)


def table(results: list[Result]) -> str:
    """Return one line for each student: points by exercise, in all, and the first note."""
    names = list(dict.fromkeys(name for result in results for name in result.exercises))
    head = ["student", *(name.partition("_")[0] for name in names), "points", ""]
    rows = [head]
    for result in results:
        parts = [_share(result.exercise(name)) for name in names]
        note = result.notes[0] if result.notes else ""
        note = note if len(note) <= 60 else note[:59] + "…"
        note = note.replace("\n", " ")
        rows.append([result.student, *parts, f"{result.points}/{result.of}", note])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def details(result: Result) -> str:
    """Return every check of a student, with its message, as text."""
    lines = [f"{result.student}: {result.points} of {result.of} points (seed {result.seed})"]
    lines += [f"note: {note}" for note in result.notes]
    for check in result.checks:
        lines.append(f"{'✓' if check.passed else '✗'} {check.exercise}: {_title(check)}")
        if check.message:
            lines.append("    " + check.message.replace("\n", "\n    "))
    return "\n".join(lines)


def _share(checks: list[Check]) -> str:
    return f"{sum(c.points for c in checks)}/{sum(c.of for c in checks)}"


def _title(check: Check) -> str:
    return f"{check.name} ({check.points}/{check.of})" if check.of else check.name


def class_csv(results: list[Result]) -> str:
    """Return a line for each student: points, by exercise and in all, and notes.

    A cell that a spreadsheet could take for a formula gets an apostrophe in front.
    """
    names = list(dict.fromkeys(name for result in results for name in result.exercises))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["student", *names, "points", "of", "seed", "notes"])
    for result in results:
        parts = [sum(check.points for check in result.exercise(name)) for name in names]
        notes = _no_formula(" | ".join(result.notes).replace("\n", " "))
        row = [_no_formula(result.student), *parts, result.points, result.of, result.seed, notes]
        writer.writerow(row)
    return text.getvalue()


def _no_formula(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


def junit(results: list[Result]) -> str:
    """Return a test suite for each student, a test case for each check."""
    root = ElementTree.Element("testsuites")
    for result in results:
        failed = sum(not check.passed for check in result.checks)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=result.student,
            tests=str(len(result.checks)),
            failures=str(failed),
            errors="0",
            time=f"{sum(check.seconds for check in result.checks):.2f}",
        )
        for check in result.checks:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{result.student}.{check.exercise}",
                name=check.name,
                time=f"{check.seconds:.2f}",
            )
            if not check.passed:
                first = check.message.partition("\n")[0]
                ElementTree.SubElement(case, "failure", message=first).text = check.message
        if result.notes:
            ElementTree.SubElement(suite, "system-out").text = "\n".join(result.notes)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def gradescope_json(result: Result) -> str:
    """Return what Gradescope reads: a score, and each check with its score and its message."""
    tests = []
    for check in result.checks:
        test = {
            "name": f"{check.exercise}: {check.name}",
            "status": "passed" if check.passed else "failed",
            "output": check.message,
            "output_format": "text",
        }
        if check.of:
            test |= {"score": check.points, "max_score": check.of}
        tests.append(test)
    told = {
        "score": result.points,
        "output": "\n".join([*result.notes, f"seed {result.seed}"]),
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    return json.dumps(told, indent=1)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 48em; margin: 2em auto; padding: 0 1em; }}
li {{ margin: .6em 0; }} pre {{ white-space: pre-wrap; background: #f3f3f3; padding: .6em; }}
.passed b {{ color: #00664a; }} .failed b {{ color: #9c2f00; }}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


def feedback(result: Result) -> str:
    """Return a page for the student: each check, and what was seen where one failed."""
    parts = [f"<p>{result.points} of {result.of} points.</p>"]
    if result.notes:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
        parts.append(f"<h2>About the files</h2><ul>{notes}</ul>")
    for name in result.exercises:
        checks = result.exercise(name)
        items = "".join(map(_item, checks))
        parts.append(f"<h2>{html.escape(name)}: {_share(checks)}</h2><ul>{items}</ul>")
    parts.append(
        f"<p>The same numbers again: <code>check(name, function, seed={result.seed})</code>.</p>"
    )
    return _PAGE.format(title=html.escape(f"Feedback for {result.student}"), body="".join(parts))


def _item(check: Check) -> str:
    kind = "passed" if check.passed else "failed"
    text = f"<b>{_MARKS[check.passed]}</b> {html.escape(_title(check))}"
    message = f"<pre>{html.escape(check.message)}</pre>" if check.message else ""
    return f'<li class="{kind}">{text}{message}</li>'
