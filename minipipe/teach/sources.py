"""A lesson's one source and what is built from it: student's and solution's notebooks.

A source is a Python file in percent format. Each cell has a name, which becomes its id:

    # %% [markdown] name="question"
    # # 6 · One forward, one backward
    # %% name="rows" task="6.1"
    def one_f_one_b(ranks, microbatches):
        \"\"\"What is asked.\"\"\"
        ### BEGIN SOLUTION
        …
        ### END SOLUTION

Two kinds of blank. What stands between the marks is the lesson's own; in the student's notebook a
`raise NotImplementedError` stands there. A line `### REBUILD minipipe.schedules.gpipe:gpipe` is
replaced by that function of the package, by its signature and docstring alone for the student.
A cell with `picture="staircase"` has its figure kept as lessons/figures/staircase.png.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from minipipe.teach.course import Course, CourseError, Lesson

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
_REBUILD = re.compile(r"^### REBUILD ([\w.]+):(\w+)[ \t]*$", re.M)
_SOLUTION = re.compile(rf"^([ \t]*){BEGIN}[ \t]*\n(.*?)^[ \t]*{END}[ \t]*\n?", re.M | re.S)
_ROWS = re.compile(r"^([ \t]*)```\n.*?^[ \t]*```\n", re.M | re.S)


@dataclass(frozen=True)
class Cell:
    """One cell of a source: kind is "markdown" or "code"; task and picture are "" where none is."""

    name: str
    kind: str
    text: str
    task: str = ""
    picture: str = ""


def source_file(course: Course, lesson: Lesson | int) -> Path:
    """lessons/src/06_….py of a lesson."""
    number = lesson if isinstance(lesson, int) else lesson.number
    found = sorted(course.sources.glob(f"{number:02d}_*.py"))
    if len(found) != 1:
        raise CourseError(f"lesson {number} has {len(found)} sources in {course.sources}, not one")
    return found[0]


def read_cells(path: Path) -> list[Cell]:
    """The cells of a source; CourseError for a cell without a name of its own."""
    import jupytext

    cells: list[Cell] = []
    for cell in jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent").cells:
        said, first = cell.metadata, cell.source.partition("\n")[0]
        name = said.get("name", "")
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", name) or name in {c.name for c in cells}:
            raise CourseError(f'{path.name}: the cell "{first}" needs name="…" of its own, of '
                              "letters, digits and hyphens")  # fmt: skip
        cells.append(Cell(name, cell.cell_type, cell.source, said.get("task", ""),
                          said.get("picture", "")))  # fmt: skip
    return cells


def solution(text: str) -> str:
    """A cell's text as its solution: marks dropped, functions of the package in full."""
    lines = [line for line in text.splitlines() if line.strip() not in (BEGIN, END)]
    return _REBUILD.sub(lambda m: inspect.getsource(_function(m)).rstrip(), "\n".join(lines))


def starter(text: str, task: str) -> str:
    """A cell's text as the student gets it."""
    what = f'raise NotImplementedError("{task or "this"} is not written yet")'
    text = _SOLUTION.sub(lambda m: f"{m[1]}{what}\n", text + "\n")
    return _REBUILD.sub(lambda m: f"{head(_function(m))}    {what}", text).rstrip("\n")


def task_text(course: Course, id: str, edition=solution) -> str:
    """The whole text of a task's cell, as solution or (edition=starter) as a student gets it."""
    task = course.task(id)
    for cell in read_cells(source_file(course, task.lesson)):
        if cell.task == task.id:
            text = edition(cell.text, task.id) if edition is starter else edition(cell.text)
            return text + "\n"
    raise CourseError(f'{source_file(course, task.lesson)} has no cell with task="{id}"')


def _function(match: re.Match):
    return getattr(importlib.import_module(match[1]), match[2])


def head(function) -> str:
    """Signature and docstring of a function, without the rows that its docstring shows."""
    text = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(text).body[0]
    if not isinstance(node.body[0], ast.Expr):
        raise CourseError(f"{function.__name__} has no docstring that could say what is asked")
    end = node.body[0].end_lineno
    return without_rows("".join(f"{line}\n" for line in text.splitlines()[:end]))


def without_rows(text: str) -> str:
    """A docstring's text without the rows that it shows between marks of code."""
    return _ROWS.sub("", text)
