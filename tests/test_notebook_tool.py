"""tools/notebooks.py: text → executed notebook, and the check that keeps the two together."""

import contextlib
import io
import json
import shutil
import subprocess
import sys

import pytest

import notebooks

LESSON = """\
# %% [markdown]
# # A lesson

# %%
import sys
print(sys.executable)

# %% tags=["nbval-ignore-output"]
import os
print(os.path.basename(os.getcwd()))

# %% tags=["raises-exception"]
1 / 0

# %%
from IPython.display import Image, display
display(Image(b"\\x89PNG", format="png"), metadata={"image/png": {"alt": "a dot"}})
"""


def tool(root, *arguments):
    """Exit code and output of the command line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = notebooks.main(["--root", str(root), *arguments])
    return code, printed.getvalue()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A tree with one lesson, built once; read-only."""
    root = tmp_path_factory.mktemp("course")
    write(root, LESSON)
    elsewhere = root / "jupyter" / "kernels" / "python3"
    elsewhere.mkdir(parents=True)
    spec = {"argv": ["/nowhere/python", "{connection_file}"], "display_name": "x", "language": "x"}
    (elsewhere / "kernel.json").write_text(json.dumps(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(root / "jupyter"))  # another Python's kernel, found first
        code, output = tool(root, "build")
    assert code == 0, output
    return root


@pytest.fixture
def course(built, tmp_path):
    """A copy of the built tree to spoil."""
    write(tmp_path, LESSON)
    shutil.copy(built / "notebooks" / "00_a.ipynb", tmp_path / "notebooks")
    return tmp_path


def write(root, text, name="00_a", tree="notebooks"):
    (root / tree / "source").mkdir(parents=True, exist_ok=True)
    (root / tree / "source" / f"{name}.py").write_text(text)


def load(root):
    return json.loads((root / "notebooks" / "00_a.ipynb").read_text())


def spoil(root, change):
    """Apply `change` to the stored notebook, as a hand edit would."""
    notebook = load(root)
    change(notebook["cells"])
    (root / "notebooks" / "00_a.ipynb").write_text(json.dumps(notebook))


def test_cells_run_here_with_this_python_and_keep_their_tags(built):
    markdown, python, folder, error, image = load(built)["cells"]
    assert markdown["source"] == ["# A lesson"]
    assert python["outputs"][0]["text"] == [notebooks.anonymous(sys.executable) + "\n"]
    assert folder["outputs"][0]["text"] == ["notebooks\n"]
    assert folder["metadata"] == {"tags": ["nbval-ignore-output"]}
    assert error["outputs"][0]["ename"] == "ZeroDivisionError"
    assert image["outputs"][0]["metadata"]["image/png"]["alt"] == "a dot"
    assert load(built)["metadata"]["kernelspec"]["name"] == "python3"


def test_building_again_gives_the_same_bytes(course):
    path = course / "notebooks" / "00_a.ipynb"
    before = path.read_bytes()
    path.unlink()
    assert tool(course, "build", "00")[0] == 0
    assert path.read_bytes() == before and before.endswith(b"}\n")


def test_an_edit_changes_the_ids_of_no_other_cell(tmp_path):
    source = tmp_path / "x.py"
    source.write_text("# %%\na = 1\n\n# %%\nb = 1\n\n# %%\nb = 1\n")
    before = [cell.id for cell in notebooks.convert(source).cells]
    source.write_text("# %%\na = 2\n\n# %%\nb = 1\n\n# %%\nb = 1\n")
    after = [cell.id for cell in notebooks.convert(source).cells]
    assert len(set(before)) == 3
    assert before[0] != after[0] and before[1:] == after[1:]


def test_check_passes_on_what_was_built(built):
    code, output = tool(built, "check")
    assert (code, output) == (0, "1 of 1 notebooks are in step with their text\n")


def test_check_names_the_first_cell_that_differs_and_what_mends_it(course):
    write(course, LESSON.replace("os.getcwd()", "os.getcwd( )"))
    code, output = tool(course, "check")
    assert code == 1
    assert "notebooks/00_a.ipynb: cell 3 differs" in output
    assert "os.getcwd( )" in output and "make notebook N=00_a" in output


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LESSON + "\n# %%\nx = 1\n", "cell 6 differs: only the text has it"),
        (LESSON.replace(' tags=["nbval-ignore-output"]', ""), "cell 3 differs: tags"),
        (LESSON.replace("# %% [markdown]\n# # A lesson", "# %%\nprint()"), "cell 1 differs"),
    ],
)
def test_check_sees_drift_in_the_text(course, text, complaint):
    write(course, text)
    code, output = tool(course, "check")
    assert code == 1 and complaint in output


def _not_executed(cells):
    cells[2].update(execution_count=None, outputs=[])


def _run_out_of_order(cells):
    cells[1]["execution_count"], cells[2]["execution_count"] = 2, 1


def _nothing_raised(cells):
    cells[3]["outputs"] = []


def _error_stored(cells):
    cells[2]["outputs"] = cells[3]["outputs"]


def _no_alternative_text(cells):
    cells[4]["outputs"][0]["metadata"] = {}


def _too_big(cells):
    cells[4]["outputs"][0]["data"]["image/png"] = "A" * 1_000_000


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_not_executed, "cell 3: not executed"),
        (_run_out_of_order, "cell 2: not executed, top to bottom"),
        (_nothing_raised, "cell 4: tagged raises-exception, but nothing was raised"),
        (_error_stored, "cell 3: error in its output: ZeroDivisionError"),
        (_no_alternative_text, "cell 5: image/png without alternative text"),
        (_too_big, "MB is too big"),
    ],
)
def test_check_sees_a_spoilt_notebook(course, change, complaint):
    spoil(course, change)
    code, output = tool(course, "check")
    assert code == 1 and complaint in output


def test_check_sees_what_has_no_partner(course):
    write(course, LESSON, name="01_b", tree="solutions")
    (course / "notebooks" / "99_old.ipynb").write_text("{}")
    code, output = tool(course, "check")
    assert code == 1
    assert "solutions/01_b.ipynb: not built" in output
    assert "notebooks/99_old.ipynb: has no text" in output


def test_prose_alone_is_built_without_running_anything(course):
    stored = load(course)
    write(course, LESSON.replace("# # A lesson", "# # A better lesson"))
    assert tool(course, "build", "--prose")[0] == 0
    again = load(course)
    assert "A better lesson" in again["cells"][0]["source"][0]
    assert again["cells"][1:] == stored["cells"][1:]
    assert tool(course, "check")[0] == 0
    write(course, LESSON.replace("1 / 0", "2 / 0"))
    code, output = tool(course, "build", "--prose")
    assert code == 1 and "its code has changed, too" in output


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("# %%\nx = 1\n\n# %%\nprint(x)\nx / 0\n", ["cell 2 failed", "x / 0", "ZeroDivisionError"]),
        ('# %% tags=["raises-exception"]\nx = 1\n', ["cell 1", "nothing was raised"]),
        ("# %%\nimport os\nos._exit(3)\n", ["cell 1 killed its kernel", "os._exit(3)"]),
    ],
)
def test_a_failed_build_says_where_and_leaves_the_notebook_alone(course, text, complaints):
    before = (course / "notebooks" / "00_a.ipynb").read_bytes()
    write(course, text)
    code, output = tool(course, "build")
    assert code == 1
    assert all(complaint in output for complaint in complaints), output
    assert (course / "notebooks" / "00_a.ipynb").read_bytes() == before
    assert [path.name for path in (course / "notebooks").glob("*.ipynb*")] == ["00_a.ipynb"]


def test_a_name_that_fits_nothing_is_one_line(course):
    with pytest.raises(SystemExit, match="no text source starts with '77'; there are: 00_a"):
        tool(course, "build", "77")


def test_a_notebook_that_somebody_worked_in_is_kept_when_it_is_built_anew(tmp_path):
    tool = [sys.executable, notebooks.__file__, "--root", str(tmp_path), "build"]
    source = tmp_path / "notebooks" / "source" / "00_x.py"
    source.parent.mkdir(parents=True)
    source.write_text("# %%\nprint(1)\n")
    subprocess.run(tool, check=True)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    notebook = tmp_path / "notebooks" / "00_x.ipynb"
    mine = notebook.read_text().replace("print(1)", "print('my own work')")
    notebook.write_text(mine)
    subprocess.run(tool, check=True)
    (kept,) = (tmp_path / "notebooks" / ".before-build").iterdir()
    assert kept.read_text() == mine and "my own work" not in notebook.read_text()
