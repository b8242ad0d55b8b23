"""What can be wrong with a notebook: by itself, and against the text it was built from."""

import re

from nbformat import NotebookNode

MAX_BYTES = 1_000_000


def plain(text: str) -> str:
    """Text without the terminal's colour codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def faults(notebook: NotebookNode, size: int) -> list[str]:
    """What is wrong with a stored notebook taken by itself."""
    found = []
    if size > MAX_BYTES:
        found.append(f"{size / 1e6:.1f} MB is too big (limit 1 MB): draw smaller figures")
    expected_count = 0
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(", cell.source):
            found.append(f"cell {number}: image without alternative text")
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        expected_count += 1
        if cell.execution_count != expected_count:
            found.append(f"cell {number}: not executed, top to bottom in a fresh kernel")
            break
        found += [f"cell {number}: {fault}" for fault in output_faults(cell)]
    return found


def output_faults(cell: NotebookNode) -> list[str]:
    """What is wrong with the outputs of one executed cell."""
    found = []
    errors = [output for output in cell.outputs if output.output_type == "error"]
    if "raises-exception" in cell.metadata.get("tags", ()):
        if not errors:
            found.append("tagged raises-exception, but nothing was raised")
    elif errors:
        found.append(f"error in its output: {errors[0].ename}: {plain(errors[0].evalue)}")
    for output in cell.outputs:
        for kind in output.get("data", {}):
            described = output.metadata.get(kind, {}).get("alt", "").strip()
            if kind.startswith("image/") and not described:
                found.append(f"{kind} without alternative text (metadata[{kind!r}]['alt'])")
    return found


def drift(stored: NotebookNode, wanted: NotebookNode) -> str | None:
    """The first cell in which a notebook and its text differ, with the line that does."""

    def shape(cell):
        return cell.cell_type, cell.metadata.get("tags", []), cell.source.splitlines()

    for number, (left, right) in enumerate(zip(stored.cells, wanted.cells, strict=False), 1):
        (kind, tags, old), (new_kind, new_tags, new) = shape(left), shape(right)
        if kind != new_kind:
            return f"cell {number} differs: {kind} cell, {new_kind} in the text"
        if old != new:
            line = next(i for i in range(1 + len(old)) if old[i : i + 1] != new[i : i + 1])
            lines = [(side[line : line + 1] or ["(no such line)"])[0] for side in (old, new)]
            return f"cell {number} differs\n  notebook: {lines[0]}\n  text:     {lines[1]}"
        if tags != new_tags:
            return f"cell {number} differs: tags {tags}, {new_tags} in the text"
    if len(stored.cells) != len(wanted.cells):
        more = "notebook" if len(stored.cells) > len(wanted.cells) else "text"
        number = 1 + min(len(stored.cells), len(wanted.cells))
        return f"cell {number} differs: only the {more} has it"
    return None
