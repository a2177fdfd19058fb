"""Wrong answers that have to fail: `python -m minipipe.teach.mutants 06` shows what each scores.

For each task the solution must get all points, the starter none, and each of at least three
plausible wrong answers (tests/tasks/mutants/06.toml) must fail a test.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from minipipe.teach import sources
from minipipe.teach.course import Course, CourseError, Task, find_course
from minipipe.teach.judge import TaskResult, judge


class Candidate(NamedTuple):
    """An answer to be judged: `is_right` says whether it has to pass."""

    task: Task
    why: str
    text: str
    is_right: bool


def candidates(course: Course, lesson: int) -> Iterator[Candidate]:
    """Solution, starter and wrong answers of each task of a lesson."""
    for task in course.lessons[lesson].tasks:
        solved = sources.task_text(course, task.id)
        yield Candidate(task, "solution", solved, True)
        yield Candidate(task, "starter", sources.task_text(course, task.id, sources.starter), False)
        for mutant in mutants(course, lesson):
            if mutant["task"] == task.id:
                yield Candidate(task, mutant["why"], _changed(solved, mutant), False)


def mutants(course: Course, lesson: int) -> list[dict[str, str]]:
    path = course.root / "tests" / "tasks" / "mutants" / f"{lesson:02d}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["mutant"] if path.exists() else []


def _changed(text: str, mutant: dict[str, str]) -> str:
    if "code" in mutant:
        return mutant["code"]
    if mutant["old"] not in text:
        raise CourseError(f"mutant of {mutant['task']} ({mutant['why']}): its old text does not "
                          "occur in the solution")  # fmt: skip
    return text.replace(mutant["old"], mutant["new"])


def judge_text(course: Course, task: Task, text: str, seed: int = 0) -> TaskResult:
    """Judge an answer that is given as text."""
    with tempfile.TemporaryDirectory(prefix="minipipe-") as directory:
        path = Path(directory) / task.file_name
        path.write_text(text, encoding="utf-8")
        return judge(course, task, path, seed)


def main(*names: str) -> int:
    from minipipe.teach.progress import describe

    course, bad = find_course(), 0
    lessons = sorted({int(name.partition(".")[0]) for name in names}) or [*course.lessons]
    for lesson in lessons:
        for each in candidates(course, lesson):
            if any("." in name for name in names) and each.task.id not in names:
                continue
            result = judge_text(course, each.task, each.text, seed=7)
            right = (result.points == result.max_points) if each.is_right else (
                result.status != "passed" and (each.why != "starter" or result.points == 0))
            bad += not right
            print(f"{'ok   ' if right else 'WRONG'} {each.why} ({result.seconds:.1f} s)\n"
                  f"{describe(result)}\n", flush=True)  # fmt: skip
        for task in course.lessons[lesson].tasks:
            count = sum(mutant["task"] == task.id for mutant in mutants(course, lesson))
            if count < 3:
                bad += 1
                print(f"WRONG task {task.id} has {count} mutants; 3 are asked for")
    print("all as they must be" if not bad else f"{bad} not as they must be")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
