"""The grader: right points for every kind of submission, files that usual readers read."""

import csv
import html.parser
import io
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import unicodedata
import zipfile
from types import SimpleNamespace
from xml.etree import ElementTree

import psutil
import pytest
from adversaries import ANSWERS, RIGHT, TALKS, TESTS, TOML
from typer.testing import CliRunner

from minipipe.cli import app
from minipipe.teach import outputs, submissions
from minipipe.teach.course import Course, CourseError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="its submissions fork")
FAKE = ("def pytest_runtest_makereport():\n    raise SystemExit(0)\n"
        "def pytest_collection_modifyitems(items):\n    items.clear()\n")  # fmt: skip


def make_course(root):
    for name, text in [("lessons/tasks/01.toml", TOML), ("tests/tasks/test_01.py", TESTS)]:
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    return Course(root)


def hand_in(folder, answer, task="01_1"):
    path = folder / "answers" / f"task_{task}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(answer if isinstance(answer, bytes) else answer.encode())
    return path


def command(*arguments):
    return [sys.executable, "-m", "minipipe", "grade", *map(str, arguments)]


def run(*arguments, cwd):
    result = subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True,
                            timeout=280)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result


def odd_files(base):
    """Submissions whose files are what no answer should be: name -> points, status."""
    for name in ("link", "fifo", "folder"):
        (base / name / "answers").mkdir(parents=True)
    (base / "link/answers/task_01_1.py").symlink_to(base / "right/answers/task_01_1.py")
    os.mkfifo(base / "fifo/answers/task_01_1.py")
    (base / "folder/answers/task_01_1.py").mkdir()
    hand_in(base / "latin", "# größer\n".encode("latin-1") + RIGHT.encode())
    hand_in(base / "empty", " \n")
    hand_in(base / "huge", RIGHT + "#" * 1_100_000)
    hand_in(base / "mark", b"\xef\xbb\xbf" + RIGHT.encode())
    (base / "nothing").mkdir()
    faults = dict.fromkeys(["link", "fifo", "folder", "latin", "empty", "huge"], (0, "error"))
    return faults | {"mark": (10, "passed"), "nothing": (0, "missing")}


def forgers(base):
    """Wrong answers with files beside them that would make them pass, if they were read."""
    for name in ("conftest", "edited test"):
        hand_in(base / name, "def double(x):\n    return x\n")
    for place in ("", "answers/", "tests/", "tests/tasks/"):
        folder = base / "conftest" / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "conftest.py").write_text(FAKE)
        (folder / "sitecustomize.py").write_text("import os; os._exit(0)\n")
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    easy = base / "edited test" / "tests" / "tasks" / "test_01.py"
    easy.parent.mkdir(parents=True)
    easy.write_text(TESTS.replace("2 * x", "x").replace("2000", "1000").replace("-6", "-3"))
    (base / "edited test" / "result.json").write_text('{"version": 1, "points": 10}')
    return {"conftest": (0, "failed"), "edited test": (0, "failed")}


def notebook(*cells):
    entries = [{"cell_type": "code", "metadata": {}, "source": cell} for cell in cells]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": entries})


def notebooks_and_zips(base):
    (base / "notebook").mkdir()
    (base / "notebook/a.ipynb").write_text(notebook(
        "%%task 1.1\ndef double(x): return 0\n", ["%%task 1.1\n", "def double(x):\n", "    ",
                                                  "return x + x"], "%%task 9.9\n", 7))  # fmt: skip
    (base / "notebook/b.ipynb").write_text('{"cells": [')
    with zipfile.ZipFile(base / "zipped.zip", "w") as archive:
        archive.writestr("homework/answers/task_01_1.py", RIGHT)
        archive.writestr("../../task_01_1.py", "import os; os._exit(1)")
        archive.writestr("__MACOSX/answers/task_01_1.py", "\0\0")
    link = zipfile.ZipInfo("answers/task_01_1.py")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(base / "linked.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    (base / "broken.zip").write_bytes(b"PK\3\4 no zip")
    (base / "summary.md.zip").symlink_to(base / "nowhere")
    os.mkfifo(base / "pipe.zip")
    none = dict.fromkeys(["broken", "summary.md", "pipe"], (0, "missing"))
    return {"notebook": (10, "passed"), "zipped": (10, "passed"), "linked": (0, "error"), **none}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """One command over all of them; what it said, and what each had to score."""
    root = tmp_path_factory.mktemp("grade")
    course, base, out = make_course(root / "course"), root / "handed in", root / "out"
    for name, (answer, _, _) in ANSWERS.items():
        hand_in(base / name, answer)
    for name, (answer, _, _) in TALKS.items():
        hand_in(base / name, answer, "01_2")
    expected = {name: ("1.1", points, status) for name, (_, points, status) in ANSWERS.items()}
    expected |= {name: ("1.2", points, status) for name, (_, points, status) in TALKS.items()}
    for make in (odd_files, forgers, notebooks_and_zips):
        expected |= {name: ("1.1", *right) for name, right in make(base).items()}
    late = hand_in(base / "late", "def double(x):\n    return x\n")
    os.utime(late, (0, 0))
    (root / "roster.csv").write_text(
        "Folder;Name;Email;Submitted\nright;Ana <Nguyễn>;a@x.org;2026-01-02\n"
        "late;Ana <Nguyễn>;a@x.org;2026-01-01T10:00\nabsent;Bo | Lee;b@x.org;\n", encoding="utf-8")
    began = time.monotonic()
    said = run(base, "--out", out, "--course", course.root, "--roster", root / "roster.csv",
               "--jobs", "2", "--json", cwd=base / "conftest")  # fmt: skip
    expected["Ana <Nguyễn>"] = expected.pop("right")
    return SimpleNamespace(root=root, base=base, out=out, course=course, expected=expected,
                           report=json.loads(said.stdout), said=said.stderr,
                           records=outputs.read(out), seconds=time.monotonic() - began)  # fmt: skip


def result_of(graded, name, task="1.1"):
    return next(r for r in graded.records[name]["tasks"] if r["task"] == task)


NAMES = [*(name for name in (*ANSWERS, *TALKS) if name != "right"), "Ana <Nguyễn>", "link", "fifo",
         "folder", "latin", "empty", "huge", "mark", "nothing", "conftest", "edited test",
         "notebook", "zipped", "linked", "broken", "summary.md", "pipe"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_points(graded, name):
    task, points, status = graded.expected[name]
    result = result_of(graded, name, task)
    assert result["points"] == points and result["status"] in status.split(" or "), result
    assert status == "passed" or result["reason"] or outputs.first_wrong(result)["message"]
    assert max(len(test["message"]) for test in result["tests"] or [{"message": ""}]) < 11_000


def test_all_are_there_and_no_process_is_left(graded):
    assert {*graded.expected} == {*NAMES} == {*graded.records}
    left = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and (
        "98765" in p.info["cmdline"] or str(graded.root) in " ".join(p.info["cmdline"]))]
    assert not left


def test_reasons(graded):
    def reason(name, task="1.1"):
        return result_of(graded, name, task)["reason"]

    assert reason("200 processes") == "it had more than 48 processes at once"
    assert reason("200 daemons") == reason("200 processes")
    assert result_of(graded, "100 MB printed")["output"].endswith("more bytes")
    assert reason("endless loop").startswith("it took longer than 6 s; it stood at line 4: while")
    assert "SIGALRM" in reason("alarm") and "SIGSEGV" in reason("crash")
    assert "UTF-8" in reason("latin") and "link" in reason("link") and "1 MB" in reason("huge")
    assert "plain file" in reason("fifo") and "folder" in reason("folder")
    message = outputs.first_wrong(result_of(graded, "50 GB"))["message"]
    assert "MemoryError" in message and "line 4 of your answer" in message
    assert any("2 cells" in note for note in graded.records["notebook"]["notes"])
    assert any("b.ipynb" in note for note in graded.records["notebook"]["notes"])
    assert any("can't be read" in note for note in graded.records["broken"]["notes"])


def test_report_and_progress(graded):
    report = graded.report
    assert report["seed"] == 1729 and report["version"] == 1
    assert report["without"] == ["Bo | Lee"]
    assert "wrong" in report["unknown"] and "Ana <Nguyễn>" not in report["unknown"]
    assert report["replaced"] == [
        "Ana <Nguyễn>: right (2026-01-02 00:00:00) replaces late (2026-01-01 10:00:00)"]
    mine = next(s for s in report["submissions"] if s["name"] == "Ana <Nguyễn>")
    assert (mine["points"], mine["max_points"], mine["email"]) == (10, 15, "a@x.org")
    assert mine["tasks"] == {"1.1": 10, "1.2": 0}
    assert "endless loop: 6 of 15 points" in graded.said


def folders(graded):
    return {name: graded.out / outputs.folder_name(name) for name in graded.records}


def test_junit_is_read_back(graded):
    for name, folder in folders(graded).items():
        suites = ElementTree.parse(folder / "junit.xml").getroot().findall("testsuite")
        points = {s.get("name").split()[0]: float(s.find("properties/property[@name='points']")
                                                   .get("value")) for s in suites}
        assert points == {r["task"]: r["points"] for r in graded.records[name]["tasks"]}
        for suite in suites:
            assert int(suite.get("tests")) == len(suite.findall("testcase"))
            assert int(suite.get("failures")) == len(suite.findall("testcase/failure"))
            assert int(suite.get("errors")) == len(suite.findall("testcase/error"))
    right = ElementTree.parse(folders(graded)["Ana <Nguyễn>"] / "junit.xml").getroot()
    assert [case.get("name") for case in right[0].iter("testcase")] == [
        "test_small", "test_large", "test_negative"]


def test_gradescope_is_read_back(graded):
    for name, folder in folders(graded).items():
        content = json.loads((folder / "results.json").read_text())
        assert {*content} <= {
            "score", "execution_time", "output", "visibility", "stdout_visibility", "extra_data",
            "tests", "leaderboard"}  # fmt: skip
        assert content["visibility"] == "visible" and content["stdout_visibility"] == "hidden"
        assert content["score"] == graded.records[name]["points"]
        assert sum(test["score"] for test in content["tests"]) == pytest.approx(content["score"])
        assert sum(test["max_score"] for test in content["tests"]) == 15
        for test in content["tests"]:
            assert {*test} == {"score", "max_score", "status", "name", "number", "output",
                               "output_format", "tags", "visibility"}  # fmt: skip
            assert test["status"] == ("passed" if test["score"] else "failed")
            assert isinstance(test["score"], (int, float)) and isinstance(test["tags"], list)
            assert test["output_format"] == "text" and isinstance(test["output"], str)


def test_own_json_is_read_back(graded):
    for name, folder in folders(graded).items():
        record = json.loads((folder / "result.json").read_text())
        assert record == graded.records[name]
        assert {*record} == {"version", "minipipe", "seed", "tests", "answers", "name", "folder",
                             "email", "submitted", "notes", "points", "max_points",
                             "tasks"}  # fmt: skip
        assert record["version"] == 1 and len(record["tests"]) == 64


class Page(html.parser.HTMLParser):
    """Tags that are open in order, those that were seen, and all text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.images, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_pages_are_read_back(graded):
    pages = {name: Page((folder / "page.html").read_text("utf-8"))
             for name, folder in folders(graded).items()}  # fmt: skip
    for name, page in pages.items():
        assert not page.open and "script" not in page.seen and name in page.text
        assert "secret hint" not in page.text
    assert "10 of 15 points" in pages["Ana <Nguyễn>"].text
    assert "expected: 2\nyours:    1" in pages["wrong"].text
    assert "]]><script>&" in pages["odd message"].text
    assert "✓ small (60 %)" in pages["endless loop"].text


def test_csv_is_read_back(graded):
    rows = list(csv.DictReader(io.StringIO((graded.out / "grades.csv").read_text("utf-8"))))
    assert {row["name"]: float(row["points"]) for row in rows} == {
        name: record["points"] for name, record in graded.records.items()}  # fmt: skip
    assert all(float(row["1.1"]) + float(row["1.2"]) == float(row["lesson 1"]) for row in rows)
    assert outputs._harmless("=1+1") == "'=1+1"


def test_summary_is_a_table(graded):
    text = (graded.out / "summary.md").read_text("utf-8")
    lines = text.replace("\\|", "").splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables} == {4}
    assert r"| Ana \<Nguyễn\> | 10 | 10 |" in text and r"- Bo \| Lee" in text
    for title in ("Most failed tasks", "Replaced by a later", "Not in the roster", "Notes"):
        assert f"## {title}" in text
    assert "seed 1729" in text


def test_summary_leaves_out_lessons_that_were_not_graded(graded, tmp_path):
    course = make_course(tmp_path)
    (tmp_path / "lessons/tasks/02.toml").write_text(TOML.replace('id = "1.', 'id = "2.'))
    (record,) = [r for r in graded.records.values() if r["name"] == "wrong"]
    report = {key: record[key] for key in ("minipipe", "seed", "tests")}
    report |= {"replaced": [], "unknown": [], "without": []}
    text = outputs.summary(report, {"wrong": record}, course)
    assert [*course.lessons] == [1, 2] and "| student | points | lesson 1 |\n" in text


def test_one_task_again(graded, tmp_path):
    """Other tasks keep their results, also where the answers would now be wrong."""
    folder, out = tmp_path / "right talk", tmp_path / "out"
    shutil.copytree(graded.out / "right talk", out / "right talk")
    hand_in(folder, RIGHT)
    hand_in(folder, TALKS["deadlock"][0], "01_2")
    said = run(folder, "--out", out, "--course", graded.course.root, "--task", "1.1", "--seed", "7",
               "--json", cwd=tmp_path)  # fmt: skip
    report = json.loads(said.stdout)
    assert [s["tasks"] for s in report["submissions"]] == [{"1.1": 10, "1.2": 5}]
    assert report["seed"] == 7 and "seed 7" in (out / "summary.md").read_text()
    rows = list(csv.DictReader(io.StringIO((out / "grades.csv").read_text())))
    row = {"name": "right talk", "1.1": "10.0", "1.2": "5.0"}
    assert [{key: each[key] for key in row} for each in rows] == [row]


def test_resumed_after_one_task_alone(tmp_path):
    """What another grading of one task left as it was is graded again where its answer changed."""
    course = make_course(tmp_path / "course")
    hand_in(tmp_path / "s", RIGHT)
    hand_in(tmp_path / "s", "def talk(", "01_2")
    arguments = [tmp_path / "s", "--out", tmp_path / "out", "--course", course.root, "--seed", "0"]
    run(*arguments, cwd=tmp_path)
    hand_in(tmp_path / "s", TALKS["deadlock"][0], "01_2")
    run(*arguments, "--task", "1.1", cwd=tmp_path)
    before = outputs.read(tmp_path / "out")["s"]["tasks"][1]
    run(*arguments, "--resume", cwd=tmp_path)
    after = outputs.read(tmp_path / "out")["s"]["tasks"][1]
    assert "SyntaxError" in str(before) and "SyntaxError" not in str(after)


def test_interrupted_and_resumed(graded, tmp_path):
    """Ctrl-C leaves what is done and no process; --resume grades only the rest, however a
    submission ends."""
    for number in range(30):
        hand_in(tmp_path / "sixty" / f"s{number:02}", RIGHT + f"# {number}\n")
    hand_in(tmp_path / "sixty" / "s01", "import os\nos.kill(os.getppid(), 9)\n")
    out = tmp_path / "out"
    arguments = [tmp_path / "sixty", "--out", out, "--course", graded.course.root, "--task", "1.1",
                 "--jobs", "2", "--resume"]  # fmt: skip
    first = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, cwd=tmp_path)
    end = time.monotonic() + 60
    while len(outputs.read(out)) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    below = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGINT)
    said = first.communicate(timeout=30)[1]
    assert first.returncode == 130 and b"--resume grades the rest" in said
    psutil.wait_procs(below, timeout=5)
    assert not [p for p in below if p.is_running()]
    done = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    assert 3 <= len(done) < 30 and len((out / "grades.csv").read_text().splitlines()) >= 3
    run(*arguments, cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in done} == done
    points = [record["points"] for record in outputs.read(out).values()]
    assert len(points) == 30 and points.count(10) == 29


def test_what_counts_as_a_submission(tmp_path):
    course, roster = make_course(tmp_path / "course"), {}
    hand_in(tmp_path / "all" / "ana" / "homework", RIGHT)
    hand_in(tmp_path / "all" / "bo", RIGHT)
    (tmp_path / "all" / "notes.txt").write_text("")
    (tmp_path / "all" / "cy.zip").write_bytes(b"")
    found = submissions.expand([tmp_path / "all"], roster, tmp_path / "all" / "bo")
    assert [path.name for path in found] == ["ana", "cy.zip"]
    one = submissions.expand([tmp_path / "all" / "ana"], roster, tmp_path)
    assert [submissions.read(path, course, roster).folder for path in one] == ["ana"]
    assert submissions.read(one[0], course, roster).answers == {"1.1": RIGHT}
    (tmp_path / "cells").mkdir()
    for name in ("x", "y"):
        (tmp_path / "cells" / f"{name}.ipynb").write_text(notebook("%%task 1.1\n" + RIGHT))
    assert len(submissions.expand([tmp_path / "cells"], roster, tmp_path)) == 1
    loose = submissions.expand([*(tmp_path / "cells").iterdir()], roster, tmp_path)
    assert {submissions.read(path, course, roster).name for path in loose} == {"x", "y"}
    for out, message in [("", "is what is to be graded"), ("ana/graded", "lies in ana, which")]:
        with pytest.raises(CourseError, match=message):
            submissions.expand([tmp_path / "all"], roster, tmp_path / "all" / out)


@pytest.mark.parametrize(("text", "message"), [
    ("ana,Ana\n", "line 1: the columns folder and name"),
    ("", "line 1: the columns folder and name"),
    ("folder,name\na,Ana\nb,\n", "line 3: no name"),
    ("folder,name\na,Ana\na,Bo\n", "line 3: the folder 'a' stands there twice"),
    ("folder,name,submitted\na,Ana,yesterday\n", "line 2: submitted is a time"),
])  # fmt: skip
def test_roster_errors_name_the_line(tmp_path, text, message):
    (tmp_path / "roster.csv").write_text(text)
    with pytest.raises(CourseError, match=message):
        submissions.read_roster(tmp_path / "roster.csv")


@pytest.mark.parametrize("text", [
    "\ufefffolder;name\r\nNguyễn;Ánh\r\n;\r\n", "Folder\tName\n Nguyễn \tÁnh\n\n",
])  # fmt: skip
def test_roster_as_spreadsheets_and_other_systems_write_it(tmp_path, text):
    """With ; or tabs, with empty rows, accents apart or not, and blanks around a folder's name."""
    (tmp_path / "roster.csv").write_text(unicodedata.normalize("NFC", text))
    roster = submissions.read_roster(tmp_path / "roster.csv")
    course = make_course(tmp_path / "course")
    apart = tmp_path / "all" / unicodedata.normalize("NFD", "Nguyễn ")
    hand_in(apart / "homework", RIGHT)
    found = submissions.expand([tmp_path / "all"], roster, tmp_path)
    read = [submissions.read(path, course, roster) for path in found]
    assert [each.name for each in read] == ["Ánh"] and read[0].answers == {"1.1": RIGHT}


def test_roster_that_is_no_text(tmp_path):
    (tmp_path / "roster.csv").write_bytes("folder,name\na,Lê\n".encode("latin-1"))
    with pytest.raises(CourseError, match='not UTF-8 text: save it as "CSV UTF-8"'):
        submissions.read_roster(tmp_path / "roster.csv")


def test_students_of_one_name_are_told_apart_by_email(tmp_path):
    (tmp_path / "roster.csv").write_text(
        "folder,name,email\na,Minh,1@x.org\nb,Minh,2@x.org\na2,Minh,1@x.org\n")
    names = [s.name for s in submissions.read_roster(tmp_path / "roster.csv").values()]
    assert names == ["Minh (1@x.org)", "Minh (2@x.org)", "Minh (1@x.org)"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere"], "there is no nowhere"),
    ([".", "--task", "7.7"], "there is no task '7.7'"),
    ([".", "--task", ""], "there is no task ''"),
    ([".", "--lessons", "1-x"], "--lessons '1-x' is not such as 1-6"),
    ([".", "--lessons", "1-0"], "--lessons '1-0' is not such as 1-6"),
    ([".", "--lessons", ""], "--lessons '' is not such as 1-6"),
    ([".", "--lessons", "8"], "no lesson 8; there are 1"),
    ([".", "--lessons", "1", "--task", "1.1"], "give one of them"),
    ([".", "--out", "."], "--out . is what is to be graded"),
    ([".", "--out", "lessons/course.toml/x"], "--out lessons/course.toml/x: not a directory"),
    ([".", "--out", "course.txt"], "--out course.txt: file exists"),
    ([".", "--roster", "none.csv"], "none.csv"),
    ([".", "--course", "lessons"], "is not a course"),
])  # fmt: skip
def test_bad_arguments(tmp_path, monkeypatch, arguments, message):
    make_course(tmp_path)
    for name in ("course.txt", "lessons/course.toml"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["grade", "--out", "out", "--course", ".", *arguments])
    assert result.exit_code == 2 and message in result.stderr
