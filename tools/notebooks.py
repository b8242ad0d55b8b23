"""Build the notebooks from their text sources, and check that the two belong together.

    python tools/notebooks.py build              every notebook
    python tools/notebooks.py build 06           those whose name starts with 06
    python tools/notebooks.py build --prose 06   where only prose has changed: keeps all outputs
    python tools/notebooks.py check

The text TREE/source/NAME.py (jupytext py:percent) becomes TREE/NAME.ipynb: converted, executed in
TREE by the current Python, stored with its outputs. A notebook that fails is not written. From a
solution the exercise of the same name is made as well, without outputs.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

import exercises
from notebook_check import drift, faults, plain

ROOT = Path(__file__).resolve().parent.parent
TREES = ("notebooks", "notebooks/demos", "solutions")
CELL_SECONDS = 120
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
    },
}


class Broken(Exception):
    """Why a notebook could not be built, ready to print."""


# ---- text -> notebook


def convert(source: Path) -> nbformat.NotebookNode:
    """The notebook of a text source, without outputs; a cell's id follows from its content."""
    try:
        notebook = jupytext.read(source, fmt="py:percent")
    except Exception as error:
        raise Broken(f"its text cannot be read: {str(error).splitlines()[0]}") from None
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: Counter = Counter()
    for cell in notebook.cells:
        kept = {key: value for key, value in cell.metadata.items() if not key.startswith("lines_")}
        cell.metadata = nbformat.from_dict(kept)
        seen[content := f"{cell.cell_type}\n{cell.source}"] += 1
        cell.id = hashlib.sha256(f"{seen[content]}\n{content}".encode()).hexdigest()[:8]
    return notebook


class ThisPython(AsyncKernelManager):
    """Whatever kernel is asked for, it runs in the current interpreter."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in place; Broken, with cell and traceback, for one that raises or hangs."""
    running = []
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        coalesce_streams=True,
        on_cell_execute=lambda cell, cell_index: running.append((cell_index + 1, cell.source)),
    )
    beside_python = str(Path(sys.executable).parent)  # where cells that say !torchrun find it
    path = os.pathsep.join((beside_python, os.environ.get("PATH", "")))
    try:
        client.execute(env={**os.environ, "PATH": path})
    except CellExecutionError as error:  # its text holds the cell and the traceback
        raise Broken(f"cell {running[-1][0]} failed\n{plain(str(error))}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        hung = isinstance(error, CellTimeoutError)
        reason = f"did not end in {CELL_SECONDS} s" if hung else "killed its kernel"
        number, code = running[-1]
        raise Broken(f"cell {number} {reason}\n{code}") from None
    notebook.metadata = nbformat.from_dict({**notebook.metadata, **METADATA})


def anonymous(text: str) -> str:
    """Text without the paths of the machine that built it, as Python and IPython write them."""
    home = str(Path.home())
    places = {
        sys.prefix: "~/ddp-course/.venv",
        str(ROOT): "~/ddp-course",
        sys.base_prefix: "/usr",
    }
    for place, name in places.items():
        for spelling in (place, place.replace(home, "~", 1)):
            text = re.sub(re.escape(spelling) + r"(?=[/\\]|\s|$)", lambda _, name=name: name, text)
    return re.sub(r"\S*ipykernel_\d+[/\\]\d+\.py", "<cell>", text)


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Take out of the outputs what says nothing to a reader and differs from build to build."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        if "outputs" in cell:  # a stored control panel would look alive, and do nothing
            cell.outputs = [o for o in cell.outputs if WIDGET not in o.get("data", {})]
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = anonymous(output.text)
            elif output.output_type == "error":
                output.traceback = [anonymous(line) for line in output.traceback]
            elif "text/plain" in output.data:
                output.data["text/plain"] = anonymous(output.data["text/plain"])


def keep_changed(notebook: Path) -> None:
    """Copy a notebook that differs from the committed one: somebody may have worked in it."""
    command = ["git", "diff", "--quiet", "HEAD", "--", notebook.name]
    if not notebook.exists() or shutil.which("git") is None:
        return
    if subprocess.run(command, cwd=notebook.parent, capture_output=True).returncode == 1:
        folder = notebook.parent / ".before-build"
        folder.mkdir(exist_ok=True)
        copy = folder / f"{notebook.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb"
        shutil.copy2(notebook, copy)
        print(f"kept as it was in {copy.relative_to(notebook.parent)}; ", end="")


def take_outputs(notebook: nbformat.NotebookNode, stored: Path) -> None:
    """Fill in the outputs of the stored notebook; Broken if its code is not the very same."""
    if not stored.exists():
        raise Broken("there are no outputs to keep: build it without --prose")
    code = [
        [cell for cell in one.cells if cell.cell_type == "code"]
        for one in (nbformat.read(stored, as_version=4), notebook)
    ]
    sources = [[(cell.source, cell.metadata.get("tags")) for cell in cells] for cells in code]
    if sources[0] != sources[1]:
        raise Broken("its code has changed, too: build it without --prose")
    for old, new in zip(*code, strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count


def build(source: Path, prose: bool = False) -> None:
    """Source -> executed notebook, written in one piece, or not at all when something is wrong."""
    target = notebook_of(source)
    start = time.monotonic()
    notebook = convert(source)
    if prose:
        take_outputs(notebook, target)
    else:
        execute(notebook, target.parent)
        tidy(notebook)
    text = nbformat.writes(notebook).rstrip("\n") + "\n"
    if found := faults(notebook, len(text.encode())):
        raise Broken("; ".join(found))
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8", newline="\n")
        keep_changed(target)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    print(f"built in {time.monotonic() - start:.0f} s, {len(text) / 1000:.0f} kB")
    if source.parent.parent.name == "solutions":
        build_exercise(source)


def build_exercise(source: Path) -> None:
    """Write the exercise of a solution; one that somebody works in is kept beside it."""
    solution, target = convert(source), exercise_of(source)
    if found := exercises.faults(solution):
        raise Broken("; ".join(found))
    target.parent.mkdir(exist_ok=True)
    keep_changed(target)
    text = nbformat.writes(exercises.exercise(solution)).rstrip("\n") + "\n"
    target.write_text(text, encoding="utf-8", newline="\n")


def check_exercise(source: Path) -> list[str]:
    """Everything wrong with the exercise of a solution's text."""
    target = exercise_of(source)
    if not target.exists():
        return ["not built"]
    try:
        difference = exercises.drift(
            nbformat.read(target, as_version=4), exercises.exercise(convert(source))
        )
    except Exception as error:
        return [f"not a notebook ({type(error).__name__}: {error})"]
    return [difference] if difference else []


def check(source: Path) -> list[str]:
    """Everything wrong with the notebook of a text source."""
    target = notebook_of(source)
    if not target.exists():
        return ["not built"]
    try:
        stored = nbformat.read(target, as_version=4)
    except Exception as error:
        return [f"not a notebook ({type(error).__name__}: {error})"]
    try:
        difference = drift(stored, convert(source))
    except Broken as reason:
        return [str(reason)]
    return ([difference] if difference else []) + faults(stored, target.stat().st_size)


# ---- command line


def notebook_of(source: Path) -> Path:
    return source.parent.parent / f"{source.stem}.ipynb"


def exercise_of(source: Path) -> Path:
    return source.parents[2] / "exercises" / f"{source.stem}.ipynb"


def sources(root: Path, names: list[str]) -> list[Path]:
    """The text sources whose name starts with one of the names (all, if there is none)."""
    found = [path for tree in TREES for path in sorted((root / tree / "source").glob("*.py"))]
    for name in names:
        if not any(path.stem.startswith(name) for path in found):
            known = ", ".join(sorted({path.stem for path in found})) or "none"
            raise SystemExit(f"no text source starts with {name!r}; there are: {known}")
    return [p for p in found if not names or any(p.stem.startswith(name) for name in names)]


def build_all(root: Path, names: list[str], prose: bool = False) -> int:
    failed = 0
    for source in sources(root, names):
        print(f"{notebook_of(source).relative_to(root)}: ", end="", flush=True)
        try:
            build(source, prose)
        except Broken as reason:
            failed += 1
            print(f"NOT BUILT, {reason}", flush=True)
    return 1 if failed else 0


def check_all(root: Path) -> int:
    found = {}
    for source in sources(root, []):
        found[notebook_of(source)] = check(source)
        if source.parent.parent.name == "solutions":
            found[exercise_of(source)] = check_exercise(source)
    for tree in TREES:
        for orphan in sorted((root / tree).glob("*.ipynb")):
            found.setdefault(orphan, [f"has no text: write {tree}/source/{orphan.stem}.py"])
    for notebook, problems in found.items():
        for problem in problems:
            print(f"{notebook.relative_to(root)}: {problem}")
        if problems and not problems[0].startswith("has no text"):
            print(f"  mend: make notebook N={notebook.stem}")
    bad = sum(bool(problems) for problems in found.values())
    print(f"{len(found) - bad} of {len(found)} notebooks are in step with their text")
    return 1 if bad else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build or check the notebooks.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that holds the trees")
    commands = parser.add_subparsers(dest="command", required=True)
    option = commands.add_parser("build", help="convert, execute and store").add_argument
    option("names", nargs="*", metavar="NAME", help="the start of a lesson's name, such as 06")
    option("--prose", action="store_true", help="keep the outputs: only prose has changed")
    commands.add_parser("check", help="is every notebook in step with its text?")
    chosen = parser.parse_args(arguments)
    root = chosen.root.resolve()
    if chosen.command == "check":
        return check_all(root)
    return build_all(root, chosen.names, chosen.prose)


if __name__ == "__main__":
    sys.exit(main())
