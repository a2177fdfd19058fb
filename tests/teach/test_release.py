"""A student's tree: nothing in it gives an answer; the student's own answers bring it to life."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

import minipipe as mp
from minipipe.cli import app
from minipipe.cli_teach import numbers
from minipipe.teach import release as made
from minipipe.teach import sources
from minipipe.teach.course import Course, CourseError, find_course

COURSE = find_course(__file__)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    out = tmp_path_factory.mktemp("release") / "course"
    made.release(COURSE, out)
    return out


def inside(tree, code, answers, timeout=240):
    """What a script prints that runs in the tree, with the tree's own minipipe, as JSON."""
    environment = os.environ | {"MINIPIPE_ANSWERS": str(answers), "PYTHONPATH": str(tree)}
    environment.pop("MINIPIPE_COURSE", None)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tree, timeout=timeout,
                          env=environment, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_sources_solutions_and_the_package_s_tests_are_left_out(tree):
    names = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert not [n for n in names if n.startswith(("lessons/src", "docs", ".ci"))]
    assert all(n.startswith("tests/tasks/test_") or n.endswith(".sha256")
               for n in names if n.startswith("tests/"))  # fmt: skip
    assert {"LICENSE", "AGENTS.md", "README.md", "pyproject.toml", "environment.yml",
            "data/README.md", "minipipe/__init__.py", "lessons/tasks/06.toml",
            "tests/tasks/checksums.sha256"} <= names  # fmt: skip
    for path in tree.rglob("*.ipynb"):
        assert "BEGIN SOLUTION" not in path.read_text(encoding="utf-8")


JUDGE_ALL = """
    import json
    from concurrent.futures import ThreadPoolExecutor
    import minipipe
    from minipipe.teach.course import find_course
    from minipipe.teach import progress
    from minipipe.teach.judge import judge
    course = find_course()
    assert minipipe.__file__.startswith(str(course.root)), minipipe.__file__
    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(lambda t: judge(course, t, course.answer_file(t)),
                           course.tasks.values())]
    print(json.dumps([[r.task, r.status, r.points, r.max_points, str(r.tests)[:900]]
                      for r in found]))
"""


@pytest.mark.timeout(400)
def test_every_task_scores_nothing_as_handed_out(tree, tmp_path):
    assert {r[2] for r in inside(tree, JUDGE_ALL, tmp_path)} == {0}
    for task in COURSE.tasks.values():
        text = sources.task_text(COURSE, task.id, sources.starter)
        (tmp_path / task.file_name).write_text(text, encoding="utf-8")
    for id, status, points, *more in inside(tree, JUDGE_ALL, tmp_path):
        assert (status, points) == ("not written", 0), (id, more)


@pytest.fixture(scope="module")
def solved(tree, tmp_path_factory):
    """A folder of answers with the solutions, noted as passed."""
    folder = tmp_path_factory.mktemp("answers")
    for task in COURSE.tasks.values():
        text = sources.task_text(COURSE, task.id)
        (folder / task.file_name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.timeout(400)
def test_the_solutions_score_all_points(tree, solved):
    for id, status, points, most, tests in inside(tree, JUDGE_ALL, solved):
        assert (status, points) == ("passed", most), (id, tests)


def test_blanked_functions_use_the_student_s_answers_once_they_pass(tree, solved):
    code = """
        import json
        import minipipe as mp
        from minipipe.teach import progress
        from minipipe.teach.course import find_course
        course = find_course()
        wanted = [t for t in course.tasks.values() if t.blanked or t.gives]
        before = {}
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1"):
            try:
                mp.build(name, ranks=4, microbatches=8)
            except progress.NotWrittenYet as error:
                before[name] = str(error)
        for task in wanted:
            progress.judge_and_note(course, task)
        after = {name: float(mp.simulate(mp.build(name, ranks=4, microbatches=8)).makespan)
                 for name in mp.SCHEDULES}
        from minipipe.planning.search import search
        found = search(4, 8, memory=4, steps=10)
        print(json.dumps([before, after, float(found.makespan)]))
    """
    before, after, found = inside(tree, code, solved)
    assert set(before) == {"gpipe", "1f1b", "interleaved", "zb-h1"}
    assert "do task 6.1 first" in before["1f1b"]
    for name, makespan in after.items():
        assert makespan == mp.simulate(mp.build(name, ranks=4, microbatches=8)).makespan, name
    few = {name: after[name] for name in ("gpipe", "1f1b", "interleaved", "zb-h1")}
    assert few == {"gpipe": 33, "1f1b": 33, "interleaved": 28.5, "zb-h1": 27}
    assert found == 27 and len(after) == len(mp.SCHEDULES)


SWEEP = """
    import importlib, inspect, json, pathlib
    import minipipe as mp
    from minipipe.teach.course import find_course
    from minipipe.teach.progress import NotWrittenYet

    course = find_course()
    found, refused, tried = [], [], 0

    def attempts():
        for name, make in mp.SCHEDULES.items():
            takes = inspect.signature(make).parameters
            chunks = [{}] + [{"chunks": n} for n in (1, 2)] * ("chunks" in takes)
            limits = [{}] + [{"memory_limit": n} for n in (2, 4)] * ("memory_limit" in takes)
            for more in [{**a, **b} for a in chunks for b in limits]:
                yield name, more, make

    for task in course.tasks.values():
        if not any("schedules" in name for name in task.blanked):
            continue
        tests = importlib.import_module(f"test_{task.lesson:02d}")
        marked = [v for v in vars(tests).values() for m in getattr(v, "pytestmark", [])
                  if m.kwargs.get("task") == task.id and m.kwargs["name"] == "right order"]
        assert marked, task.id
        extra = set(inspect.signature(marked[0]).parameters) - {"answer", "right", "sizes", "rng"}
        assert not extra, extra
        for name, more, make in attempts():
            for way in ("build", "function"):
                tried += 1
                def answer(ranks, microbatches, *rest, **keys):
                    if rest:
                        keys["chunks"] = rest[0]
                    keys = {**keys, **more}
                    if way == "build":
                        return mp.build(name, ranks=ranks, microbatches=microbatches, **keys).rows
                    return make(ranks, microbatches, **keys)
                given = {"answer": answer, "right": lambda **_: None,
                         "sizes": lambda *cases, only=None: list(cases), "rng": None}
                try:
                    for test in marked:
                        test(**{k: given[k] for k in inspect.signature(test).parameters})
                    found.append([task.id, name, str(more), way])
                except NotWrittenYet:
                    refused.append(name)
                except (AssertionError, ValueError, TypeError):
                    pass
    print(json.dumps([found, sorted(set(refused)), tried]))
"""


def test_no_schedule_of_the_tree_is_an_assigned_answer(tree, tmp_path):
    """Each named schedule, through build and called directly, put to the tests of each task."""
    code = f"import sys; sys.path.insert(0, 'tests/tasks')\n{textwrap.dedent(SWEEP)}"
    found, refused, tried = inside(tree, code, tmp_path)
    assert found == []
    assert {"gpipe", "1f1b", "interleaved", "zb-h1"} <= set(refused)
    assert tried > 100


def test_the_assigned_code_is_not_in_the_tree(tree):
    for task in COURSE.tasks.values():
        for name in (*task.blanked, *task.removes):
            module, _, function = name.partition(":")
            path = (tree / module.replace(".", "/")).with_suffix(".py")
            text = path.read_text(encoding="utf-8")
            body = text.partition(f"def {function}(")[2].partition("\ndef ")[0]
            assert "minipipe.teach.progress import" in body, name
            original = (COURSE.root / path.relative_to(tree)).read_text(encoding="utf-8")
            before = original.partition(f"def {function}(")[2].partition("\ndef ")[0]
            kept = set(body.partition("minipipe.teach.progress import")[2].split("\n"))
            lost = before.rpartition('"""')[2].split("\n")
            assert not {line for line in lost if len(line.strip()) > 12} & kept, name
            assert "```" not in body, name


def test_what_would_yield_an_answer_says_which_task_comes_first(tree, tmp_path):
    code = """
        import json
        from minipipe.teach.progress import NotWrittenYet
        import minipipe as mp
        said = {}
        for name, more in [("interleaved", {"chunks": 1}), ("zb-auto", {})]:
            try:
                mp.build(name, ranks=4, microbatches=8, **more)
                said[name] = "built"
            except NotWrittenYet as error:
                said[name] = str(error)
        print(json.dumps(said))
    """
    said = inside(tree, code, tmp_path)
    assert all("do task" in text for text in said.values()), said


def test_commands_tell_it_in_a_line(tree, tmp_path):
    environment = os.environ | {"MINIPIPE_ANSWERS": str(tmp_path), "PYTHONPATH": str(tree)}

    def command(*words):
        return subprocess.run([sys.executable, "-m", "minipipe", *words], cwd=tree, timeout=120,
                              env=environment, capture_output=True, text=True)  # fmt: skip

    shown = command("show", "1f1b", "--ranks", "2", "--microbatches", "3")
    assert shown.returncode == 2
    assert shown.stderr.strip().count("\n") == 0
    assert "do task 6.1 first" in shown.stderr
    assert command("show", "chimera", "--ranks", "2", "--microbatches", "4").returncode == 0
    assert "1f1b is not among them: do task 6.1 first" in command("show", "--all").stdout
    told = json.loads(command("status", "--json").stdout)
    assert (told["points"], told["next"]) == (0, "1.1")
    test = tree / "tests" / "tasks" / "test_06.py"
    original = test.read_text(encoding="utf-8")
    test.write_text(original + "\n")
    assert "test_06.py is not as it was handed out" in command("status").stderr
    test.write_text(original)
    assert "student's tree" in command("lessons").stderr


def test_bad_arguments(tmp_path, tree):
    with pytest.raises(CourseError, match="no lesson 99; there are 1, "):
        made.release(COURSE, tmp_path / "a", [99])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(CourseError, match="is not empty"):
        made.release(COURSE, tmp_path / "b")
    with pytest.raises(CourseError, match="a student's tree already"):
        made.release(Course(tree), tmp_path / "c")
    with pytest.raises(CourseError, match="no task"):
        made.release(COURSE, tmp_path / "c", [])
    with pytest.raises(CourseError, match="is no folder"):
        made.release(COURSE, tmp_path / "b" / "mine.txt")
    with pytest.raises(CourseError, match="a part of the next release"):
        made.release(COURSE, COURSE.root / "minipipe" / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("arguments", "message"), [
    (["release", "--out", "a", "--lessons", ""], "--lessons '' is not such as 1-6"),
    (["release", "--out", "a", "--lessons", "4-1"], "--lessons '4-1' is not such as 1-6"),
    (["release", "--out", "a", "--lessons", "1,99"], "no lesson 99; there are 1, 2"),
    (["lessons", "99", "--solutions", "a"], "no lesson 99; there are 1, 2"),
])  # fmt: skip
def test_a_wrong_command_is_refused_in_a_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and message in result.stderr and not [*tmp_path.iterdir()]


def test_a_span_takes_the_lessons_that_there_are():
    first, *_, last = COURSE.lessons
    assert numbers(f"{first}-{last}", COURSE) == [*COURSE.lessons]
    assert numbers(f"{last}, {first}-2", COURSE) == [1, 2, last]


def test_a_lesson_s_toml_with_a_mistake_is_told_in_a_line(tmp_path, monkeypatch):
    (tmp_path / "lessons" / "tasks").mkdir(parents=True)
    (tmp_path / "lessons" / "tasks" / "01.toml").write_text("[lesson]\ntitle = \n")
    monkeypatch.chdir(tmp_path)
    for name in (["status"], ["hint", "1.1"], ["watch", "--once"], ["lessons"]):
        result = CliRunner().invoke(app, name)
        assert result.exit_code == 2 and "01.toml: Invalid value" in result.stderr


@pytest.mark.parametrize(("line", "words"), [
    ('points = "10"', "points = '10' must be a whole number"),
    ("points = true", "points = True must be a whole number"),
    ('hints = "look"', "hints = 'look' must be a list, each part text"),
    ("hints = [1]", r"hints = \[1\] must be a list, each part text"),
    ("cases = [1]", r"cases = \[1\] must be a list, each part a table"),
    ('limit = "2"', "limit = '2' must be a number"),
    ("name = []", r"name = \[\] must be text"),
    ("pionts = 1", "pionts is not known here; known are id, title, "),
])  # fmt: skip
def test_a_mistyped_value_of_a_task_is_told_in_a_line(tmp_path, line, words):
    (tmp_path / "lessons" / "tasks").mkdir(parents=True)
    task = {"id": '"1.1"', "title": '"a"', "name": '"f"', "points": "1", "hints": "[]"}
    task = [f"{k} = {v}" for k, v in task.items() if k != line.split()[0]]
    head = ["[lesson]", 'title = "t"', "minutes = 1", "builds_on = []", "[[task]]"]
    (tmp_path / "lessons/tasks/01.toml").write_text("\n".join([*head, *task, line]))
    with pytest.raises(CourseError, match=words):
        _ = Course(tmp_path).tasks


def check_later(tree, answers):
    """What lessons that aren't assigned will ask for is not shown, and works for small sizes."""
    later = [task for task in COURSE.tasks.values() if task.lesson not in (1, 6)]
    for name in (name for task in later for name in task.blanked):
        module, _, function = name.partition(":")
        text = (tree / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
        body = text.partition(f"def {function}(")[2].partition("\ndef ")[0].rpartition('"""')[2]
        assert len(body.strip().splitlines()) <= 5, name
    code = """
        import json
        import minipipe as mp
        names = ("naive", "gpipe", "zb-h1", "zb-h2")
        spans = [float(mp.simulate(mp.build(n, ranks=4, microbatches=8)).makespan) for n in names]
        print(json.dumps([spans, mp.partition.balance([1, 1, 1, 9], 2)]))
    """
    assert inside(tree, code, answers) == [[96, 33, 27, 27], [2, 2]]


def test_some_lessons_only(tmp_path):
    made.release(COURSE, tmp_path / "out", [6])
    assert "`minipipe hint 6.1`" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert not (tmp_path / "out" / "tests" / "tasks" / "test_07.py").exists()
    one = (tmp_path / "out/minipipe/schedules/one_f_one_b.py").read_text(encoding="utf-8")
    assert 'assigned("6.1"' in one
    chimera = (tmp_path / "out/minipipe/schedules/bidirectional.py").read_text(encoding="utf-8")
    whole = (COURSE.root / "minipipe/schedules/bidirectional.py").read_text(encoding="utf-8")
    assert chimera == whole
    check_later(tmp_path / "out", tmp_path)
    code = """
        import json
        import minipipe as mp
        t = mp.simulate(mp.build("interleaved", ranks=4, microbatches=8))
        print(json.dumps(float(t.makespan)))
    """
    assert inside(tmp_path / "out", code, tmp_path) == 28.5  # from its stored tables
