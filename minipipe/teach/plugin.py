"""The pytest plugin behind tasks: which tests run, on whose answer, and what is reported.

Plain `pytest` runs the tests of all tasks on the solutions of the lessons. In a child that judges
one answer (judge.py) they run on that answer, and each result goes to the parent at once.
"""

from __future__ import annotations

import base64
import contextlib
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minipipe.teach import answers
from minipipe.teach.course import Course, find_course
from minipipe.teach.testing import Wrong


@dataclass
class Judging:
    """What a child judges: set by judge.py before pytest starts."""

    course: Course
    task: str
    answer: Path
    seed: int
    tell: Any  # a function of (kind, content)
    text: str = ""  # the answer's, read before it could change its file


judging: Judging | None = None
LONGEST = 10_000  # characters of a test's message


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "part(task, name, share): a part of a task's points")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if judging is None:
        return
    mine = [i for i in items if (m := i.get_closest_marker("part"))
            and m.kwargs["task"] == judging.task]  # fmt: skip
    config.hook.pytest_deselected(items=[i for i in items if i not in mine])
    items[:] = mine
    judging.tell("collected", [{"name": i.name, **_part(i)} for i in mine])


def _part(item: pytest.Item) -> dict[str, Any]:
    mark = item.get_closest_marker("part").kwargs
    return {"part": mark["name"], "share": mark["share"]}


def _task_of(request: pytest.FixtureRequest) -> str:
    mark = request.node.get_closest_marker("part")
    if mark is None:
        raise LookupError("a test that takes `answer` needs @part(task, name, share)")
    return mark.kwargs["task"]


@pytest.fixture
def course() -> Course:
    return judging.course if judging else find_course(Path(__file__))


@pytest.fixture
def answer_module(request: pytest.FixtureRequest, course: Course):
    """The module that the answer's cell makes."""
    task = course.task(_task_of(request))
    if judging:
        yield answers.load(judging.answer, text=judging.text)
    elif course.is_release:
        if not course.answer_file(task).exists():
            raise NotImplementedError(f"{task.id} is not written yet")
        with answers.refused(task):
            yield answers.load(course.answer_file(task))
    else:
        with answers.refused(task):
            yield answers.solution(course, task)


@pytest.fixture
def answer(request: pytest.FixtureRequest, answer_module, course: Course):
    """What the task asks for: the function or table of the task's name."""
    task = course.task(_task_of(request))
    if not hasattr(answer_module, task.name):
        raise Wrong(f"the cell must define `{task.name}`; it does not")
    return getattr(answer_module, task.name)


@pytest.fixture
def right(request: pytest.FixtureRequest, course: Course):
    """right(**case): the right table of a case to draw beside a wrong one, or None."""
    task = course.task(_task_of(request))
    return lambda **case: answers.right_table(course, task, case)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(judging.seed if judging else 0)


@pytest.fixture
def sizes(rng: random.Random):
    """sizes((1, 1), (2, 3), (4, 6)): these cases, and with a seed three hidden ones between the
    smallest and the largest of each column. `only` (a function of a case) keeps what is legal."""

    def choose(*cases: tuple[int, ...], only=lambda *_: True) -> list[tuple[int, ...]]:
        hidden: list[tuple[int, ...]] = []
        if judging and judging.seed:
            columns = [(min(column), max(column)) for column in zip(*cases, strict=True)]
            for _ in range(200):
                case = tuple(rng.randint(*ends) for ends in columns)
                if only(*case) and case not in cases and case not in hidden:
                    hidden.append(case)
                if len(hidden) == 3:
                    break
        return [*cases, *sorted(hidden)]

    return choose


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    with _going_on():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    with _going_on():
        return (yield)


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """An answer that raises what would end pytest has only failed this test."""
    try:
        yield
    except (KeyboardInterrupt, pytest.exit.Exception) as error:
        if not judging:
            raise
        raise RuntimeError(f"your answer raised {type(error).__name__}") from error
    finally:
        if judging:  # an answer may have left the folder, or deleted it
            judging.answer.parent.mkdir(parents=True, exist_ok=True)
            os.chdir(judging.answer.parent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if judging and (report.when == "call" or not report.passed):
        error = call.excinfo.value if call.excinfo else None
        judging.tell("test", {"name": item.name, **_part(item), "seconds": report.duration,
                              **describe(error, judging.answer)})  # fmt: skip
    return report


ADVICE = {
    NameError: "\n(The cell is judged by itself: what it needs of other cells, imports too, has to "
               "stand in it.)",
    SyntaxError: "\n(Lines that begin with % or ! can't stand in a task's cell.)",
}  # fmt: skip


def describe(error: BaseException | None, answer: Path) -> dict[str, Any]:
    """A test's status, its message for the student, and a picture (PNG in base64)."""
    status, message, picture = _told(error, answer)
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} … {len(message) - LONGEST} more characters"
    encoded = base64.b64encode(picture).decode() if picture else None
    return {"status": status, "message": message, "picture": encoded}


def _told(error: BaseException | None, answer: Path) -> tuple[str, str, bytes | None]:
    if error is None:
        return "passed", "", None
    cause: BaseException | None = error
    while cause is not None:  # a rank's error has the text of what the answer raised in it
        if isinstance(cause, NotImplementedError):
            return "not written", _text(cause) or "not written yet", None
        cause = getattr(cause, "original", None) or cause.__cause__
    if isinstance(error, AssertionError) or getattr(error, "original", None).__class__ is Wrong:
        wrong = error if isinstance(error, AssertionError) else error.original
        message = _text(wrong) or "the assertion does not hold"
        return "failed", message, getattr(wrong, "picture", None)
    text = f"{type(error).__name__}: {_text(error)}"
    return "failed", f"{text}{_where(error, answer)}{ADVICE.get(type(error), '')}", None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as fault:
        return f"(its text can't be had: {type(fault).__name__})"


def _where(error: BaseException, answer: Path) -> str:
    """The answer's innermost line in a traceback."""
    found, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(answer):
            found = answers.line(answer, trace.tb_lineno)
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == str(answer):
        found = answers.line(answer, error.lineno or 1)
    return found


def pytest_unconfigure() -> None:
    sys.modules.pop("answer", None)
