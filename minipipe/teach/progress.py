"""What a student has passed: answers/progress.json, and what a blanked function does about it."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any

from minipipe.actions import Action
from minipipe.teach import answers
from minipipe.teach.course import Course, CourseError, Task, find_course

MARKS = {"passed": "✓", "failed": "✗", "not written": "…", "missing": "…", "error": "✗",
         "timeout": "✗"}  # fmt: skip


class NotWrittenYet(NotImplementedError):
    """A blanked function was called before the task that it stands for has been passed."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def judge_and_note(course: Course, task: Task):
    """Judge a student's answer, and remember whether it passed; the TaskResult."""
    from minipipe.teach.judge import judge

    path = course.answer_file(task)
    result = judge(course, task, path)
    noted = read(course)
    noted[task.id] = {"status": result.status, "points": result.points, "hash": _hash(path),
                      "time": time.strftime("%Y-%m-%d %H:%M")}  # fmt: skip
    course.answers.mkdir(exist_ok=True)
    temporary = course.answers / f"progress.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(course.answers / "progress.json")
    for number, test in enumerate(result.tests):
        if test["picture"]:
            picture = course.answers / f"task_{task.id.replace('.', '_')}_{number}.png"
            picture.write_bytes(test["picture"])
    return result


def read(course: Course) -> dict[str, Any]:
    """Task id -> what was noted last; {} where nothing was, or the file is damaged."""
    try:
        content = json.loads((course.answers / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_current(course: Course, task: Task) -> bool:
    """Whether what was noted is about the answer that is saved now."""
    noted = read(course).get(task.id)
    return isinstance(noted, dict) and noted.get("hash") == _hash(course.answer_file(task))


def passed(course: Course, task: Task) -> bool:
    """Whether the answer that is saved now has passed."""
    return is_current(course, task) and read(course)[task.id].get("status") == "passed"


def starter_text(course: Course, task: Task) -> str:
    """What a student starts from, taken from the task's cell of the student's notebook."""
    lesson = sorted((course.root / "lessons").glob(f"{task.lesson:02d}_*.ipynb"))
    for cell in json.loads(lesson[0].read_text(encoding="utf-8"))["cells"] if lesson else []:
        first, _, rest = "".join(cell["source"]).partition("\n")
        if first.split() == ["%%task", task.id]:
            return rest + "\n"
    raise CourseError(f"lesson {task.lesson} has no notebook with %%task {task.id}")


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def describe(result) -> str:
    """A TaskResult in words: the points, each part, and the first thing that is wrong."""
    head = (f"{MARKS[result.status]} {result.task} {result.title}: {result.status}, "
            f"{result.points:g} of {result.max_points:g} points")  # fmt: skip
    lines = [head] + ([f"  {result.reason}"] if result.reason else [])
    if result.status == "not written":
        return f"{head}\n  Write the function where the cell says so, then run it again."
    if len(result.parts) > 1:
        lines += [f"  {'✓' if part['passed'] else '✗'} {part['name']} ({part['share']} %)"
                  for part in result.parts]  # fmt: skip
    wrong = [test for test in result.tests if test["status"] != "passed"]
    if wrong:
        lines += [f"  {line}" for line in wrong[0]["message"].splitlines()]
    if len(wrong) > 1:
        lines.append(f"  ({len(wrong) - 1} more of its tests fail)")
    if result.status != "passed" and result.output.strip():
        shown = result.output.strip().splitlines()[-8:]
        lines += ["  what it printed last:", *(f"    {line[:160]}" for line in shown)]
    return "\n".join(lines)


def assigned(id: str):
    """What stands in a release for a blanked body: the student's own answer, once it passes.

    Rows of text become actions. Raises NotWrittenYet until then, naming the task.
    """
    task, course = _passed_or_raise(id)
    module = answers.load(course.answer_file(task), task, name=f"passed_{id.replace('.', '_')}")
    function = getattr(module, task.name)

    def call(*args: Any, **kwargs: Any) -> Any:
        known = inspect.signature(function).parameters
        extra = {name: value for name, value in kwargs.items() if name not in known}
        if any(value not in (None, False) for value in extra.values()):
            raise NotWrittenYet(f"your {task.name} of task {id} does not take "
                                f"{', '.join(extra)}")  # fmt: skip
        value = function(*args, **{k: v for k, v in kwargs.items() if k in known})
        if isinstance(value, list) and value and isinstance(value[0], list):
            return [[Action.parse(a) if isinstance(a, str) else a for a in row] for row in value]
        return value

    return call


def first(*ids: str) -> None:
    """What stands in a release at the head of what would yield an assigned answer: NotWrittenYet
    until each of the tasks passes."""
    for id in ids:
        _passed_or_raise(id)


def _passed_or_raise(id: str) -> tuple[Task, Course]:
    course = find_course(Path(__file__).parents[2])
    task = course.task(id)
    if not passed(course, task):
        raise NotWrittenYet(f"do task {id} first ({task.title}, lesson {task.lesson}): "
                            "minipipe uses your own answer here once it passes")  # fmt: skip
    return task, course
