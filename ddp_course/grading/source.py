"""From the text of a notebook or script to what one function needs; as text, nothing is run.

A *cell* is (place, source): "cell 7" or "work.py", with its line numbers kept for error messages.
"""

import ast
import re
import threading
from collections.abc import Iterator

_MAGIC = re.compile(r"^(\s*)([%!?]|[\w.]+\?+\s*$|[\w, ]+=\s*[!%])")
_WRAPPERS = ("%%time", "%%timeit", "%%capture")
_parsing = threading.Lock()
MOST_CHARACTERS = 1_000_000  # of all code of a file

Cell = tuple[str, str]


def parse(place: str, text: str) -> tuple[ast.Module | None, str, str]:
    """Return (tree, source, note): tree is None, and note says why, if it is no Python.

    Lines for IPython (%magic, !command, help?) become `pass`, so that line numbers stay.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for source in (text, _without_magics(text)):
        try:
            return _tree(source), source, ""
        except SyntaxError as error:
            line = f", line {error.lineno}" if error.lineno else ""
            note = f"{place}{line}: syntax error ({error.msg}); this cell is left out"
        except (ValueError, RecursionError, MemoryError) as error:  # NUL bytes; nested too deep
            note = f"{place}: no Python ({type(error).__name__}); this cell is left out"
    return None, "", note


def _tree(source: str) -> ast.Module:
    """Parse, one thread at a time: Python 3.11 counts the depth of nesting for all threads in one
    place, and two that parse at once fail now and then (github.com/python/cpython/issues/106905).
    """
    with _parsing:
        return ast.parse(source)


def _without_magics(text: str) -> str:
    first, _, rest = text.partition("\n")
    if first.startswith("%%"):
        text = "pass\n" + (rest if first.split()[0] in _WRAPPERS else "")
    lines = [_MAGIC.sub(r"\1pass  # ", line) for line in text.split("\n")]
    return "\n".join(lines)


def binds(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement gives a value, if it may be kept, else {}."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {
            node.id
            for target in targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
    if isinstance(statement, ast.If | ast.Try):  # try: import …; if cuda: device = …
        inner = [s for s in _inside(statement) if not isinstance(s, ast.Pass)]
        names = [binds(s) for s in inner]
        return set().union(*names) if names and all(names) else set()
    return set()


def _inside(statement) -> Iterator[ast.stmt]:
    yield from statement.body + statement.orelse
    for handler in getattr(statement, "handlers", ()):
        yield from handler.body
    yield from getattr(statement, "finalbody", ())


def needed(cells: list[Cell], function: str) -> list[Cell]:
    """Return the top-level statements, in order, that `function` needs: a slice of the module.

    Each as (place, text), with empty lines before it so that its line numbers are right.

    Starts from its definitions and follows names. So calls, plots, checks, training runs and
    imports of no use to it are not run.
    """
    found = [
        ((place, _text(source, statement)), statement, binds(statement))
        for place, source in cells
        for statement in _tree(source).body
    ]
    wanted, keep = {function}, set()
    while True:
        new = {
            number
            for number, (_, statement, names) in enumerate(found)
            if number not in keep and (names & wanted or "*" in names)
        }
        if not new:
            return [cell for number, (cell, _, _) in enumerate(found) if number in keep]
        keep |= new
        for number in new:
            wanted |= _uses(found[number][1])


def _uses(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _text(source: str, statement: ast.stmt) -> str:
    """Return the text of a statement, on its own lines; there may be others on them."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(node.lineno for node in decorators)])
    lines = [line.encode() for line in source.split("\n")[first - 1 : statement.end_lineno]]
    lines[-1] = lines[-1][: statement.end_col_offset]
    if not decorators:
        lines[0] = lines[0][statement.col_offset :]
    return "\n" * (first - 1) + b"\n".join(lines).decode()


def definitions(cells: list[Cell], name: str) -> list[str]:
    """Return the places where a name is given a value, in order."""
    return [place for place, source in cells for s in _tree(source).body if name in binds(s)]


def functions(cells: list[Cell]) -> list[str]:
    """Return the names of all top-level functions."""
    return list(
        dict.fromkeys(
            statement.name
            for _, source in cells
            for statement in _tree(source).body
            if isinstance(statement, ast.FunctionDef)
        )
    )
