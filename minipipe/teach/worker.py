"""A warm worker of the grader: a process that judges one answer after another.

    python -m minipipe.teach.worker COURSE      a job a line on standard input, in JSON

What an answer starts stays below its worker, also what has tried to get away (on Linux, where a
process can adopt its orphans); it is counted while a task runs, and killed before the next one.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from minipipe.teach import judge
from minipipe.teach.course import Course

_ADOPTS = 36  # Linux's PR_SET_CHILD_SUBREAPER


def adopt_orphans(adopts: bool = True) -> None:
    """Have descendants whose parents end become children of this process (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPTS, int(adopts), 0, 0, 0)


def kill_all(find: Callable[[], list[psutil.Process]], seconds: float = 10.0) -> bool:
    """Kill what `find` finds until it finds nothing; whether that was reached in time."""
    end = time.monotonic() + seconds
    while found := find():
        if time.monotonic() > end:
            return False
        for act in (psutil.Process.suspend, psutil.Process.kill):  # what stands still starts none
            for process in found:
                with contextlib.suppress(psutil.Error):
                    act(process)
        for process in found:
            with contextlib.suppress(OSError, AttributeError):
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.01)
    return True


def _left() -> list[psutil.Process]:
    """Every process below this one, except for its own helpers."""
    own = [resource_tracker._resource_tracker._pid]
    if hasattr(os, "fork"):
        own.append(multiprocessing.forkserver._forkserver._forkserver_pid)
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in own]


def _watch() -> str:
    """A reason to end a task: it has too many processes, which are killed at once."""
    if len(_left()) <= judge.MOST_PROCESSES:
        return ""
    kill_all(_left)
    return f"it had more than {judge.MOST_PROCESSES} processes at once"


def main(root: str) -> None:
    jobs, results = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")  # where memory ends, the grader is not the one that is killed
    adopt_orphans()
    judge.limit()
    course = Course(root)
    for line in jobs:
        job = json.loads(line)
        result = judge.judge(course, course.task(job["task"]), Path(job["answer"]), job["seed"],
                             _watch)  # fmt: skip
        clean = kill_all(_left)
        json.dump(result.as_dict(pictures=True), results,
                  default=lambda picture: base64.b64encode(picture).decode())  # fmt: skip
        print(file=results, flush=True)
        if not clean:
            break  # the grader kills the rest, and starts another worker
    kill_all(_left)


if __name__ == "__main__":
    main(sys.argv[1])
