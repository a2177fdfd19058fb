"""The course on disk: its lessons, its tasks, and where answers are kept.

    lessons/course.toml          title, where the course can be found, seconds a task may take
    lessons/tasks/06.toml        lesson 6 and its tasks: points, hints, what an answer may not use
    lessons/src/06_….py          the lesson's source, with solutions; not in a student's tree
    tests/tasks/test_06.py       the tests of its tasks
    answers/task_06_1.py         a student's answer to task 6.1
"""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_ID = re.compile(r"(\d{1,2})\.(\d{1,2})")


class CourseError(ValueError):
    """The course, a task's name or a submission is not as it must be; the text says what is."""


@dataclass(frozen=True)
class Task:
    """One function or table that a student writes, with what its lesson's TOML says of it.

    name: what the answer must define. rebuilds: "module:function" of minipipe that the task
    rebuilds. stands_for: functions of minipipe whose bodies a release replaces by the answer.
    meanwhile: "module:function" that does instead of the answer until it passes; without it the
    blanked function refuses. removes: functions whose bodies hold the answer; a release leaves them
    out, and has stored tables of the schedules that need them. gives: what else would yield the
    answer ("module:function" or "module:function(argument=value)") and refuses in a release until
    the task passes. forbids: "module", "module:name" or "module:Class.method" that an answer may
    not use (nor `rebuilds`, `stands_for`, `removes` and `gives`). cases: arguments whose right
    results a release stores, to draw beside a wrong one.
    """

    id: str
    title: str
    name: str
    points: int
    hints: tuple[str, ...]
    rebuilds: str = ""
    stands_for: tuple[str, ...] = ()
    meanwhile: str = ""
    removes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    cases: tuple[dict[str, Any], ...] = ()
    limit: float = 20.0
    lesson: int = field(default=0, compare=False)

    @property
    def blanked(self) -> tuple[str, ...]:
        """The functions of the package that the answer replaces in a release."""
        return (*((self.rebuilds,) if self.rebuilds else ()), *self.stands_for)

    @property
    def file_name(self) -> str:
        return f"task_{self.lesson:02d}_{self.id.partition('.')[2]}.py"


@dataclass(frozen=True)
class Lesson:
    number: int
    title: str
    minutes: int
    builds_on: tuple[int, ...]
    tasks: tuple[Task, ...]


class Course:
    """What is taught in the folder `root`: the repository's or a release's."""

    def __init__(self, root: str | os.PathLike):
        self.root = Path(root).resolve()
        if not (self.root / "lessons" / "tasks").is_dir():
            raise CourseError(f"{self.root} is not a course: it has no folder lessons/tasks")

    @property
    def answers(self) -> Path:
        """Where answers are saved; $MINIPIPE_ANSWERS names another folder."""
        return Path(os.environ.get("MINIPIPE_ANSWERS") or self.root / "answers")

    @property
    def sources(self) -> Path:
        return self.root / "lessons" / "src"

    @property
    def is_release(self) -> bool:
        """Whether this is a student's tree, without sources of lessons."""
        return not self.sources.is_dir()

    @cached_property
    def settings(self) -> dict[str, Any]:
        return read_toml(self.root / "lessons" / "course.toml")

    @cached_property
    def lessons(self) -> dict[int, Lesson]:
        lessons = [_lesson(path) for path in sorted((self.root / "lessons/tasks").glob("*.toml"))]
        return {lesson.number: lesson for lesson in lessons}

    @cached_property
    def tasks(self) -> dict[str, Task]:
        return {task.id: task for lesson in self.lessons.values() for task in lesson.tasks}

    def task(self, name: str) -> Task:
        """The task of that id, "6.1"; CourseError says which there are."""
        try:
            return self.tasks[str(name)]
        except KeyError:
            lesson = str(name).partition(".")[0]
            near = [id for id in self.tasks if id.partition(".")[0] == lesson] or [*self.tasks]
            raise CourseError(f"there is no task {name!r}; there are {', '.join(near)}") from None

    def test_file(self, task: Task) -> Path:
        return self.root / "tests" / "tasks" / f"test_{task.lesson:02d}.py"

    def answer_file(self, task: Task) -> Path:
        return self.answers / task.file_name


def find_course(start: str | os.PathLike = ".") -> Course:
    """The course in `start` or above it, in $MINIPIPE_COURSE, or around the package."""
    here = Path(start).resolve()
    named = os.environ.get("MINIPIPE_COURSE")
    places = [*([Path(named)] if named else []), here, *here.parents, Path(__file__).parents[2]]
    for place in places:
        if (place / "lessons" / "tasks").is_dir():
            return Course(place)
    raise CourseError("no course here: run this in the folder that has lessons/, or set "
                      "MINIPIPE_COURSE to it")  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CourseError(f"{path}: {error}") from None


# What a lesson's TOML may say: the type of each value, and for lists that of what is in them.
_HEAD = {"title": str, "minutes": int, "builds_on": [int]}
_ENTRY = {"id": str, "title": str, "name": str, "points": int, "hints": [str], "rebuilds": str,
          "stands_for": [str], "meanwhile": str, "removes": [str], "gives": [str],
          "forbids": [str], "cases": [dict], "limit": int | float}  # fmt: skip


def _lesson(path: Path) -> Lesson:
    content = read_toml(path)
    try:
        head, number = _typed(content["lesson"], _HEAD), int(path.stem)
        tasks = tuple(_task(number, entry) for entry in content.get("task", []))
        return Lesson(number, tasks=tasks, **head)
    except (KeyError, TypeError, ValueError) as error:
        raise CourseError(f"{path}: {type(error).__name__}: {error}") from None


def _task(lesson: int, entry: dict[str, Any]) -> Task:
    values = _typed(entry, _ENTRY)
    match = _ID.fullmatch(values["id"])
    if not match or int(match[1]) != lesson:
        raise ValueError(f"a task of lesson {lesson} is called {lesson}.1, not {entry['id']!r}")
    return Task(**values, lesson=lesson)


def _typed(entry: dict[str, Any], types: dict[str, Any]) -> dict[str, Any]:
    """The values, lists as tuples; TypeError for one that is unknown or of another type."""
    for name, value in entry.items():
        if name not in types:
            raise TypeError(f"{name} is not known here; known are {', '.join(types)}")
        many = isinstance(types[name], list)
        wanted = types[name][0] if many else types[name]
        parts = value if many and isinstance(value, list) else [value]
        if (many != isinstance(value, list) or any(isinstance(part, bool) for part in parts)
                or not all(isinstance(part, wanted) for part in parts)):  # fmt: skip
            kind = {str: "text", int: "a whole number", dict: "a table"}.get(wanted, "a number")
            raise TypeError(f"{name} = {value!r} must be {'a list, each part ' * many}{kind}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
