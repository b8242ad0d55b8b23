"""Reading what students hand in: as text, with one clear line for what cannot be graded."""

import gc
import json
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddp_course.grading import source, submission

CODE = "def f(x):\n    return x\n"


def notebook(*cells) -> str:
    return json.dumps(
        {
            "cells": [
                {"cell_type": "code", "source": text.splitlines(True), "outputs": []}
                for text in cells
            ],
            "nbformat": 4,
        }
    )


def only(path):
    (found,) = submission.find([path])
    return submission.read(found)


def needed(*cells, function="f") -> str:
    work = [(f"cell {i}", source.parse("cell", text)[1]) for i, text in enumerate(cells, 1)]
    return "\n".join(text.strip() for _, text in source.needed(work, function))


def test_a_file_is_one_student_and_so_is_each_entry_of_a_folder(tmp_path):
    folder = tmp_path / "class"
    (folder / "ann" / "deep").mkdir(parents=True)
    (folder / "nothing").mkdir()
    (folder / ".hidden").mkdir()
    for name in ("ann/deep/a.py", "ann/b.py", "bob.py", "ann/notes.txt", ".hidden/c.py"):
        (folder / name).write_text(CODE)
    (folder / "link.py").symlink_to(folder / "bob.py")
    (folder / "zoe").symlink_to(folder / "ann")
    found = {one.student: [f.name for f in one.files] for one in submission.find([folder])}
    assert found == {"ann": ["ann/b.py", "ann/deep/a.py"], "bob": ["bob.py"], "nothing": []}
    twice = submission.find([folder / "bob.py", folder / "bob.py"])
    assert [one.student for one in twice] == ["bob", "bob-2"]
    (whole,) = submission.find([folder], one_each=True)
    assert whole.student == "class" and len(whole.files) == 3


@pytest.mark.parametrize("wrapper", ["", "class/"])
def test_a_zip_is_read_like_a_folder(tmp_path, wrapper):
    file = tmp_path / "class.zip"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("ann/a.ipynb", "ann/b.py", "bob.py", "__MACOSX/._bob.py"):
            archive.writestr(wrapper + name, CODE)
    found = {one.student: len(one.files) for one in submission.find([file])}
    assert found == {"ann": 2, "bob": 1}


def test_a_zip_in_a_folder_is_one_student(tmp_path):
    with zipfile.ZipFile(tmp_path / "ann_12.zip", "w") as archive:
        archive.writestr("work/a.py", CODE)
        archive.writestr("b.py", CODE)
    (found,) = submission.find([tmp_path])
    assert found.student == "ann_12" and len(submission.read(found).cells) == 2


def test_paths_that_climb_out_and_links_in_a_zip_are_left_out(tmp_path):
    file = tmp_path / "evil.zip"
    link = zipfile.ZipInfo("link.py")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("../../evil.py", "/etc/evil.py", "ok.py", "C:\\evil.py"):
            archive.writestr(name, CODE)
        archive.writestr(link, "/etc/passwd")
    (found,) = submission.find([file])
    assert [f.name for f in found.files] == ["ok.py"]
    assert sum("climbs out" in note for note in found.notes) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evil.zip"]


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    file = tmp_path / "bomb.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.py", b"#" * (50 << 20))
    assert "zip bomb" in only(file).notes[0]


BAD = {
    "empty.py": (b"", "empty.py is empty"),
    "empty.ipynb": (b"\n ", "empty.ipynb is empty"),
    "json.ipynb": (b'{"cells": [', "is no notebook: broken JSON (line 1)"),
    "list.ipynb": (b"[1, 2]", "is no notebook: it has no list of cells"),
    "deep.ipynb": (b"[" * 100_000 + b"]" * 100_000, "is no notebook: "),
    "image.py": (b"\x89PNG\xff\xfe\x00", "is no text that Python can read"),
    "nul.py": (b"x = 1\x00", "is left out"),
    "syntax.py": (b"x = 1\ndef f(:\n", "syntax.py, line 2: syntax error"),
    "nested.py": (b"x = " + b"(" * 5000 + b")" * 5000, "is left out"),
    "class.zip": (b"no zip", ""),
}


@pytest.mark.parametrize("name", [name for name in BAD if not name.endswith("zip")])
def test_bad_files_become_one_clear_note(tmp_path, name):
    content, told = BAD[name]
    (tmp_path / name).write_bytes(content)
    work = only(tmp_path / name)
    assert len(work.notes) == 1 and told in work.notes[0] and "\n" not in work.notes[0]


def test_a_broken_zip_is_an_error_if_asked_for_and_a_note_among_others(tmp_path):
    (tmp_path / "ann.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="is no zip file"):
        submission.find([tmp_path / "ann.zip"])
    (found,) = submission.find([tmp_path])
    assert found.student == "ann" and "is no zip file" in submission.read(found).notes[0]


def test_a_path_that_does_not_exist_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        submission.find([tmp_path / "nowhere"])


def test_fifty_megabytes_of_outputs_are_read(tmp_path):
    big = json.loads(notebook(CODE))
    big["cells"][0]["outputs"] = [{"text": "x" * (50 << 20)}]
    (tmp_path / "big.ipynb").write_text(json.dumps(big))
    work = only(tmp_path / "big.ipynb")
    assert work.notes == [] and work.cells["big.ipynb"] == [("cell 1", CODE)]


def test_a_cell_with_a_syntax_error_costs_only_itself(tmp_path):
    (tmp_path / "a.ipynb").write_text(notebook("def g(:\n", CODE))
    work = only(tmp_path / "a.ipynb")
    assert [place for place, _ in work.cells["a.ipynb"]] == ["cell 2"]
    assert "cell 1, line 1: syntax error" in work.notes[0]


def test_lines_for_ipython_are_left_out():
    text = "%matplotlib inline\n!pip install x\nfiles = !ls\nf?\nif 1:\n    %time 1\n" + CODE
    assert needed(text) == CODE.strip()
    assert needed("%%time\n" + CODE) == CODE.strip()
    assert needed("%%bash\nls |\n", CODE) == CODE.strip()
    assert "% (1, 2)" in needed("s = ('%d %d'\n% (1, 2))\ndef f(x):\n    return s\n")


def test_only_what_the_function_needs_is_kept():
    cells = (
        "import torch, os\nimport json\nfrom math import *\nK = 3\nunused = train()",
        "@wraps\ndef helper(x):\n    return torch.ones(K) * x",
        "from functools import wraps\nf(1)\nplot()\nfor i in range(9): f(i)",
        "def f(x):\n    return helper(x)\nreport = check('07', f)",
    )
    kept = needed(*cells)
    for part in ("import torch, os", "from math", "K = 3", "@wraps", "import wraps", "def f"):
        assert part in kept
    for part in ("json", "train", "plot", "range", "check"):
        assert part not in kept


def test_all_definitions_are_kept_in_order_so_that_the_last_wins():
    kept = needed("def f(x):\n    return 1", "f = f or None", "def f(x):\n    return 2")
    scope = {}
    exec(kept, scope)
    assert scope["f"](0) == 2 and kept.count("def f") == 2


def test_imports_that_may_fail_are_kept_whole():
    text = "try:\n    import a as m\nexcept ImportError:\n    m = None\ndef f(x):\n    return m"
    assert needed(text).startswith("try:")
    assert "main" not in needed("if __name__ == '__main__':\n    f(1)\n" + CODE)


def test_line_numbers_and_statements_on_one_line_are_kept():
    text = "x = 1; y = 2; z = 'ü'; w = 4\n\n@d\ndef f():\n    return y + w\ndef d(g): return g\n"
    kept = source.needed([("cell 1", text)], "f")
    assert [part.strip() for _, part in kept][:2] == ["y = 2", "w = 4"]
    assert kept[2][1] == "\n\n@d\ndef f():\n    return y + w"


def test_threads_parse_one_after_the_other():
    # Python 3.11 fails in one of two threads that parse, when the other comes in between: here it
    # does so each time the garbage collector looks.
    text = "def f(x):\n    return [x + 1, (x, [x])]\n" * 200

    def other_threads(*_):
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(other_threads)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(source.functions, [[("a", text)]] * 12))
    finally:
        gc.callbacks.remove(other_threads)
        gc.set_threshold(*before)
    assert found == [["f"]] * 12
