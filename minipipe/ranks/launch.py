"""Start real processes, watch them, stop them: `launch(fn, ranks=4)` runs fn on every rank."""

from __future__ import annotations

import atexit
import contextlib
import linecache
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Pipe, wait
from traceback import FrameSummary
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle

from minipipe.ranks import child

GRACE = 0.5  # seconds that a lost connection waits for the death or the error behind it
LONGEST_LINE = 1 << 20  # bytes; output without newlines is cut there, not collected
starting = threading.RLock()  # a process is started, with another `__main__`
_idle: list[SimpleNamespace] = []  # spawned ranks that wait for the next launch


# The first optimizer of a process imports torch._dynamo, in 1.3 s.
_preloaded = ["torch", "torch.distributed", "torch._dynamo", "numpy", child.__name__]


def _set_up_fork_server() -> None:
    server = multiprocessing.forkserver._forkserver
    server.__init__()  # that of a forked process is its parent's
    _idle.clear()
    server.set_forkserver_preload(_preloaded)


def _end_fork_server() -> None:
    """Kill the fork server, unless processes from it are left: while it imports torch, for some
    seconds, it would not notice that this process ends."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    if pid and not multiprocessing.active_children():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


if hasattr(os, "fork"):
    import multiprocessing.forkserver

    # A fork server that something else has started before would stay without torch. But who comes
    # from one, and imports this only while its task is unpickled, keeps what it has inherited.
    if multiprocessing.forkserver._forkserver._forkserver_pid:
        _set_up_fork_server()
    multiprocessing.forkserver.set_forkserver_preload(_preloaded)
    os.register_at_fork(after_in_child=_set_up_fork_server)
    atexit.register(_end_fork_server)


class RankError(RuntimeError):
    """A rank failed; the text says how, and where every other rank stood.

    rank: which (None after a timeout); cause: its exception and message; where: rank -> where it
    stood; original: the exception itself, None if it can't be pickled.
    """

    def __init__(self, text, rank=None, cause="", where=None, original=None):
        super().__init__(text)
        self.rank, self.cause, self.where, self.original = rank, cause, where or {}, original

    def _render_traceback_(self) -> list[str]:
        return f"{type(self).__name__}: {self}".splitlines()  # all that a notebook shows


class RankTimeout(RankError):
    """The ranks did not end within the time limit."""


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int,
    timeout: float = 600.0,
    output: Callable[[int, str], None] | bool | None = None,
    threads: int | None = None,
    backend: str = "auto",
    cwd: str | os.PathLike = ".",
) -> list[Any]:
    """Run fn(rank, *args) in `ranks` processes with one process group; what each rank returned.

    timeout: seconds, from when all ranks run. output: None prints lines as "[rank r] …", False
    drops them, a function gets (rank, line). threads: torch's threads a rank; None shares out the
    processors. backend: "auto" is nccl if there is a GPU for each rank, else gloo; or a name that
    torch.distributed knows. cwd: the ranks' working directory. Under torchrun this process is the
    rank: nothing is started, and every rank gets the list.
    Raises RankError, RankTimeout; ValueError or TypeError for an argument; no process stays behind.
    """
    _check(fn, ranks, timeout, output, threads, backend, cwd)
    if child.task:
        raise RuntimeError(
            f"launch was called inside rank {child.task.rank}, and a rank can't start ranks. "
            'If that was during an import, put the call under `if __name__ == "__main__":`.'
        )
    if {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        return _run_under_torchrun(fn, args, ranks, timeout, backend)
    task = SimpleNamespace(ranks=int(ranks), timeout=timeout, backend=backend)
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    task.threads = threads or max(1, processors // ranks)
    task.cwd, task.path, task.argv = os.path.abspath(cwd), list(sys.path), list(sys.argv)
    task.environment, task.call = dict(os.environ), _pickle_call(fn, args)
    # Sources without a file, such as a notebook's cells: linecache has no time of change for them.
    task.sources = {k: v for k, v in linecache.cache.items() if len(v) == 4 and v[1] is None}
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    names = {k: shell.compile.format_code_name(k) for k in task.sources} if shell else {}
    task.names = {file: " ".join(name) for file, name in names.items() if name}  # Cell In[3]
    with tempfile.TemporaryDirectory(prefix="minipipe-", ignore_cleanup_errors=True) as directory:
        with open(os.path.join(directory, "task"), "wb") as file:
            pickle.dump(task, file)
        return _Watch(task, directory, output).run()


def warm(*modules: str) -> None:
    """Start to import torch, and more modules, in the background: the first launch needn't wait."""
    _preloaded.extend(modules)
    if _must_spawn() or child.task:
        return
    main = threading.current_thread() is threading.main_thread()
    # An interrupt from the keyboard goes to the server too, which dies with its last rank anyway.
    known = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        multiprocessing.forkserver.set_forkserver_preload(_preloaded)
        multiprocessing.forkserver.ensure_running()
    finally:
        if known is not None:
            signal.signal(signal.SIGINT, known)


def _must_spawn() -> bool:
    return not hasattr(os, "fork") or os.environ.get("MINIPIPE_START") == "spawn"


def _check(fn, ranks, timeout, output, threads, backend, cwd) -> None:
    def is_number(value, method):
        return hasattr(value, method) and not isinstance(value, bool)

    count = "an int of at least 1"
    for name, value, right_type, is_right, legal in [
        ("fn", fn, callable(fn), None, "a function fn(rank, *args)"),
        ("ranks", ranks, is_number(ranks, "__index__"), lambda: ranks >= 1, count),
        ("timeout", timeout, is_number(timeout, "__float__"), lambda: timeout > 0,
         "above 0 seconds"),
        ("output", output, output in (None, True, False) or callable(output), None,
         "None, False or a function (rank, line)"),
        ("threads", threads, threads is None or is_number(threads, "__index__"),
         lambda: threads is None or threads >= 1, f"None or {count}"),
        ("backend", backend, isinstance(backend, str), None, '"auto" or a name such as "gloo"'),
        ("cwd", cwd, isinstance(cwd, (str, os.PathLike)), lambda: os.path.isdir(cwd),
         "a directory"),
    ]:  # fmt: skip
        if not right_type or (is_right and not is_right()):
            error = ValueError if right_type else TypeError
            raise error(f"{name} must be {legal}, not {value!r}")


def _pickle_call(fn: Callable, args: tuple) -> bytes:
    """Pickle fn by reference if the ranks can import it, else by value."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    known = cloudpickle.list_registry_pickle_by_value()
    by_value = module and module.__name__ not in known and not _is_importable(module)
    with starting:  # cloudpickle's register is shared by all threads
        try:
            if by_value:
                cloudpickle.register_pickle_by_value(module)
            return child.dumps((fn, args))
        except Exception as error:
            raise TypeError(f"fn and its arguments can't be sent to the ranks: {error}") from error
        finally:
            if by_value:
                cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Whether an import finds this very module, and not another one or none."""
    file, top = getattr(module, "__file__", None), module.__name__.partition(".")[0]
    root = getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None)
    for spec in [f.find_spec(top, None) for f in sys.meta_path if hasattr(f, "find_spec")]:
        if spec and (root or not file):
            return spec.origin == root
        if spec:  # a package without __init__.py
            return any(file.startswith(place) for place in spec.submodule_search_locations or [])
    return False


def _run_under_torchrun(fn, args, ranks, timeout, backend) -> list[Any]:
    import torch.distributed as dist

    results = [None] * int(os.environ["WORLD_SIZE"])
    if ranks != len(results):
        raise ValueError(f"ranks must be {len(results)}, as many as torchrun started, not {ranks}")
    own_group = not dist.is_initialized()
    if own_group:
        child.join_group(backend, timeout, int(os.environ["LOCAL_WORLD_SIZE"]), None)
    dist.all_gather_object(results, fn(dist.get_rank(), *args))
    if own_group:
        child.leave_group()
    return results


def _start_ranks(count: int) -> list[SimpleNamespace]:
    """Processes that wait for a task; tried twice, since a fork server may just have died."""
    try:
        return _try_to_start(count)
    except (EOFError, OSError):
        try:
            return _try_to_start(count)
        except (EOFError, OSError) as error:
            raise RuntimeError(f"no rank starts: does {sys.executable} import torch?") from error


def _try_to_start(count: int) -> list[SimpleNamespace]:
    """Forked from a process that has torch, or spawned and used again."""
    forked, ranks = not _must_spawn(), []
    context = multiprocessing.get_context("forkserver" if forked else "spawn")
    try:
        with starting:
            ranks += [] if forked else [_idle.pop() for _ in range(min(count, len(_idle)))]
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")  # else ranks run the script again
            try:
                for _ in range(count - len(ranks)):
                    link, their_link = Pipe()
                    output, their_output = Pipe(duplex=False) if forked else (None, None)
                    process = context.Process(target=child.be_rank, args=(their_link, their_output))
                    ranks.append(SimpleNamespace(process=process, link=link, output=output, new=1))
                    process.start()
                    for end in filter(None, (their_link, their_output)):
                        end.close()
            finally:
                sys.modules["__main__"] = main
        for rank in ranks:
            rank.new = rank.new and rank.link.recv()
    except BaseException:
        _end_ranks(ranks)
        raise
    return ranks


def _end_ranks(ranks: list[SimpleNamespace]) -> None:
    """Kill ranks and all that they have started."""
    started = [rank.process for rank in ranks if rank.process.pid]
    for process in started:
        child.kill_tree(process.pid)
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)  # what a dead rank has left behind
    for process in started:
        process.join(5)


atexit.register(_end_ranks, _idle)  # multiprocessing would wait for them


class _Watch:
    """One launch, in the thread that called it: reads all that the ranks say, then judges."""

    def __init__(self, task, directory: str, output):
        self.task, self.directory = task, directory
        self.ranks, self.sources = _start_ranks(task.ranks), {}
        self.write = output if callable(output) else (lambda *_: 0) if output is False else _print
        for number, rank in enumerate(self.ranks):
            rank.number, rank.text, rank.stack = number, b"", None
            rank.result = rank.failure = rank.code = None  # code: 0 at a good end
            sources = (rank.link, rank.output, rank.process.sentinel)
            self.sources |= {source: rank for source in sources if source}

    def run(self) -> list[Any]:
        """What the ranks returned, once all have ended well."""
        error = None
        try:
            for rank in self.ranks:
                with contextlib.suppress(OSError):  # a rank that is dead already is seen below
                    rank.link.send((self.directory, rank.number))
            end = time.monotonic() + self.task.timeout
            failures = []
            while any(rank.code is None for rank in self.ranks) and time.monotonic() < end:
                self.read(end - time.monotonic())
                failures = [rank.failure for rank in self.ranks if rank.failure]
                if not all(failure["secondary"] for failure in failures):
                    break
                end = min([end] + [failure["time"] + GRACE for failure in failures])
            if failures or any(rank.code is None for rank in self.ranks):
                self.ask_for_stacks()
                error = self.error(timed_out=not failures)
        finally:
            self.stop(well=not error and all(rank.code == 0 for rank in self.ranks))
        if error:
            raise error
        return [pickle.loads(rank.result) for rank in self.ranks]

    def read(self, seconds: float) -> None:
        """Take in what comes within some seconds."""
        for source in wait(list(self.sources), max(0, min(seconds, 3600))):
            if source in self.sources:
                self.read_from(source, self.sources[source])

    def read_from(self, source, rank) -> None:
        kind, content = "", None
        if source is rank.output:
            kind, content = "output", os.read(source.fileno(), 1 << 16) or None
        elif source is rank.link:
            with contextlib.suppress(EOFError, OSError):
                kind, content = source.recv()
        if content is None:
            del self.sources[source]
            if source is rank.process.sentinel:
                self.take_death(rank)
        elif kind == "output":
            *lines, rank.text = (rank.text + content).split(b"\n")
            if len(rank.text) > LONGEST_LINE:
                lines, rank.text = [*lines, rank.text], b""
            for line in lines:
                self.write(rank.number, line.decode(errors="replace"))
        else:
            setattr(rank, kind, content)  # its result, failure, stack or code

    def take_death(self, rank) -> None:
        death = {"time": time.monotonic(), "secondary": False, "original": None, "place": ""}
        with contextlib.suppress(OSError), open(f"{self.directory}/crash{rank.number}") as file:
            found = re.findall(r'File "(.*)", line (\d+) in (.*)', file.read())
            stack = [FrameSummary(name, int(line), where) for name, line, where in reversed(found)]
            death["place"] = child.place(stack, self.task.names)
        while rank.link in self.sources and rank.link.poll():
            self.read_from(rank.link, rank)  # what it said before
        rank.process.join(5)  # its end is seen before its exit code
        code = rank.code = rank.process.exitcode
        cause = f"ended with exit code {code} before it returned"
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}"
        rank.failure = rank.failure or death | {"cause": cause}

    def ask_for_stacks(self) -> None:
        """Have the ranks that still run say where they stand; they have half a second."""
        asked = [rank for rank in self.ranks if rank.code is None and not rank.failure]
        for rank in asked:
            with contextlib.suppress(OSError):
                rank.link.send(None)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and any(r.code is None and r.stack is None for r in asked):
            self.read(end - time.monotonic())

    def error(self, timed_out: bool) -> RankError:
        where, failed = {}, [rank for rank in self.ranks if rank.failure]
        for rank in self.ranks:
            text = rank.stack or "no answer: stopped, or busy outside Python"
            if rank.result is not None:
                text = "had returned"
            elif rank.failure:
                text = rank.failure["place"] or rank.failure["cause"]
            elif rank.stack == "":
                text = "outside fn"
            where[rank.number] = ": ".join(line.strip() for line in text.splitlines()[:2])
        lines = [f"  rank {number}: {text}" for number, text in where.items()]
        if timed_out:
            cause = f"the ranks did not end within {self.task.timeout:g} s"
            return RankTimeout("\n".join([cause, *lines]), cause=cause, where=where)
        first = min(failed, key=lambda rank: (rank.failure["secondary"], rank.failure["time"]))
        del lines[first.number]
        lines = ["the other ranks:", *lines] if lines else []
        cause, place, original = first.failure["cause"], first.failure["place"], None
        with contextlib.suppress(Exception):
            original = pickle.loads(first.failure["original"])
        text = "\n".join([f"rank {first.number}: {cause}", *place.splitlines(), *lines])
        return RankError(text, first.number, cause, where, original)

    def stop(self, well: bool) -> None:
        """End all that still runs or keep it for the next launch, and take in the last output."""
        keep = well and not self.ranks[0].output
        if not keep:
            _end_ranks(self.ranks)
        try:
            for rank in self.ranks:
                while rank.output in self.sources and wait([rank.output], 0):
                    self.read_from(rank.output, rank)
                if rank.text:
                    self.write(rank.number, rank.text.decode(errors="replace"))
        finally:
            for end in [end for rank in self.ranks for end in (rank.link, rank.output)]:
                if end and not keep:
                    end.close()
            with starting:
                _idle.extend(self.ranks if keep else [])


def _print(rank: int, line: str) -> None:
    sys.stdout.write(f"[rank {rank}] {line}\n")
    sys.stdout.flush()
