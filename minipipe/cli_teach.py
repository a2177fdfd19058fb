"""The classroom's commands: status, hint and watch for students, lessons for authors."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from minipipe.cli import Json, app, print_json
from minipipe.teach.course import Course, CourseError, Task, find_course

TaskName = Annotated[str, typer.Argument(metavar="TASK", help="Such as 6.1.")]


def course_here() -> Course:
    try:
        course = find_course()
        _ = course.lessons  # that they can be read
    except CourseError as error:
        raise typer.BadParameter(str(error)) from None
    return course


def task_named(course: Course, name: str) -> Task:
    try:
        return course.task(name)
    except CourseError as error:
        raise typer.BadParameter(str(error), param_hint="TASK") from None


@app.command()
def status(
    check: Annotated[bool, typer.Option("--check", help="Judge each saved answer again.")] = False,
    as_json: Json = False,
) -> None:
    """List the tasks: which are passed, how many points, and which is next."""
    from minipipe.teach import progress
    from minipipe.teach.release import changed

    course = course_here()
    for name in changed(course):
        typer.echo(f"{name} is not as it was handed out; you are graded by the original", err=True)
    noted, rows = progress.read(course), []
    for task in course.tasks.values():
        entry = noted.get(task.id, {})
        state, points = entry.get("status", "not written"), entry.get("points", 0)
        if course.answer_file(task).exists() and (check or not progress.is_current(course, task)):
            result = progress.judge_and_note(course, task)
            state, points = result.status, result.points
        rows.append({"id": task.id, "title": task.title, "status": state, "points": points,
                     "max_points": task.points})  # fmt: skip
    scored, most = sum(r["points"] for r in rows), sum(r["max_points"] for r in rows)
    following = next((r["id"] for r in rows if r["status"] != "passed"), None)
    if as_json:
        print_json({"tasks": rows, "points": scored, "max_points": most, "next": following})
        return
    if course.root not in (Path.cwd(), *Path.cwd().parents):
        typer.echo(f"the course in {course.root}, answers in {course.answers}")
    for lesson in course.lessons.values():
        typer.echo(f"{lesson.number:2} {lesson.title} ({lesson.minutes} minutes)")
        for row in [r for r in rows if r["id"] in {t.id for t in lesson.tasks}]:
            typer.echo(f"   {progress.MARKS[row['status']]} {row['id']:5} {row['title']:52.52} "
                       f"{row['points']:g}/{row['max_points']:g}")  # fmt: skip
    typer.echo(f"\n{scored:g} of {most:g} points. " + (
        f"Next: {following}, in lessons/; `minipipe hint {following}` helps." if following else
        "All tasks are passed."))  # fmt: skip


@app.command()
def hint(
    task: TaskName,
    level: Annotated[int, typer.Option(min=1, max=3, help="1 to 3; a higher one says more.")] = 1,
    as_json: Json = False,
) -> None:
    """Give a hint for a task, in three levels."""
    found = task_named(course_here(), task)
    if as_json:
        print_json({"id": found.id, "level": level, "hint": found.hints[level - 1]})
        return
    typer.echo(f"{found.id} {found.title}, hint {level} of 3:\n{found.hints[level - 1]}")
    if level < 3:
        typer.echo(f"(more: minipipe hint {found.id} --level {level + 1})")


@app.command()
def watch(
    tasks: Annotated[list[str], typer.Argument(metavar="[TASK]...", help="All if none.")] = None,
    limit: Annotated[float, typer.Option(help="Minutes after which it ends.", min=0)] = 240,
    once: Annotated[bool, typer.Option("--once", help="Judge what is there, then end.")] = False,
) -> None:
    """Judge answers whenever their file in answers/ is saved; writes a starter where none is."""
    from minipipe.teach import progress

    course = course_here()
    chosen = [task_named(course, name) for name in tasks or []] or [*course.tasks.values()]
    for task in [task_named(course, name) for name in tasks or []]:
        path = course.answer_file(task)
        if not path.exists():
            course.answers.mkdir(exist_ok=True)
            path.write_text(progress.starter_text(course, task), encoding="utf-8")
            typer.echo(f"wrote a starter: {path}")
    seen: dict[Path, float] = {}
    end = time.monotonic() + 60 * limit
    if not once:
        typer.echo(f"watching {course.answers}; Ctrl-C ends this")
    while True:
        for task in chosen:
            path = course.answer_file(task)
            changed = path.stat().st_mtime if path.exists() else None
            if changed is not None and seen.get(path) != changed:
                seen[path] = changed
                typer.echo(progress.describe(progress.judge_and_note(course, task)) + "\n")
        if once or time.monotonic() > end:
            return
        time.sleep(0.3)


@app.command()
def lessons(
    only: Annotated[list[int], typer.Argument(metavar="[LESSON]...", help="All if none.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; end with 1 if a notebook "
                                        "is not what its source builds.")] = False,
    solutions: Annotated[Path | None, typer.Option(help="Also write solution notebooks "
                                                   "there.")] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Run the solutions and keep their "
                                          "figures in lessons/figures.")] = False,
) -> None:  # fmt: skip
    """Build the notebooks from the sources of the lessons (for authors)."""
    course = course_here()
    if course.is_release:
        raise typer.BadParameter("this is a student's tree: it has no sources of lessons")
    if unknown := [str(number) for number in only or [] if number not in course.lessons]:
        raise typer.BadParameter(f"no lesson {', '.join(unknown)}; there are "
                                 f"{', '.join(map(str, course.lessons))}")  # fmt: skip
    try:
        import nbformat

        from minipipe.teach import notebooks
    except ImportError as error:
        raise typer.BadParameter(f"{error}: python -m pip install -e '.[teach]'") from None
    try:
        if check:
            stale = [path for path, text in notebooks.built(course)
                     if not path.exists() or path.read_text(encoding="utf-8") != text]  # fmt: skip
            typer.echo("\n".join(f"not what its source builds: {path.relative_to(course.root)}"
                                 for path in stale) or "all notebooks are what the sources build")
            raise typer.Exit(bool(stale))
        for path in notebooks.write(course):
            typer.echo(f"built {path.relative_to(course.root)}")
        for lesson in course.lessons.values():
            if only and lesson.number not in only or not (solutions or figures):
                continue
            made = notebooks.build(course, lesson, solved=True)
            if solutions:
                solutions.mkdir(parents=True, exist_ok=True)
                nbformat.write(made, solutions / f"{lesson.number:02d}.ipynb")
            if figures:
                for name, png in notebooks.pictures(notebooks.run(course, made)):
                    (course.root / "lessons" / "figures").mkdir(exist_ok=True)
                    (course.root / "lessons" / "figures" / f"{name}.png").write_bytes(png)
                    typer.echo(f"drew lessons/figures/{name}.png")
    except CourseError as error:
        typer.echo(f"minipipe lessons: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def release(
    out: Annotated[Path, typer.Option(help="A new or empty folder.")],
    lessons: Annotated[str | None, typer.Option(metavar="1-6", help="Lessons that are assigned, "
                                                "such as 1-6 or 1,3; all by default.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Write the tree that students get: no solutions, no sources, the assigned functions blank."""
    from minipipe.teach import release as made

    course = course_here()
    try:
        chosen = None if lessons is None else numbers(lessons, course)
        files = made.release(course, out, chosen)
    except CourseError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print_json({"out": str(out), "lessons": chosen or sorted(course.lessons),
                    "files": [str(path.relative_to(out)) for path in files]})  # fmt: skip
        return
    typer.echo(f"wrote {len(files)} files to {out}: lessons "
               f"{', '.join(map(str, chosen or course.lessons))}")  # fmt: skip


def numbers(text: str, course: Course) -> list[int]:
    """The lessons of `1-6` or `1,3-5`; of a span those that there are, from its first to its last.
    """
    found: set[int] = set()
    for piece in text.split(","):
        first, dash, last = (part.strip() for part in piece.partition("-"))
        ends = [first, last] if dash else [first]
        if not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            raise CourseError(f"--lessons {text!r} is not such as 1-6 or 1,3")
        for number in map(int, ends):
            if number not in course.lessons:
                raise CourseError(f"no lesson {number}; there are "
                                  f"{', '.join(map(str, course.lessons))}")  # fmt: skip
        found |= {n for n in course.lessons if int(ends[0]) <= n <= int(ends[-1])}
    return sorted(found)
