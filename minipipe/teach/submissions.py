"""What students handed in: folders, zips and notebooks, of which only the answers are read.

An answer is a file that a task declares (`answers/task_06_1.py`) or, where there is none, a
notebook's cell with `%%task 6.1`. Nothing is unpacked, no link is followed, and no other file is
opened: a submission's tests and settings count for nothing.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import stat
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from minipipe.teach.course import Course, CourseError

MOST_ANSWER = 1_000_000  # bytes
MOST_NOTEBOOK = 20_000_000
MOST_ZIP = 200_000_000
MOST_FILES = 20_000  # that are looked at in one submission
_CELL = re.compile(r"\s*%%task[ \t]+(\d{1,2}\.\d{1,2})[ \t]*(?:#.*)?(?:\n|$)")
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


class Student(NamedTuple):
    """A line of the roster. submitted: seconds since 1970, or None where the file's time counts."""

    name: str
    email: str
    submitted: float | None


@dataclass
class Submission:
    """Answers by task; faults by task, where a file can't be an answer; notes for the reader."""

    folder: str
    path: Path
    name: str = ""
    email: str = ""
    submitted: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Entry(NamedTuple):
    """A file of a submission; fault: why it can't be read, or ""."""

    path: PurePosixPath
    time: float
    read: Callable[[int], bytes]
    fault: str = ""

    def text(self, most: int) -> str:
        """Its text; CourseError says what is wrong with it."""
        if self.fault:
            raise CourseError(f"{self.path} {self.fault}")
        try:
            content = self.read(most + 1)
        except _UNREADABLE as error:
            raise CourseError(f"{self.path} can't be read: {error}") from None
        if len(content) > most:
            raise CourseError(f"{self.path} is larger than {most / 1e6:g} MB")
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise CourseError(f"{self.path} is not UTF-8 text") from None
        if not text.strip():
            raise CourseError(f"{self.path} is empty")
        return text


def read_roster(path: Path) -> dict[str, Student]:
    """Folder -> student, from a CSV with the columns folder, name, and perhaps email, submitted."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CourseError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise CourseError(f'{path} is not UTF-8 text: save it as "CSV UTF-8"') from None
    head = text.partition("\n")[0]
    delimiter = next((each for each in ";\t" if each in head), ",")
    rows = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    columns = [(name or "").strip().lower() for name in rows.fieldnames or ()]
    rows.fieldnames = columns
    if not {"folder", "name"} <= {*columns}:
        raise CourseError(f"{path}, line 1: the columns folder and name are asked for, and perhaps "
                          f"email and submitted; there are {', '.join(columns) or 'none'}")
    students: dict[str, Student] = {}
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        values = {k: roster_key(v or "") for k, v in row.items() if isinstance(k, str)}
        if not any(values.values()):
            continue
        for needed in ("folder", "name"):
            if not values[needed]:
                raise CourseError(f"{where}: no {needed}")
        if values["folder"] in students:
            raise CourseError(f"{where}: the folder {values['folder']!r} stands there twice")
        students[values["folder"]] = Student(values["name"], values.get("email", ""),
                                             _time(values.get("submitted", ""), where))  # fmt: skip
    emails = {student.name: set() for student in students.values()}
    for student in students.values():
        emails[student.name].add(student.email)
    return {folder: s._replace(name=f"{s.name} ({s.email})") if len(emails[s.name]) > 1 else s
            for folder, s in students.items()}  # fmt: skip


def roster_key(text: str) -> str:
    """A folder's name as the roster's: macOS takes accents apart, and a table drops blanks."""
    return unicodedata.normalize("NFC", text).strip()


def _time(text: str, where: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        raise CourseError(f"{where}: submitted is a time such as 2026-11-29T18:00, not "
                          f"{text!r}") from None  # fmt: skip


def expand(paths: Iterable[Path], roster: dict[str, Student], out: Path) -> list[Path]:
    """The submissions in `paths`: each is one itself, or a folder of folders and zips."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise CourseError(f"there is no {path}")
        target, whole = out.resolve(), path.resolve()
        if whole == target:
            raise CourseError(f"--out {out} is what is to be graded: name another folder")
        for each in _expand(whole, roster):
            if each != whole and each in target.parents:
                raise CourseError(f"--out {out} lies in {each.name}, which would be graded as a "
                                  "submission: name another folder")  # fmt: skip
            if each != target:
                found[each] = None
    if not found:
        raise CourseError("no submissions there")
    return [*found]


def _expand(path: Path, roster: dict[str, Student]) -> list[Path]:
    if not path.is_dir() or roster_key(path.name) in roster or _holds_answers(path):
        return [path]
    inside = sorted(each for each in path.iterdir() if not _is_hidden(each.name) and (
        each.suffix.lower() == ".zip" or (each.is_dir() and not each.is_symlink())))  # fmt: skip
    notebooks = any(path.glob("*.ipynb")) and not any(map(_is_submission, inside))
    alone = len(inside) == 1 and inside[0].is_dir() and roster_key(inside[0].name) not in roster
    return [path] if notebooks or alone or not inside else inside


def _holds_answers(folder: Path) -> bool:
    return (folder / "answers").exists() or (folder / "lessons").exists() or (
        any(folder.glob("task_*.py")))  # fmt: skip


def _is_submission(path: Path) -> bool:
    return not path.is_dir() or _holds_answers(path) or any(path.glob("*.ipynb"))


def read(path: Path, course: Course, roster: dict[str, Student]) -> Submission:
    """What one submission answers; never raises for anything that is in it."""
    whole = path.is_dir() or roster_key(path.name) in roster
    folder = path.name if whole else path.stem
    submission = Submission(folder, path, name=folder)
    entries: list[_Entry] = []
    try:
        for entry in _folder(path) if path.is_dir() else _file(path):
            if len(entries) == MOST_FILES:
                submission.notes.append(f"only its first {MOST_FILES} files were looked at")
                break
            if not any(_is_hidden(part) for part in entry.path.parts):
                entries.append(entry)
    except _UNREADABLE as error:
        submission.notes.append(f"{path.name} can't be read: {error}")
    entries.sort(key=lambda e: (len(e.path.parts), str(e.path)))
    _take_files(submission, course, entries)
    _take_cells(submission, course, [e for e in entries if e.path.suffix == ".ipynb"])
    student = roster.get(roster_key(folder))
    if student:
        submission.name, submission.email = student.name, student.email
    newest = max((e.time for e in entries), default=path.lstat().st_mtime)
    given = student and student.submitted
    submission.submitted = newest if given is None else given
    return submission


def _is_hidden(name: str) -> bool:
    """.git, .venv, __MACOSX, and the like."""
    return name.startswith((".", "__")) and name != ".."


def _folder(root: Path) -> Iterator[_Entry]:
    for directory, folders, files in os.walk(root):  # follows no links
        folders[:] = sorted((f for f in folders if not _is_hidden(f)),
                            key=lambda folder: (folder != "answers", folder))  # fmt: skip
        for name in sorted([*folders, *files]):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            is_answer = path.suffix in (".py", ".ipynb")
            if stat.S_ISDIR(mode) and not is_answer:
                continue
            kinds = {stat.S_IFREG: "", stat.S_IFDIR: "is a folder, not a file",
                     stat.S_IFLNK: "is a link, and links are not followed"}  # fmt: skip
            fault = kinds.get(stat.S_IFMT(mode), "is no plain file")
            relative = PurePosixPath(path.relative_to(root).as_posix())
            yield _Entry(relative, path.lstat().st_mtime, _reader(path), fault)


def _reader(path: Path) -> Callable[[int], bytes]:
    def read(most: int) -> bytes:
        with open(path, "rb") as file:
            return file.read(most)

    return read


def _file(path: Path) -> Iterator[_Entry]:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise CourseError("it is no plain file")
    if path.suffix in (".py", ".ipynb"):
        yield _Entry(PurePosixPath(path.name), path.stat().st_mtime, _reader(path))
        return
    if path.stat().st_size > MOST_ZIP:
        raise CourseError(f"it is larger than {MOST_ZIP / 1e6:g} MB")
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = PurePosixPath(info.filename.replace("\\", "/"))
            if info.is_dir() and name.suffix not in (".py", ".ipynb"):
                continue
            kind = stat.S_IFMT(info.external_attr >> 16)
            fault = "is a folder, not a file" if info.is_dir() else (
                "is encrypted" if info.flag_bits & 1 else
                "is no plain file" if kind not in (0, stat.S_IFREG) else
                "lies outside of the zip" if ".." in name.parts or name.is_absolute() else "")
            yield _Entry(name, _zip_time(info), _zip_reader(path, info), fault)


def _zip_time(info: zipfile.ZipInfo) -> float:
    try:
        return datetime(*info.date_time).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _zip_reader(path: Path, info: zipfile.ZipInfo) -> Callable[[int], bytes]:
    def read(most: int) -> bytes:
        with zipfile.ZipFile(path) as archive, archive.open(info) as file:
            return file.read(most)

    return read


def _take_files(submission: Submission, course: Course, entries: list[_Entry]) -> None:
    """Of files with an answer's name the highest counts, and one in `answers` before others."""
    for task in course.tasks.values():
        places = [(len(e.path.parts) - (e.path.parent.name == "answers"),
                   e.path.parent.name != "answers", e) for e in entries
                  if e.path.name == task.file_name]  # fmt: skip
        if places:
            entry = min(places, key=lambda place: place[:2])[2]
            try:
                submission.answers[task.id] = entry.text(MOST_ANSWER)
            except CourseError as fault:
                submission.faults[task.id] = str(fault)


def _take_cells(submission: Submission, course: Course, notebooks: list[_Entry]) -> None:
    """Cells of notebooks for tasks without a file; of two for one task the last counts."""
    cells: dict[str, list[tuple[str, str]]] = {}
    for notebook in notebooks:
        try:
            for id, text in _cells(notebook.text(MOST_NOTEBOOK)):
                cells.setdefault(id, []).append((str(notebook.path), text))
        except (CourseError, *_UNREADABLE, RecursionError) as error:
            why = str(error) if isinstance(error, CourseError) else f"{notebook.path} is damaged"
            submission.notes.append(f"{why}; its cells were not read")
    for id in [id for id in cells if id in course.tasks]:
        if id in submission.answers or id in submission.faults:
            continue
        name, text = cells[id][-1]
        if len(cells[id]) > 1:
            submission.notes.append(f"{len(cells[id])} cells are for task {id}: the last one "
                                    f"counts, in {name}")  # fmt: skip
        if text.strip() and len(text) <= MOST_ANSWER:
            submission.answers[id] = text
        else:
            submission.faults[id] = f"the cell in {name} is {'too long' if text else 'empty'}"


def _cells(text: str) -> Iterator[tuple[str, str]]:
    """Task and text of each %%task cell of a notebook, as the magic would save it."""
    content = json.loads(text)
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise ValueError("no cells")
    for cell in cells:
        source = cell.get("source", "") if isinstance(cell, dict) else ""
        if isinstance(source, list):
            source = "".join(line for line in source if isinstance(line, str))
        if isinstance(source, str) and cell.get("cell_type", "code") == "code":
            match = _CELL.match(source)
            if match:
                yield match[1], source[match.end() :].rstrip() + "\n"
