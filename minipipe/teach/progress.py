"""What a student has passed: answers/progress.json, and what a blanked function does about it."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from minipipe.actions import Action, ScheduleError
from minipipe.schedule import Schedule
from minipipe.teach import answers
from minipipe.teach.course import Course, CourseError, Task, find_course

MARKS = {"passed": "✓", "failed": "✗", "not written": "…", "missing": "…", "error": "✗",
         "timeout": "✗"}  # fmt: skip


class NotWrittenYet(ScheduleError, NotImplementedError):
    """A blanked function was called before the task that it stands for has been passed. For `build`
    it is a schedule that can't be had, so that commands tell it in a line."""

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
    try:
        temporary.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(course.answers / "progress.json")
    finally:
        temporary.unlink(missing_ok=True)
    for number, test in enumerate(result.tests):
        if test["picture"]:
            picture = course.answers / f"task_{task.id.replace('.', '_')}_{number}.png"
            picture.write_bytes(test["picture"])
    return result


def read(course: Course) -> dict[str, dict[str, Any]]:
    """Task id -> what was noted last; without what is damaged."""
    try:
        content = json.loads((course.answers / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    noted = content if isinstance(content, dict) else {}
    return {id: entry for id, entry in noted.items()
            if id in course.tasks and isinstance(entry, dict) and entry.get("status") in MARKS
            and type(entry.get("points")) in (int, float)
            and 0 <= entry["points"] <= course.tasks[id].points}  # fmt: skip


def is_current(course: Course, task: Task) -> bool:
    """Whether what was noted is about the answer that is saved now."""
    return read(course).get(task.id, {}).get("hash") == _hash(course.answer_file(task))


def passed(course: Course, task: Task) -> bool:
    """Whether the answer that is saved now has passed."""
    return is_current(course, task) and read(course)[task.id]["status"] == "passed"


def is_starter(course: Course, task: Task, text: str) -> bool:
    """Whether a text is the task's starter, but for blanks around it."""
    try:
        return text.strip() == starter_text(course, task).strip()
    except CourseError:
        return False


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
    wrong = sorted((test for test in result.tests if test["status"] != "passed"),
                   key=lambda test: test["status"] == "not written")  # fmt: skip
    if wrong:
        lines += [f"  {line}" for line in wrong[0]["message"].splitlines()]
    if len(wrong) > 1:
        lines.append(f"  ({len(wrong) - 1} more of its tests fail)")
    if result.status != "passed" and result.output.strip():
        shown = result.output.strip().splitlines()[-8:]
        lines += ["  what it printed last:", *(f"    {line[:160]}" for line in shown)]
    return "\n".join(lines)


def assigned(id: str, arguments: dict[str, Any], meanwhile=None) -> Any:
    """What stands in a release for a blanked body: the student's own answer, once it passes.

    arguments: those of the blanked function; its answer gets the ones that it takes. Rows of text
    become actions. Until then `meanwhile` is called, or NotWrittenYet names the task.
    """
    course = find_course(Path(__file__).parents[2])
    task = course.task(id)
    if meanwhile and not passed(course, task):
        return meanwhile(**arguments)
    first(id)
    path = course.answer_file(task)
    function = _function(path, path.stat().st_mtime_ns, id, task.name)
    known = inspect.signature(function).parameters
    extra = [name for name, value in arguments.items()
             if name not in known and value not in (None, False)]  # fmt: skip
    if extra:
        raise NotWrittenYet(f"your {task.name} of task {id} does not take {', '.join(extra)}")
    value = function(**{k: v for k, v in arguments.items() if k in known})
    if isinstance(value, list) and value and isinstance(value[0], (list, tuple)):
        return [[Action.parse(a) if isinstance(a, str) else a for a in row] for row in value]
    return value


@cache
def _function(path: Path, _time: int, id: str, name: str):
    return getattr(answers.load(path, name=f"passed_{id.replace('.', '_')}"), name)


def first(*ids: str) -> None:
    """What stands in a release at the head of what would yield an assigned answer: NotWrittenYet
    until each of the tasks passes."""
    course = find_course(Path(__file__).parents[2])
    for id in ids:
        task = course.task(id)
        if not passed(course, task):
            raise NotWrittenYet(f"do task {id} first ({task.title}, lesson {task.lesson}): "
                                "minipipe uses your own answer here once it passes")  # fmt: skip


def removed(name: str) -> None:
    """What stands in a release for a function that holds an answer."""
    raise NotWrittenYet(f"{name} is not in a student's tree: it would show answers")


def stored(name: str, arguments: dict[str, Any]) -> list[list[Action]]:
    """Rows that a release has instead of a function that needs what was left out of it."""
    path = Path(__file__).parents[2] / "lessons" / "tasks" / "tables.json"
    tables = json.loads(path.read_text(encoding="utf-8"))[name]
    usual = {k: v for k, v in arguments.items() if v is not None}
    text = tables.get(answers.key(usual))
    if text is None:
        raise NotWrittenYet(f"a student's tree has {name} for up to 4 ranks and 8 micro-batches, "
                            "with its usual arguments: the function would show answers")
    return [list(row) for row in Schedule.parse(text).rows]
