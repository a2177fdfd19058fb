"""Notebooks from the lessons' sources: built byte for byte the same, run, and their pictures kept.

    lessons/06_….ipynb           for students, committed, without outputs
    lessons/vi/01_….ipynb        with another language's prose, from lessons/src/vi/01_….md
    lessons/figures/….png        figures of cells with picture="…", from the solutions
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat

from minipipe.teach import sources
from minipipe.teach.course import Course, CourseError, Lesson, read_toml
from minipipe.teach.sources import Cell

WORDS = {"lesson": "Lesson", "minutes": "{n} minutes", "builds_on": "builds on lesson {n}",
         "colab": "Open in Colab", "untried": "written for Colab, not run there",
         "setup": "On Colab this fetches the course; elsewhere it is there already."}  # fmt: skip
_SETUP = """\
# {setup}
import sys

if "google.colab" in sys.modules:
    !git clone -q --depth 1 -b {branch} {repository} course
    %cd -q course
    %pip install -q -e .
%load_ext minipipe.teach"""
_CELL = re.compile(r"^<!-- cell: ([A-Za-z0-9-]+) -->[ \t]*\n", re.M)


def prose(path: Path) -> dict[str, str]:
    """Another language's prose by cell id: a text after each `<!-- cell: question -->`."""
    parts = _CELL.split(path.read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], (text.strip("\n") for text in parts[2::2]), strict=True))


def languages(course: Course) -> list[str]:
    """The languages that have prose, such as ["vi"]."""
    return sorted(path.parent.name for path in course.sources.glob("*/words.toml"))


def build(course: Course, lesson: Lesson, *, solved: bool = False,
          language: str = "") -> nbformat.NotebookNode:  # fmt: skip
    """A lesson's notebook: for the student, or with the solutions."""
    path = sources.source_file(course, lesson)
    cells = sources.read_cells(path)
    words, texts, title = WORDS, {}, lesson.title
    if language:
        words = WORDS | read_toml(course.sources / language / "words.toml")
        texts = prose(course.sources / language / f"{path.stem}.md")
        title = texts.pop("title", title)
        known = {cell.name for cell in cells if cell.kind == "markdown"}
        if known != texts.keys():
            raise CourseError(f"{language}/{path.stem}.md: cells without prose: "
                              f"{sorted(known - texts.keys())}, prose without cells: "
                              f"{sorted(texts.keys() - known)}")  # fmt: skip
    made = [_head(course, lesson, path.stem, title, words, language),
            _code("setup", _SETUP.format(setup=words["setup"], **_place(course)))]  # fmt: skip
    for cell in cells:
        made.append(_cell(cell, texts.get(cell.name, cell.text), solved, language))
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
              "language_info": {"name": "python"}}  # fmt: skip
    return nbformat.v4.new_notebook(cells=made, metadata=kernel)


def _place(course: Course) -> dict[str, str]:
    return {"repository": course.settings["repository"], "branch": course.settings["branch"]}


def _head(course: Course, lesson: Lesson, stem: str, title: str, words: dict[str, str],
          language: str) -> nbformat.NotebookNode:  # fmt: skip
    place, folder = _place(course), f"{language}/" if language else ""
    link = place["repository"].replace("https://github.com/", "https://colab.research.google.com/"
                                       "github/") + f"/blob/{place['branch']}/lessons/{folder}"
    said = [words["minutes"].format(n=lesson.minutes)]
    if lesson.builds_on:
        said.append(words["builds_on"].format(n=", ".join(map(str, lesson.builds_on))))
    said.append(f"[{words['colab']}]({link}{stem}.ipynb) ({words['untried']})")
    text = f"# {words['lesson']} {lesson.number} · {title}\n\n{' · '.join(said)}"
    return _markdown("head", text)


def _cell(cell: Cell, text: str, solved: bool, language: str) -> nbformat.NotebookNode:
    if cell.kind == "markdown":
        if language:
            text = text.replace("](figures/", "](../figures/")
        return _markdown(cell.name, text)
    text = sources.solution(text) if solved else sources.starter(text, cell.task)
    made = _code(cell.name, f"%%task {cell.task}\n{text}" if cell.task else text)
    if cell.picture:
        made.metadata["picture"] = cell.picture
    return made


def _markdown(name: str, text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(text, id=name)


def _code(name: str, text: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_code_cell(text, id=name)


def built(course: Course) -> Iterator[tuple[Path, str]]:
    """Every file that is built from the sources without running them, with its text."""
    for lesson in course.lessons.values():
        stem = sources.source_file(course, lesson).stem
        for language in ["", *languages(course)]:
            if not language or (course.sources / language / f"{stem}.md").exists():
                notebook = build(course, lesson, language=language)
                yield (course.root / "lessons" / language / f"{stem}.ipynb",
                       nbformat.writes(notebook) + "\n")  # fmt: skip
    for language in languages(course):
        if (course.sources / language / "README.md").exists():
            yield course.root / f"README.{language}.md", readme(course, language)


def readme(course: Course, language: str) -> str:
    """The README with another language's prose: code, tables of results and comments stay."""
    texts, made, used = prose(course.sources / language / "README.md"), [], set()
    for name, text in pieces((course.root / "README.md").read_text(encoding="utf-8")):
        if name and name not in texts:
            raise CourseError(f"{language}/README.md has no prose for {name}: {text[:60]!r}")
        used.add(name)
        made.append(texts[name] + "\n" if name else text)
    if unused := texts.keys() - used:
        raise CourseError(f"{language}/README.md has prose for no piece: {sorted(unused)}")
    return "".join(made).rstrip("\n") + "\n"


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """A Markdown page as (id, prose) and ("", code, comment or blank line), in order; an id is the
    heading's words and a number."""
    heading, number, prose, fenced = "top", 0, [], False

    def flush() -> Iterator[tuple[str, str]]:
        nonlocal number
        if prose:
            number += 1
            yield f"{heading}-{number}", "".join(prose)
            prose.clear()

    for line in text.splitlines(keepends=True):
        fence = line.startswith("```")
        if fenced or fence or line.startswith("<!--"):
            yield from flush()
            fenced ^= fence
            yield "", line
        elif not line.strip():
            yield from flush()
            yield "", line
        else:
            if line.startswith("#"):
                heading, number = re.sub(r"[^a-z0-9]+", "-", line.lower()).strip("-"), 0
            prose.append(line)
    yield from flush()


def write(course: Course) -> list[Path]:
    """Build all notebooks; the files that changed."""
    changed = []
    for path, text in built(course):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def run(course: Course, notebook: nbformat.NotebookNode, limit: float = 120.0,
        answers: str | os.PathLike | None = None) -> nbformat.NotebookNode:  # fmt: skip
    """Run a notebook top to bottom in a kernel of its own, also behind errors; limit: seconds a
    cell. answers: the folder where its tasks are saved, by default one that is dropped."""
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory(prefix="minipipe-") as directory:
        environment = os.environ | {"MINIPIPE_ANSWERS": str(answers or directory),
                                    "MINIPIPE_COURSE": str(course.root),
                                    "MINIPIPE_SLIDERS": "0"}  # fmt: skip
        place = {"metadata": {"path": str(course.root / "lessons")}}
        client = NotebookClient(notebook, timeout=limit, allow_errors=True, kernel_name="python3",
                                resources=place)  # fmt: skip
        client.execute(env=environment)
    return notebook


def errors(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
    """(cell, name, text) of each error in a notebook that ran."""
    return [(cell.id, output.ename, output.evalue) for cell in notebook.cells
            for output in cell.get("outputs", []) if output.output_type == "error"]  # fmt: skip


def is_marked(name: str, text: str) -> bool:
    """Whether an error says no more than that a task is still to be written."""
    marks = ("is not written yet", "NotWrittenYet: ")  # of a rank's error too
    return name in ("NotImplementedError", "NotWrittenYet") or any(mark in text for mark in marks)


def pictures(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, bytes]]:
    """(name, PNG) of each cell with picture="name" in a notebook that ran."""
    for cell in notebook.cells:
        if name := cell.metadata.get("picture"):
            found = [output.data["image/png"] for output in cell.get("outputs", [])
                     if "image/png" in output.get("data", {})]  # fmt: skip
            if not found:
                raise CourseError(f'cell {cell.id} has picture="{name}", but shows no figure')
            yield name, base64.b64decode(found[-1])
