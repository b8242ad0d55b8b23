"""Show code in a lesson: a function's source, or what changed from one to the next."""

import difflib
import inspect
import textwrap


def source(*functions):
    """Return the functions' own source, for a cell to display."""
    return _code(
        "\n\n".join(textwrap.dedent(inspect.getsource(function)) for function in functions),
        "python",
    )


def diff(before, after):
    """Return what changed from one function to another, line by line, for a cell to display."""
    old, new = (
        textwrap.dedent(inspect.getsource(function)).splitlines() for function in (before, after)
    )
    lines = list(difflib.unified_diff(old, new, lineterm="", n=100))[3:]  # without the file header
    return _code("\n".join(lines), "diff")


def _code(text: str, language: str):
    from IPython.display import Code

    return Code(text, language=language)
