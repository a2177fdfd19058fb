"""Every solution gets all points, every starter none, every wrong answer fails a test."""

import importlib.util
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from minipipe.teach import mutants, sources
from minipipe.teach.course import find_course

COURSE = find_course(__file__)
LESSONS = [*range(1, 12), 16]


def test_the_plan_of_the_course_is_there():
    assert [*COURSE.lessons] == LESSONS
    assert len(COURSE.tasks) >= 36
    for lesson in COURSE.lessons.values():
        assert 20 <= lesson.minutes <= 40
        assert len(lesson.tasks) >= 3, lesson.number
        assert all(before in COURSE.lessons and before < lesson.number
                   for before in lesson.builds_on)  # fmt: skip


@pytest.mark.parametrize("id", COURSE.tasks)
def test_a_task_has_points_three_hints_and_parts_that_add_up(id):
    task = COURSE.tasks[id]
    assert 5 <= task.points <= 20
    assert len(task.hints) == 3
    assert all(len(hint) > 20 for hint in task.hints)
    shares = parts(task.lesson)[id]
    assert all(len(of_part) == 1 for of_part in shares.values()), "tests of a part name one share"
    assert sum(share for of_part in shares.values() for share in of_part) == 100
    assert 'raise NotImplementedError("' in sources.task_text(COURSE, id, sources.starter)


def parts(lesson):
    """Task -> part -> shares, from the marks of a lesson's tests."""
    path = COURSE.root / "tests" / "tasks" / f"test_{lesson:02d}.py"
    spec = importlib.util.spec_from_file_location(f"tasks_{lesson}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = defaultdict(lambda: defaultdict(set))
    for value in vars(module).values():
        for mark in getattr(value, "pytestmark", []):
            if mark.name == "part":
                found[mark.kwargs["task"]][mark.kwargs["name"]].add(mark.kwargs["share"])
    assert set(found) == {task.id for task in COURSE.lessons[lesson].tasks}
    return found


@pytest.mark.parametrize("id", COURSE.tasks)
def test_solution_starter_and_wrong_answers(id):
    task = COURSE.tasks[id]
    answers = [each for each in mutants.candidates(COURSE, task.lesson) if each.task.id == id]
    kinds = Counter(each.why if each.why in ("solution", "starter") else "wrong"
                    for each in answers)  # fmt: skip
    assert kinds["solution"] == kinds["starter"] == 1
    assert kinds["wrong"] >= 3
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(lambda a: mutants.judge_text(COURSE, task, a.text, seed=7), answers)]
    shown = mutants.judge_text(COURSE, task, answers[0].text, seed=0)
    assert (shown.status, shown.points) == ("passed", task.points), shown
    for answer, result in zip(answers, results, strict=True):
        if answer.is_right:
            assert (result.status, result.points) == ("passed", task.points), result
        elif answer.why == "starter":
            assert (result.status, result.points) == ("not written", 0), result
        else:
            assert result.points < task.points, f"not found: {answer.why}"
            wrong = [test for test in result.tests if test["status"] == "failed"]
            assert wrong or result.status in ("timeout", "error"), f"{answer.why}: {result}"
            assert all(test["message"] for test in wrong), answer.why
