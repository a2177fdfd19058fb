"""Judge one answer in a child process: pristine tests, limits, and a result that it can't forge.

The parent watches: a child that takes too long or dies loses what it has not yet shown. Results
come over a pipe, one test at a time; nothing that an answer prints or writes counts. An answer
runs with your rights: this is no sandbox (docs/teaching.md says what is).
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import queue
import re
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from minipipe.ranks.launch import starting, warm
from minipipe.teach import answers
from minipipe.teach.course import Course, CourseError, Task

STARTING = 120.0  # seconds that a child may take until its tests begin; they aren't the answer's
MOST_OUTPUT = 20_000  # characters of an answer's output that are kept
MOST_PROCESSES = 48  # that an answer may have at once, its ranks among them
MOST_MEMORY = 8 << 30  # bytes of data a process may have
# What a child finds imported already.
PRELOADED = ("pytest", "minipipe", "minipipe.pipeline", "minipipe.plot",
             "matplotlib.backends.backend_agg", "minipipe.teach.plugin", "minipipe.teach.judge",
             "minipipe.teach.pictures", "minipipe.teach.sources")  # fmt: skip
LONGEST_MESSAGE = 16 << 20  # bytes; longer ones are no message of a test
# What a message holds may be anything that an answer raised; these are no text in XML and UTF-8.
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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
          watch: Callable[[], str] = lambda: "") -> TaskResult:  # fmt: skip
    """Run the task's tests on the answer's file in a child process, and say what it scored.

    seed: 0 for the tests a student sees, any other adds hidden cases of the same tests. watch: is
    called some times a second; a text that it returns ends the child.
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
            child.run(watch)
    result.seconds = time.monotonic() - began
    _settle(result, child, task, course)
    return result


def _settle(result: TaskResult, child: _Child, task: Task, course: Course) -> None:
    result.tests, result.output = child.tests, child.output()
    states: dict[str, set[str]] = {collected["name"]: set() for collected in child.collected}
    for test in child.tests:
        states.setdefault(test["name"], set()).add(test["status"])
    parts: dict[str, dict[str, Any]] = {}
    for collected in child.collected:
        at = parts.setdefault(collected["part"], {"name": collected["part"],
                              "share": collected["share"], "passed": True})  # fmt: skip
        at["passed"] &= states[collected["name"]] == {"passed"}
    result.parts = list(parts.values())
    share = sum(part["share"] for part in result.parts if part["passed"])
    result.points = round(task.points * share / 100, 2)
    result.reason = child.reason
    seen = set().union(*states.values())
    if child.status:
        result.status = child.status
    elif not result.parts:
        result.status = "error"
        result.reason = f"{course.test_file(task).name} has no test of task {task.id}"
    elif not all(states.values()):
        result.status, result.reason = "error", "it broke off its tests"
    elif seen == {"passed"}:
        result.status = "passed"
    else:
        result.status = "not written" if seen == {"not written"} else "failed"


@cache
def _preload() -> None:
    """Have the fork server import what children need; once, at its start."""
    warm(*PRELOADED)


class _Child:
    """One child process and all that it says."""

    def __init__(self, course: Course, task: Task, answer: Path, seed: int):
        self.task, self.answer = task, answer
        self.collected: list[dict] = []
        self.tests: list[dict] = []
        self.ended = False
        self.status = self.reason = ""
        self.stack = answer.with_suffix(".stack")
        self._output, self._seen = bytearray(), 0
        self._messages: queue.SimpleQueue = queue.SimpleQueue()
        self._nonce = secrets.token_hex(8)
        method = "forkserver" if hasattr(os, "fork") else "spawn"
        context = multiprocessing.get_context(method)
        self.link, theirs = context.Pipe(duplex=False)
        self.out, their_out = context.Pipe(duplex=False)
        server = None
        if method == "forkserver":
            _preload()
            multiprocessing.forkserver.ensure_running()
            ours = multiprocessing.forkserver._forkserver
            key = getattr(ours, "_forkserver_authkey", None)
            server = ours._forkserver_address, ours._forkserver_pid, key
        with contextlib.suppress(CourseError):  # a release has no solutions
            answers.solution_text(course, task.id)  # here, not in each child
        texts = {key: text for key, text in answers.texts.items() if key[1] == task.id}
        arguments = (course, task.id, answer, seed, texts, server)
        self.process = context.Process(
            target=_be_child, args=(theirs, their_out, self._nonce, self.stack, *arguments))
        with starting:  # answers are judged in several threads
            main = sys.modules["__main__"]
            sys.modules["__main__"] = type(sys)("__main__")  # else the child runs it
            try:
                self.process.start()
            finally:
                sys.modules["__main__"] = main
        theirs.close()
        their_out.close()
        self.readers = [threading.Thread(target=read, daemon=True)
                        for read in (self._read_output, self._read_messages)]  # fmt: skip
        for reader in self.readers:
            reader.start()

    def __enter__(self):
        return self

    def _read_output(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self.out.fileno(), 1 << 16):
                self._seen += len(chunk)
                self._output += chunk[: max(0, MOST_OUTPUT - len(self._output))]

    def _read_messages(self) -> None:
        """In a thread: an answer can write rubbish to the pipe, for whose rest one waits for ever.
        JSON, since a pickle could run code here."""
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            while True:
                nonce, kind, content = json.loads(self.link.recv_bytes(LONGEST_MESSAGE))
                if nonce == self._nonce:
                    self._messages.put((kind, content))

    def output(self) -> str:
        text = _NO_TEXT.sub("\ufffd", bytes(self._output).decode(errors="replace"))
        return text + (f"\n… {self._seen - MOST_OUTPUT} more bytes" if self._seen > MOST_OUTPUT
                       else "")  # fmt: skip

    def run(self, watch: Callable[[], str]) -> None:
        """Take in what the child says until it ends or a limit is reached."""
        end, look = time.monotonic() + STARTING, 0.0
        while not self.ended and not self.status:
            kind, content = "", None
            alive = self.process.is_alive() and self.readers[1].is_alive()
            with contextlib.suppress(queue.Empty):
                kind, content = self._messages.get(timeout=0.1)
            if kind == "ready":
                end = time.monotonic() + self.task.limit
            elif kind == "collected":  # before any line of the answer has run
                self.collected = self.collected or content
            elif kind == "test":
                picture = content["picture"]
                content["picture"] = base64.b64decode(picture) if picture else None
                message = content["message"].replace(f"{self.answer.parent}{os.sep}", "")
                content["message"] = _NO_TEXT.sub("\ufffd", message)
                self.tests.append(content)
            elif kind == "end":
                self.ended = True
            elif not alive:
                self.status = "error"
                self.reason = f"its process ended before the tests did{self._exit_code()}"
            if not self.ended and not self.status and time.monotonic() >= look:
                look = time.monotonic() + 0.2
                self._hold_to_limits(end, watch)

    def _exit_code(self) -> str:
        self.process.join(0.5)
        code = self.process.exitcode
        with contextlib.suppress(TypeError, ValueError):  # it has no code, or wrote it itself
            return f" ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        return ""

    def _hold_to_limits(self, end: float, watch: Callable[[], str]) -> None:
        if stop := watch():
            self.status, self.reason = "error", stop
        elif time.monotonic() >= end:
            self.status = "timeout"
            self.reason = f"it took longer than {self.task.limit:g} s{self._stood()}"

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

        if self.ended:
            self.process.join(2)
        kill_tree(self.process.pid)
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join(5)
        for reader in self.readers:
            reader.join(1)
        self.link.close()


def _be_child(link, out, nonce, stack, course, task_id, answer, seed, texts, server) -> None:
    """In the child: take over output, set limits, run pytest on the task's tests."""
    gc.freeze()  # pytest collects garbage, and would go through all that the fork server imported
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    for standard in (1, 2):
        os.dup2(out.fileno(), standard)
    out.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace",  # noqa: SIM115
                      closefd=False)  # fmt: skip
    sys.stderr = sys.stdout
    limit()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, open(stack, "w"), all_threads=False)  # noqa: SIM115
    if server:
        _share_fork_server(*server)
    for name in [n for n in os.environ if n.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(answer.parent)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    answers.texts.update(texts)
    tell = _teller(link, nonce)
    tell("ready", None)
    _run_tests(course, course.task(task_id), answer, seed, tell)
    tell("end", None)
    os._exit(0)  # threads and exit handlers of the answer can't hold it up


def _teller(link, nonce: str) -> Callable[[str, Any], None]:
    """What sends (kind, content) to the parent; of a forked process of the answer nothing goes."""
    process, process_id, send, encode = os.getpid(), os.getpid, link.send_bytes, json.dumps

    def tell(kind: str, content: Any) -> None:
        if process_id() == process:
            send(encode([nonce, kind, content]).encode())

    return tell


def _run_tests(course: Course, task: Task, answer: Path, seed: int, tell) -> None:
    import pytest

    from minipipe.teach import plugin

    text = answer.read_text(encoding="utf-8-sig", errors="replace")
    plugin.judging = plugin.Judging(course, task.id, answer, seed, tell, text)
    empty = answer.parent / "pytest.ini"
    empty.write_text("[pytest]\n")
    off = ["cacheprovider", "terminal", "faulthandler", "unraisableexception", "threadexception"]
    with answers.refused(task):
        # The plugin is given as a module: looking for its name takes pytest 0.2 s.
        pytest.main([course.test_file(task).name, "--noconftest", "-c", str(empty), "--rootdir",
                     str(empty.parent), *(f"-pno:{name}" for name in off), "-s"], [plugin])


def limit() -> None:
    """Limit this process and all that it will start: data, a file's size, no core dump."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted, wanted))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))


def _share_fork_server(address: str, pid: int, key: bytes | None) -> None:
    """Let ranks that the tests start come from the parent's fork server, which has torch; from one
    of their own where that has died."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_authkey = key  # from Python 3.14 on
    start_own = server.ensure_running

    def ensure_running() -> None:
        if server._forkserver_pid or not _lives(pid):
            start_own()

    server.ensure_running = ensure_running


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
