"""Show code in a lesson: a function's source, or what changed from one to the next."""

import difflib
import inspect
import textwrap


class Code(str):
    """Source text that a notebook shows highlighted, in lines as they were written."""

    language = "python"

    def _repr_html_(self) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name

        look = "white-space: pre; overflow-x: auto; font-size: 90%; padding: 0.5em"
        formatter = HtmlFormatter(noclasses=True, prestyles=look)
        return highlight(self, get_lexer_by_name(self.language), formatter)


class Diff(Code):
    """What changed: lines that begin with - went, those with + came."""

    language = "diff"


def source(*functions) -> Code:
    """Return the functions' own source, for a cell to display."""
    return Code("\n\n".join(textwrap.dedent(inspect.getsource(function)) for function in functions))


def diff(before, after) -> Diff:
    """Return what changed from one function to another, line by line, for a cell to display."""
    old, new = (textwrap.dedent(inspect.getsource(f)).splitlines() for f in (before, after))
    lines = list(difflib.unified_diff(old, new, lineterm="", n=len(old)))
    return Diff("\n".join(lines[3:]))  # without the names of files that there are not
