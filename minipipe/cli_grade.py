"""The teacher's command `grade`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from minipipe.cli import Json, app, print_json, refuse
from minipipe.cli_teach import numbers
from minipipe.teach.course import Course, CourseError, Task, find_course


@app.command()
def grade(
    submission: Annotated[list[Path], typer.Argument(
        metavar="SUBMISSION…", help="Folders or zips with answers/, or notebooks; or a folder of "
        "such folders and zips.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    seed: Annotated[int | None, typer.Option(
        help="Of the hidden variants of the tests (1729); 0 for none.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Workers (one a core).")] = None,
    task: Annotated[str | None, typer.Option(
        metavar="6.1", help="Grade only this task; other results in --out stay.")] = None,
    lessons: Annotated[str | None, typer.Option(
        metavar="1-6,8", help="Grade only the tasks of these lessons.")] = None,
    roster: Annotated[Path | None, typer.Option(
        help="CSV with the columns folder, name, and perhaps email, submitted.")] = None,
    course: Annotated[Path | None, typer.Option(
        help="Folder of the course whose tests count (the one that is installed).")] = None,
    resume: Annotated[bool, typer.Option(
        "--resume", help="Keep results of unchanged answers, seed and tests.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Grade submissions with the course's own tests, each task in a process with limits."""
    from minipipe.teach import grade, submissions

    try:
        students = submissions.read_roster(roster) if roster else {}
        paths = submissions.expand(submission, students, out)
        of = Course(course) if course else _own_course(paths)
        tasks = _tasks(of, task, lessons)
        handed_in = [submissions.read(path, of, students) for path in paths]
        _ready(out)
    except CourseError as error:
        refuse(str(error))
    with _progress(len(grade.latest(handed_in)[0]) * len(tasks)) as told:
        try:
            report = grade.grade(of, handed_in, tasks, out, roster=students, resume=resume,
                                 seed=grade.SEED if seed is None else seed, jobs=jobs or _cores(),
                                 told=told)  # fmt: skip
        except KeyboardInterrupt:
            typer.echo("interrupted: the same command with --resume grades the rest", err=True)
            raise
    if as_json:
        print_json(report | {"out": str(out)})
    else:
        count = len(report["submissions"])
        typer.echo(f"{count} submission{'s' * (count != 1)}, seed {report['seed']}: "
                   f"{out / 'summary.md'}, {out / 'grades.csv'}")  # fmt: skip


def _cores() -> int:
    own = getattr(os, "sched_getaffinity", None)  # of those of the machine
    return len(own(0)) if own else os.cpu_count() or 1


def _own_course(paths: list[Path]) -> Course:
    """The course around the package or here, but none that a submission brings."""
    with suppress(CourseError):
        return find_course(Path(__file__))
    course = find_course()
    if any(path in (course.root, *course.root.parents) for path in paths):
        raise CourseError(f"the course in {course.root} is a submission's: its tests don't count; "
                          "name another one with --course")  # fmt: skip
    return course


def _tasks(course: Course, task: str | None, lessons: str | None) -> list[Task]:
    if task is not None and lessons is not None:
        raise CourseError("--task and --lessons: give one of them")
    if task is not None:
        return [course.task(task)]
    if lessons is None:
        return [*course.tasks.values()]
    wanted = numbers(lessons, course)
    tasks = [task for task in course.tasks.values() if task.lesson in wanted]
    if not tasks:
        raise CourseError(f"there are no tasks in lessons {lessons}")
    return tasks


def _ready(out: Path) -> None:
    """Make the folder for the results; CourseError, before anything is graded, if it can't be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise CourseError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, dict | None], None]]:
    """On standard error: a bar of tasks, and a line a submission."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("tasks", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False)) as bar:
        tasks = bar.add_task("", total=total)

        def told(name: str, record: dict | None) -> None:
            if record is None:
                bar.advance(tasks)
            else:
                bar.print(f"{name}: {record['points']:g} of {record['max_points']:g} points",
                          markup=False)  # fmt: skip

        yield told
