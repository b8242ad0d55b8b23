"""What students handed in: files, folders, zips → one `Submission` a student. Nothing is run.

A file is one student; in a folder or zip, each entry is one: a file, or a folder with all that is
in it. Zips are read in place: nothing is unpacked, so no path can climb out.
"""

import hashlib
import json
import re
import stat
import tokenize
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from . import source

MOST_BYTES = 100 << 20  # of a file; notebooks carry pictures
MOST_RATIO = 200  # unpacked to packed, of a large file in a zip
MOST_FILES = 20_000
_SKIP = re.compile(r"(^|/)(\.|__MACOSX|__pycache__)")


class Bad(ValueError):
    """A file that cannot be graded; the message says why, in one line."""


@dataclass(frozen=True)
class File:
    """One file, read when it is its turn."""

    name: str
    read: Callable[[], bytes]


@dataclass
class Submission:
    """The files of one student, and what there is to say about them."""

    student: str
    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Work:
    """The code of a submission: cells by file, and notes; `digest` tells two submissions apart."""

    cells: dict[str, list[source.Cell]]
    notes: list[str]
    digest: str


def find(paths: list[Path], one_each: bool = False) -> list[Submission]:
    """Return the submissions below `paths`, by name; with `one_each` every path is one student.

    Raises ValueError, in one line, for a path that does not exist or a zip that is none.
    """
    found: dict[str, Submission] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path} does not exist.")
        alone = Submission(path.stem if path.is_file() else path.resolve().name)
        whole = path.is_dir() or path.suffix.lower() == ".zip"
        try:
            files = list(_files(path, alone.notes))
        except Bad as error:
            raise ValueError(f"{path}: {error}") from None
        if one_each or not whole:
            alone.files = [file for _, file in files]
            if not whole and not files:
                alone.notes.append(f"{path.name} is no .ipynb, .py or .zip file")
            _add(found, alone)
            continue
        for part in _entries(files, _folders(path), unwrap=path.is_file()):
            part.notes += alone.notes
            _add(found, part)
    return [found[name] for name in sorted(found)]


def _add(found, submission):
    name, number = re.sub(r"[^\w.@+-]+", "_", submission.student).strip(".") or "unnamed", 1
    name = name[:100]
    while (unique := name if number == 1 else f"{name}-{number}") in found:
        number += 1
    submission.student = unique
    found[unique] = submission


def _entries(files, folders, unwrap=False) -> Iterator[Submission]:
    by_entry = {name: [] for name in folders}
    for name, file in files:
        by_entry.setdefault(name.partition("/")[0], []).append((name, file))
    if unwrap and len(by_entry) == 1 and all("/" in name for name, _ in files):
        files = [(name.partition("/")[2], file) for name, file in files]  # a zipped folder
        yield from _entries(files, ())
        return
    for entry, inside in by_entry.items():
        student = entry if any("/" in name for name, _ in inside) or not inside else _stem(entry)
        yield Submission(student, [file for _, file in inside])


def _stem(name: str) -> str:
    return re.sub(r"\.(ipynb|py|zip)$", "", name, flags=re.IGNORECASE)


def _folders(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(p.name for p in path.iterdir() if _is_folder(p))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not _SKIP.search(path.name)


def _files(path: Path, notes: list[str]) -> Iterator[tuple[str, File]]:
    """Yield (name within path, file) for all code in a file, folder or zip, sorted."""
    if path.is_file():
        yield from _from(path.name, path.stat().st_size, path.read_bytes, notes, top=True)
        return
    for number, inner in enumerate(sorted(path.rglob("*"))):
        name = inner.relative_to(path).as_posix()
        if number > MOST_FILES:
            notes.append(f"more than {MOST_FILES} files: the rest was left out")
            return
        links = [p for p in (inner, *inner.parents) if p != path and path in p.parents]
        if _SKIP.search(name) or any(p.is_symlink() for p in links) or not inner.is_file():
            continue
        try:
            yield from _from(name, inner.stat().st_size, inner.read_bytes, notes)
        except Bad as error:
            yield name, File(name, _raise(error))


def _from(name: str, size: int, read, notes, top=False) -> Iterator[tuple[str, File]]:
    suffix = Path(name).suffix.lower()
    if suffix == ".zip":
        inside = "" if top else _stem(name)
        for inner, file in _zip(name, size, read, notes):
            yield f"{inside}/{inner}".lstrip("/"), file
    elif suffix in (".ipynb", ".py"):
        if size > MOST_BYTES:
            read = _raise(Bad(f"{name} is larger than {MOST_BYTES >> 20} MB"))
        yield name, File(name, read)


def _raise(error):
    def read():
        raise error

    return read


def _zip(name: str, size: int, read, notes) -> Iterator[tuple[str, File]]:
    if size > 5 * MOST_BYTES:
        raise Bad(f"{name} is larger than {5 * MOST_BYTES >> 20} MB")
    try:
        archive = zipfile.ZipFile(BytesIO(read()))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError):
        raise Bad(f"{name} is no zip file, or a broken one") from None
    members = sorted(archive.infolist(), key=lambda member: member.filename)
    if len(members) > MOST_FILES:
        raise Bad(f"{name} holds more than {MOST_FILES} files")
    for member in members:
        inner = member.filename.replace("\\", "/")
        if inner.startswith("/") or ".." in inner.split("/") or ":" in inner.split("/")[0]:
            notes.append(f"{name}: the path {inner!r} climbs out of the zip; left out")
        elif member.is_dir() or _SKIP.search(inner) or stat.S_ISLNK(member.external_attr >> 16):
            continue
        elif Path(inner).suffix.lower() in (".ipynb", ".py"):
            yield inner, File(inner, _member(archive, member))


def _member(archive, member):
    def read() -> bytes:
        inner = member.filename
        if member.file_size > max(1 << 20, MOST_RATIO * member.compress_size):
            raise Bad(f"{inner} unpacks to {member.file_size >> 20} MB: a zip bomb?")
        try:
            with archive.open(member) as stream:
                told = stream.read(MOST_BYTES + 1)  # the size in the zip may be a lie
        except Exception as error:  # of zipfile (encrypted, say) and of each packer
            raise Bad(f"{inner} cannot be unpacked ({type(error).__name__})") from None
        if len(told) > MOST_BYTES:
            raise Bad(f"{inner} unpacks to more than {MOST_BYTES >> 20} MB")
        return told

    return read


def read(submission: Submission) -> Work:
    """Read the code of a submission; what cannot be read becomes a note, never an error."""
    notes, cells, digest = list(submission.notes), {}, hashlib.sha256()
    if not submission.files and not notes:
        notes.append("nothing to grade: there is no .ipynb or .py file")
    for file in submission.files:
        try:
            told = file.read()
            digest.update(file.name.encode("utf-8", "replace") + b"\0" + told)
            cells[file.name] = _code(file.name, told, notes)
        except (Bad, OSError) as error:
            notes.append(str(error))
            digest.update(str(error).encode("utf-8", "replace"))
    return Work(cells, notes, digest.hexdigest())


def _code(name: str, told: bytes, notes: list[str]) -> list[source.Cell]:
    if not told.strip():
        raise Bad(f"{name} is empty")
    raw = _notebook(name, told) if name.lower().endswith(".ipynb") else [(name, _text(name, told))]
    if sum(len(text) for _, text in raw) > source.MOST_CHARACTERS:
        raise Bad(f"{name} has more than {source.MOST_CHARACTERS} characters of code")
    cells = []
    for place, text in raw:
        tree, kept, note = source.parse(place, text)
        if tree is None:
            notes.append(f"{name}, {note}" if place != name else note)
        else:
            cells.append((place, kept))
    return cells


def _text(name: str, told: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(told).readline)
        return told.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        raise Bad(f"{name} is no text that Python can read") from None


def _notebook(name: str, told: bytes) -> list[source.Cell]:
    """Return (place, source) of each code cell; raise Bad for anything that is no notebook."""
    try:
        notebook = json.loads(told)
    except RecursionError:
        raise Bad(f"{name} is no notebook: nested too deeply") from None
    except ValueError as error:
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise Bad(f"{name} is no notebook: broken JSON{line}") from None
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise Bad(f"{name} is no notebook: it has no list of cells")
    found = []
    for number, cell in enumerate(cells, 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            text = cell.get("source", "")
            if isinstance(text, list):
                text = "".join(part for part in text if isinstance(part, str))
            if isinstance(text, str):
                found.append((f"cell {number}", text))
    return found
