"""Grade submissions: each task in a child of a warm worker, files once a submission is done.

Nothing that a submission holds or does stops the grader: workers run the answers (worker.py), one
that dies or hangs is replaced, and its task tried once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

import minipipe
from minipipe.teach import outputs
from minipipe.teach.course import Course, Task
from minipipe.teach.judge import STARTING, TaskResult
from minipipe.teach.submissions import Student, Submission
from minipipe.teach.worker import adopt_orphans, kill_all

SEED = 1729  # of the hidden variants, where no other is given
SLACK = 60.0  # seconds over all its limits, after which a worker is taken to hang
_starting = threading.Lock()


class _Worker:
    """One worker process, and the folder in which it is started and writes."""

    def __init__(self, course: Course, folder: Path):
        self.course, self.folder, self.closed = course, folder, False
        self.process: subprocess.Popen | None = None
        folder.mkdir()

    def start(self) -> None:
        package, more = str(Path(minipipe.__file__).parents[1]), os.environ.get("PYTHONPATH")
        own = {"TMPDIR": str(self.folder),
               "PYTHONPATH": os.pathsep.join([package, *([more] if more else [])])}  # fmt: skip
        with _starting, open(self.folder / "errors.txt", "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minipipe.teach.worker", str(self.course.root)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=self.folder,
                env=os.environ | own, encoding="utf-8", start_new_session=True)  # fmt: skip

    def ask(self, task: Task, text: str, seed: int) -> dict[str, Any] | None:
        """A task's result; None where the worker died or had to be killed."""
        answer = self.folder / task.file_name
        answer.write_bytes(text.encode("utf-8", "replace"))
        job = json.dumps({"task": task.id, "answer": str(answer), "seed": seed})
        if not self.process:
            self.start()
        timer = threading.Timer(STARTING + task.limit + SLACK, self.process.kill)
        timer.start()
        try:
            print(job, file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the process and all below it."""
        if self.process:
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(self.process.pid)
                kill_all(lambda: [p for p in (*worker.children(recursive=True), worker)
                                  if p.status() != psutil.STATUS_ZOMBIE])  # fmt: skip
            self.process.kill()
            self.process.communicate()
            self.process = None


def _unjudged(task: Task, status: str, reason: str) -> dict[str, Any]:
    result = TaskResult(task.id, task.title, task.points, status=status, reason=reason)
    return result.as_dict()


@contextlib.contextmanager
def _pool(course: Course, jobs: int) -> Iterator[Callable[..., Future]]:
    """A function of (task, text, seed) that gives a Future of the result, by `jobs` workers."""
    known = {process.pid for process in psutil.Process().children()}
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def orphans() -> list[psutil.Process]:
        """What a worker that was killed has left to this process."""
        own = known | {worker.process.pid for worker in workers if worker.process}
        found = [child for child in psutil.Process().children() if child.pid not in own]
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [each for child in found for each in child.children(recursive=True)]
        return found

    def judged(task: Task, text: str, seed: int) -> dict[str, Any]:
        worker = free.get()
        try:
            for _ in range(2):
                if not worker.closed and (result := worker.ask(task, text, seed)):
                    return result
                worker.end()
                with _starting:
                    kill_all(orphans)
            return _unjudged(task, "error", "the process that judges it was ended, twice")
        finally:
            free.put(worker)

    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="minipipe-", ignore_cleanup_errors=True) as directory:
        workers = [_Worker(course, Path(directory) / str(number)) for number in range(jobs)]
        for worker in workers:
            free.put(worker)
        threads = ThreadPoolExecutor(jobs)
        try:
            yield lambda *job: threads.submit(judged, *job)
        finally:
            for worker in workers:
                worker.closed = True
                if worker.process:
                    worker.process.kill()  # whose thread then ends what is below it
            threads.shutdown(cancel_futures=True)
            for worker in workers:
                worker.end()
            kill_all(orphans)
            adopt_orphans(False)


def latest(submissions: list[Submission]) -> tuple[list[Submission], list[str]]:
    """The latest submission of each student, and a line on each that it replaces."""
    kept: dict[str, Submission] = {}
    replaced = []
    for each in sorted(submissions, key=lambda s: s.submitted):
        if each.name in kept:
            earlier = kept[each.name]
            replaced.append(f"{each.name}: {each.path.name} ({_when(each)}) replaces "
                            f"{earlier.path.name} ({_when(earlier)})")  # fmt: skip
        kept[each.name] = each
    return sorted(kept.values(), key=lambda s: s.name), replaced


def _when(submission: Submission) -> str:
    return datetime.fromtimestamp(submission.submitted).isoformat(" ", "seconds")


def tests_checksum(course: Course) -> str:
    """SHA-256 of the tests and of what says how tasks count."""
    files = [*(course.root / "tests" / "tasks").glob("test_*.py"),
             *(course.root / "lessons" / "tasks").glob("*.toml")]  # fmt: skip
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def grade(course: Course, submissions: list[Submission], tasks: list[Task], out: Path, *,
          seed: int, jobs: int, resume: bool, roster: dict[str, Student],
          told: Callable[[str, dict | None], None]) -> dict[str, Any]:  # fmt: skip
    """Grade the answers to `tasks`, write all files after each submission, and report.

    Results that `out` has of other tasks stay; with `resume` also those of the same answers, seed
    and tests. told: is called with a name after each task, and with name and record at the end.
    """
    submissions, replaced = latest(submissions)
    about = {"version": outputs.VERSION, "minipipe": minipipe.__version__, "seed": seed,
             "tests": tests_checksum(course)}  # fmt: skip
    records = outputs.read(out)
    names = {student.name for student in roster.values()}
    came = {each.name for each in submissions}
    with _pool(course, max(1, min(jobs, len(submissions) * len(tasks)))) as judged:
        if resume:
            done = [s for s in submissions if _is_same(records.get(s.name), about, s, tasks)]
            submissions = [s for s in submissions if s not in done]
            for each in (each for each in done for _ in tasks):
                told(each.name, None)
        owners = {_start(judged, each, task, seed): each for each in submissions for task in tasks}
        results: dict[str, list[dict]] = {each.name: [] for each in submissions}
        for future in as_completed(owners):
            each = owners[future]
            result = future.result()
            results[each.name].append(result | {"mark": _mark(about, each, result["task"])})
            told(each.name, None)
            if len(results[each.name]) == len(tasks):
                record = _record(course, each, _marks(about, each), records.get(each.name),
                                 results[each.name])  # fmt: skip
                records[each.name] = record
                outputs.write(out, record)
                outputs.write_all(out, _report(about, replaced, records, names, came),
                                  records, course)  # fmt: skip
                told(each.name, record)
    report = _report(about, replaced, records, names, came)
    outputs.write_all(out, report, records, course)
    return report


def _report(about: dict, replaced: list[str], records: dict[str, dict], names: set,
            came: set) -> dict:  # fmt: skip
    return about | {"submissions": [*map(outputs.brief, records.values())], "replaced": replaced,
                    "unknown": sorted({*records} - names) if names else [],
                    "without": sorted(names - {*records} - came)}  # fmt: skip


def _start(judged, submission: Submission, task: Task, seed: int) -> Future:
    if task.id in submission.answers:
        return judged(task, submission.answers[task.id], seed)
    fault = submission.faults.get(task.id)
    reason = fault or f"no file {task.file_name} and no cell %%task {task.id}"
    none: Future = Future()
    none.set_result(_unjudged(task, "error" if fault else "missing", reason))
    return none


def _marks(about: dict, submission: Submission) -> dict:
    """What a record's last grading was of."""
    answers = repr(sorted(submission.answers.items())).encode()
    return about | {"answers": hashlib.sha256(answers).hexdigest()}


def _mark(about: dict, submission: Submission, id: str) -> str:
    """A checksum of what a task's result depends on. Of each task, since some of a record's may be
    from an earlier grading."""
    what = [about, submission.answers.get(id), submission.faults.get(id)]
    return hashlib.sha256(repr(what).encode("utf-8", "replace")).hexdigest()


def _is_same(record: dict | None, about: dict, submission: Submission, tasks: list[Task]) -> bool:
    marks = {result["task"]: result.get("mark") for result in record["tasks"]} if record else {}
    return all(marks.get(task.id) == _mark(about, submission, task.id) for task in tasks)


def _record(course: Course, submission: Submission, marks: dict, earlier: dict | None,
            results: list[dict]) -> dict[str, Any]:  # fmt: skip
    """What is known of a submission: the content of result.json."""
    all_results = {r["task"]: r for r in (*(earlier["tasks"] if earlier else []), *results)}
    kept = [all_results[id] for id in course.tasks if id in all_results]
    return marks | {
        "name": submission.name, "folder": submission.folder, "email": submission.email,
        "submitted": _when(submission), "notes": submission.notes,
        "points": round(sum(result["points"] for result in kept), 2),
        "max_points": sum(result["max_points"] for result in kept), "tasks": kept,
    }  # fmt: skip
