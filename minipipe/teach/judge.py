"""Judge one answer in a child process: pristine tests, limits, and a result that it can't forge.

The parent watches: a child that takes too long, dies or floods its output loses what it has not
yet shown. Results come over a pipe, one test at a time; nothing that an answer prints or writes
counts. An answer runs with your rights: this is no sandbox (docs/teaching.md says what is).
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minipipe.ranks.launch import warm
from minipipe.teach import answers
from minipipe.teach.course import Course, Task

MOST_OUTPUT = 20_000  # characters of an answer's output that are kept
MOST_PROCESSES = 48  # that an answer may have at once, its ranks among them
MOST_MEMORY = 8 << 30  # bytes of data a process may have
# What a child finds imported already.
PRELOADED = ("pytest", "jupytext", "minipipe", "minipipe.pipeline", "minipipe.plot",
             "matplotlib.backends.backend_agg", "minipipe.teach.plugin", "minipipe.teach.judge",
             "minipipe.teach.pictures", "minipipe.teach.sources")  # fmt: skip
ENOUGH = 10_000_000  # bytes of output after which it is ended


@dataclass
class TaskResult:
    """What one answer scored. status: passed, failed, not written, missing, error (the child died
    or could not start) or timeout. parts: name, share in percent, passed. tests: name, part,
    status, message, seconds, picture (PNG or None)."""

    task: str
    title: str
    max_points: float
    points: float = 0.0
    status: str = "error"
    reason: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    seconds: float = 0.0

    def as_dict(self, pictures: bool = False) -> dict[str, Any]:
        content = asdict(self)
        if not pictures:
            for test in content["tests"]:
                del test["picture"]
        return content


def judge(course: Course, task: Task, answer: Path | None, seed: int = 0,
          watch=None) -> TaskResult:  # fmt: skip
    """Run the task's tests on the answer's file in a child process, and say what it scored.

    seed: 0 for the tests a student sees, any other adds hidden cases of the same tests. watch: a
    function of the child's pid, called some times a second; a text it returns ends the child.
    """
    result = TaskResult(task.id, task.title, task.points)
    if answer is None or not answer.is_file():
        result.status, result.reason = "missing", f"no file {task.file_name}"
        return result
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minipipe-", ignore_cleanup_errors=True) as directory:
        copy = Path(directory) / task.file_name
        shutil.copyfile(answer, copy)
        shutil.copyfile(course.test_file(task), Path(directory) / course.test_file(task).name)
        with _Child(course, task, copy, seed) as child:
            child.run(began + task.limit, watch)
    result.seconds = time.monotonic() - began
    _settle(result, child, task, course)
    return result


def _settle(result: TaskResult, child: _Child, task: Task, course: Course) -> None:
    result.tests, result.output = child.tests, child.output()
    tests = {test["name"]: test for test in child.tests}
    parts: dict[str, dict[str, Any]] = {}
    for collected in child.collected:
        at = parts.setdefault(collected["part"], {"name": collected["part"],
                              "share": collected["share"], "passed": True})  # fmt: skip
        at["passed"] &= tests.get(collected["name"], {}).get("status") == "passed"
    result.parts = list(parts.values())
    share = sum(part["share"] for part in result.parts if part["passed"])
    result.points = round(task.points * share / 100, 2)
    result.reason = child.reason
    states = {test["status"] for test in child.tests}
    if child.status:
        result.status = child.status
    elif not result.parts:
        result.status = "error"
        result.reason = f"{course.test_file(task).name} has no test of task {task.id}"
    elif states == {"passed"}:
        result.status = "passed"
    else:
        result.status = "not written" if "not written" in states else "failed"


class _Child:
    """One child process and all that it says."""

    def __init__(self, course: Course, task: Task, answer: Path, seed: int):
        self.task, self.answer = task, answer
        self.collected: list[dict] = []
        self.tests: list[dict] = []
        self.ended = False
        self.status = self.reason = ""
        self._output, self._seen = bytearray(), 0
        self.stack = answer.with_suffix(".stack")
        method = "forkserver" if hasattr(os, "fork") else "spawn"
        context = multiprocessing.get_context(method)
        self.link, theirs = context.Pipe(duplex=False)
        self.out, their_out = context.Pipe(duplex=False)
        server = None
        if method == "forkserver":
            warm(*PRELOADED)
            server = multiprocessing.forkserver._forkserver._forkserver_address
        self.process = context.Process(
            target=_be_child, args=(str(course.root), task.id, str(answer), seed, theirs, their_out,
                                    str(self.stack), server))  # fmt: skip
        main = sys.modules["__main__"]
        sys.modules["__main__"] = type(sys)("__main__")  # else a script would run again in the child
        try:
            self.process.start()
        finally:
            sys.modules["__main__"] = main
        theirs.close()
        their_out.close()
        self.reader = threading.Thread(target=self._read_output, daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def _read_output(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self.out.fileno(), 1 << 16):
                self._seen += len(chunk)
                self._output += chunk[: max(0, MOST_OUTPUT - len(self._output))]

    def output(self) -> str:
        text = bytes(self._output).decode(errors="replace")
        return text + (f"\n… {self._seen - MOST_OUTPUT} more bytes" if self._seen > MOST_OUTPUT
                       else "")  # fmt: skip

    def run(self, end: float, watch) -> None:
        """Take in what the child says until it ends or a limit is reached."""
        while True:
            wait = min(0.1, end - time.monotonic())
            if self.link.poll(max(wait, 0)):
                try:
                    kind, content = self.link.recv()
                except (EOFError, OSError):
                    break
                if kind == "end":
                    self.ended = True
                    break
                (self.collected if kind == "collected" else self.tests).extend(
                    content if kind == "collected" else [content])
                continue
            if stop := (watch(self.process.pid) if watch else None):
                self.status, self.reason = "error", stop
                break
            if self._seen > ENOUGH:
                self.status = "error"
                self.reason = f"it printed more than {ENOUGH // 1_000_000} MB"
                break
            if time.monotonic() >= end:
                self.status = "timeout"
                self.reason = f"it took longer than {self.task.limit:g} s{self._stood()}"
                break
        if not self.status and not self.ended:
            self.process.join(5)
            code = self.process.exitcode
            how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
            self.status, self.reason = "error", f"its process ended before the tests did ({how})"

    def _stood(self) -> str:
        """Where the answer stood when time was up, asked of faulthandler."""
        if not hasattr(signal, "SIGUSR1"):
            return ""
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
            text = self.stack.read_text(errors="replace")
            found = re.search(rf'File "{re.escape(str(self.answer))}", line (\d+)', text)
            if found:
                lines = self.answer.read_text(errors="replace").splitlines()
                number = int(found[1])
                return f"; it stood at line {number}: {lines[number - 1].strip()}"
        return ""

    def __exit__(self, *_) -> None:
        from minipipe.ranks.child import kill_tree

        if not self.ended:
            self.process.join(0)
        else:
            self.process.join(2)
        if self.process.pid:
            kill_tree(self.process.pid)
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(5)
        self.reader.join(1)
        self.link.close()


def _be_child(root, task_id, answer, seed, link, out, stack, server) -> None:
    """In the child: take over output, set limits, run pytest on the task's tests."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    for standard in (1, 2):
        os.dup2(out.fileno(), standard)
    out.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace",  # noqa: SIM115
                      closefd=False)  # fmt: skip
    sys.stderr = sys.stdout
    _limit()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, open(stack, "w"), all_threads=False)  # noqa: SIM115
    if server:
        _share_fork_server(server)
    for name in [n for n in os.environ if n.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(Path(answer).parent)
    import pytest

    from minipipe.teach import plugin

    course = Course(root)
    task = course.task(task_id)
    plugin.judging = plugin.Judging(course, task_id, Path(answer), seed,
                                    lambda kind, content: link.send((kind, content)))  # fmt: skip
    empty = Path(answer).parent / "pytest.ini"
    empty.write_text("[pytest]\n")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with answers.refused(task):
        pytest.main([course.test_file(task).name, "--noconftest", "-c", str(empty), "--rootdir",
                     str(empty.parent), "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "minipipe.teach.plugin",
                     "-s"])  # fmt: skip
    link.send(("end", None))
    os._exit(0)  # threads and exit handlers of the answer can't hold it up


def _limit() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))


def _share_fork_server(address: str) -> None:
    """Let ranks that the tests start come from the parent's fork server, which has torch."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = lambda: None
