"""Questions and calculators in a cell: who can answer, show them once, leave nothing behind.

Only ipywidgets' own widgets are used: no JavaScript of the course's, all of it works by keyboard.
"""

import html
import re
import sys

_on_screen = {}  # what was shown under a key, to be closed when its cell runs again


def interactive() -> bool:
    """Say whether somebody sits in front of this kernel who can use a widget.

    Whoever executes notebooks without a person (nbclient, nbval, nbconvert) tells the kernel that
    it cannot ask for input; JupyterLab and its like tell it that it can.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):
        return False
    return bool(shell.kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


def place(key, box) -> None:
    """Display a widget, and close the one that was shown under the same key before."""
    from IPython.display import display

    close(_on_screen.pop(key, None))
    _on_screen[key] = box
    display(box)


def close(box) -> None:
    """Close a widget and all that it consists of: a closed box alone would leave its parts."""
    if box is None:
        return
    for part in getattr(box, "children", ()):
        close(part)
    for part in (getattr(box, "layout", None), getattr(box, "style", None), box):
        if part is not None:
            part.close()


def controls(box) -> list:
    """Return the parts of a widget that can be used, and so disabled."""
    own = [box] if hasattr(box, "disabled") else []
    return own + [part for child in getattr(box, "children", ()) for part in controls(child)]


def markup(text: str) -> str:
    """Return HTML for the little Markdown there is in a question: `code`, **bold**, *slanted*."""
    text = html.escape(text, quote=False)
    for sign, tag in ((r"`", "code"), (r"\*\*", "b"), (r"\*", "i")):
        text = re.sub(rf"{sign}(?=\S)(.+?)(?<=\S){sign}", rf"<{tag}>\1</{tag}>", text)
    return text.replace("\n", "<br>")


def paragraph(content: str, attributes: str = "") -> str:
    """Return HTML for a widget: its own lines are as far apart as in the text around it."""
    return f'<div {attributes} style="line-height: 1.4; margin: 2px 0">{content}</div>'


def plain(text: str) -> str:
    """Return the text without Markdown's signs, for a line that is printed."""
    return re.sub(r"\*\*|`", "", text)
