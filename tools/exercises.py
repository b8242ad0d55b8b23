"""From a solution's text to the exercise: what the student is to write is taken out.

In a code cell the lines between `# BEGIN SOLUTION goal` and `# END SOLUTION` become one line that
raises NotImplementedError and states the goal; cells tagged solution-only are left out.
"""

import copy
import os
import re

from nbformat import NotebookNode

SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)# BEGIN SOLUTION (?P<goal>.+)\n(?:.*\n)*?[ \t]*# END SOLUTION(?=\n|$)",
    re.MULTILINE,
)


def exercise(solution: NotebookNode) -> NotebookNode:
    """Return the exercise of a solution that has not been executed."""
    made = copy.deepcopy(solution)
    made.cells = [c for c in made.cells if "solution-only" not in c.metadata.get("tags", ())]
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.source = SOLUTION.sub(_stub, cell.source)
    return made


def _stub(match) -> str:
    indent, goal = match["indent"], match["goal"].replace('"', "'")
    return f'{indent}raise NotImplementedError("Goal: {goal}")'


def faults(solution: NotebookNode) -> list[str]:
    """What keeps a solution from becoming an exercise."""
    found = []
    sources = [cell.source for cell in solution.cells if cell.cell_type == "code"]
    if not any(SOLUTION.search(source) for source in sources):
        found.append("no `# BEGIN SOLUTION goal` … `# END SOLUTION` in it")
    left = exercise(solution)
    if any("SOLUTION" in cell.source for cell in left.cells):
        found.append("a marker of a solution is left in the exercise")
    return found


def drift(stored: NotebookNode, wanted: NotebookNode) -> str | None:
    """What of the exercise is missing from the stored one; what a student wrote is no drift.

    On the build server (CI is set) they must be equal.
    """
    if os.environ.get("CI"):
        same = [c.source for c in stored.cells] == [c.source for c in wanted.cells]
        return None if same else "differs from its solution"
    there = {cell.get("id"): cell for cell in stored.cells}
    for number, cell in enumerate(wanted.cells, 1):
        old = there.get(cell.id)
        if cell.cell_type == "code":  # to be worked in
            continue
        if old is None or old.source != cell.source:
            return f"cell {number} of the brief differs from its solution"
    return None
