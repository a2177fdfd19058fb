"""Answers as modules: loaded from a file, taken from a lesson's source, kept from cheating.

While an answer runs, what would yield it ready-made refuses *the answer's* calls: the tests and
the package itself may use it. That stops copying by accident; it is no sandbox.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import json
import linecache
import sys
from collections.abc import Collection, Iterator
from functools import cache, reduce, wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import cloudpickle

from minipipe.schedule import Schedule
from minipipe.schedules import SCHEDULES
from minipipe.teach.course import Course, Task

# Never part of an answer: torch's own pipelining, and the lessons' solutions.
ALWAYS = ("torch.distributed.pipelining", "minipipe.teach", "minipipe:build",
          "minipipe.schedules:build")  # fmt: skip


class Forbidden(AssertionError):
    """An answer used what would do the task for it."""


def load(path: Path, name: str = "answer", text: str | None = None) -> ModuleType:
    """Run an answer's file, or its text, as the module `answer`, as the cell of a notebook runs."""
    module = ModuleType(name)
    module.__file__ = str(path)
    text = path.read_text(encoding="utf-8-sig") if text is None else text
    linecache.cache[str(path)] = (len(text), None, text.splitlines(True), str(path))
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)  # ranks can't import it
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def line(path: Path, number: int) -> str:
    """An answer's line, for an error's text."""
    return f"\nat line {number} of your answer: {linecache.getline(str(path), number).strip()}"


def solution(course: Course, task: Task) -> ModuleType:
    """The lesson's own solution as a module."""
    return _solution(course.root, task.id, course)


@cache
def _solution(_root: Path, id: str, course: Course) -> ModuleType:
    name = f"solution_{id.replace('.', '_')}"
    path = course.root / f"<solution of {id}>"
    text = solution_text(course, id)
    module = ModuleType(name)
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(True), str(path))
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)  # ranks can't import it
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


texts: dict[tuple[Path, str], str] = {}  # of solutions; a child that judges gets its task's


def solution_text(course: Course, id: str) -> str:
    """The text of the lesson's own solution, read once."""
    from minipipe.teach import sources

    key = (course.root, id)
    if key not in texts:
        texts[key] = sources.task_text(course, id)
    return texts[key]


def right_table(course: Course, task: Task, case: dict[str, Any]) -> Schedule | None:
    """The right rows of a case: by the solution, in a release from its stored cases, or None."""
    if course.is_release:
        stored = _read_json(course.root / "lessons" / "tasks" / "cases.json")
        text = stored.get(task.id, {}).get(key(case))
        return None if text is None else Schedule.parse(text)
    value = getattr(solution(course, task), task.name)
    rows = value(**case) if callable(value) else value
    return Schedule.parse(rows) if isinstance(rows, str) else Schedule(rows)


def key(case: dict[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def refused(task: Task) -> Iterator[None]:
    """Within this block what the task forbids refuses calls and imports that an answer makes."""
    names = [*ALWAYS, *task.forbids, *task.blanked, *task.removes]
    names += [gift.partition("(")[0] for gift in task.gives]
    modules = {name for name in names if ":" not in name}
    real_import = builtins.__import__

    def import_(name, globals=None, locals=None, fromlist=(), level=0):
        if globals and _is_answer(globals.get("__name__")):
            wanted = {name, *(f"{name}.{each}" for each in fromlist or ())}
            for module in modules:
                if any(each == module or each.startswith(f"{module}.") for each in wanted):
                    raise Forbidden(f"{module} may not be used here: it would do the task for you")
        return real_import(name, globals, locals, fromlist, level)

    with contextlib.ExitStack() as stack:
        guards = {}
        for name in dict.fromkeys(name for name in names if ":" in name):
            module, _, attribute = name.partition(":")
            if importlib.util.find_spec(module):
                owner = importlib.import_module(module)
                *classes, attribute = attribute.split(".")
                owner = reduce(getattr, classes, owner)
                value = getattr(owner, attribute)
                guards[id(value)] = _guarded(value, name)
                stack.enter_context(mock.patch.object(owner, attribute, guards[id(value)]))
        for owner, attribute, value in _aliases(guards.keys(), modules):
            guard = guards.get(id(value)) or _guarded(value, f"{owner.__name__}:{attribute}")
            stack.enter_context(mock.patch.object(owner, attribute, guard))
        by_name = {n: guards[id(make)] for n, make in SCHEDULES.items() if id(make) in guards}
        stack.enter_context(mock.patch.dict(SCHEDULES, by_name))
        stack.enter_context(mock.patch.object(builtins, "__import__", import_))
        stack.enter_context(_without(modules - {n for n in modules if n.startswith("minipipe")}))
        yield


@contextlib.contextmanager
def _without(modules: set[str]) -> Iterator[None]:
    """Nobody can import these modules of other packages in this block, by any way."""

    class Refuse:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if any(name == module or name.startswith(f"{module}.") for module in modules):
                raise Forbidden(f"{name} may not be used here: it would do the task for you")

    known = {name: module for name, module in sys.modules.items()
             if any(name == m or name.startswith(f"{m}.") for m in modules)}  # fmt: skip
    for name in known:
        del sys.modules[name]
    sys.meta_path.insert(0, Refuse)
    try:
        yield
    finally:
        sys.meta_path.remove(Refuse)
        sys.modules.update(known)


def _aliases(wanted: Collection[int], modules: set[str]) -> list[tuple[ModuleType, str, Any]]:
    """(module, name, function) of each function of the package, under whatever name a module of it
    has it, that is one of the wanted ones (by id) or defined in one of the modules."""
    return [
        (module, attribute, value)
        for name, module in [*sys.modules.items()]
        if name.partition(".")[0] == "minipipe" and not name.startswith("minipipe.teach")
        and name not in modules
        for attribute, value in [*vars(module).items()]
        if isinstance(value, FunctionType)
        and (id(value) in wanted or value.__module__ in modules)
    ]  # fmt: skip


def _is_answer(module: str | None) -> bool:
    return bool(module) and (module == "answer" or module.startswith("solution_"))


def _guarded(value, name: str):
    @wraps(value)
    def guarded(*args, **kwargs):
        caller = sys._getframe(1).f_globals.get("__name__")
        if _is_answer(caller):
            raise Forbidden(f"{name.replace(':', '.')} may not be used here: it would do the task "
                            "for you")  # fmt: skip
        return value(*args, **kwargs)

    return guarded
