"""What runs inside a rank. The parent imports this module too: torch only inside functions."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import io
import itertools
import linecache
import multiprocessing
import os
import pickle
import queue
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
from multiprocessing.connection import Connection
from types import SimpleNamespace

import cloudpickle
import psutil

task: SimpleNamespace | None = None  # what this process is a rank for
_sending = threading.Lock()
_launches = itertools.count()

# Errors that say no more than that another rank is gone.
SECONDARY = re.compile(r"(?i)(closed|reset) by peer|broken pipe|got 0 bytes|process exited")
PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
LIBRARY = re.compile(f"{re.escape(sysconfig.get_path('stdlib'))}|<frozen|.*(site|dist)-packages")


def be_rank(link: Connection, output: Connection | None) -> None:
    """Run the tasks that come over `link`, for ever: the parent ends this process.

    Output goes to `output` with all that C code prints, or, where no pipe can be handed over,
    to `link` with what Python prints.
    """
    import torch.distributed  # noqa: F401  the clock of a time limit starts after this

    multiprocessing.set_start_method(None, force=True)  # the system's own, for data loaders
    gc.freeze()  # else a collection would copy the pages of all that the fork server has imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to handle
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # so that the parent can kill what this rank starts, even after its death
    sys.stdout = _Sender(link)
    if output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
        output.close()
        binary = io.FileIO(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(binary, "utf-8", "backslashreplace", line_buffering=True)
    sys.stderr = sys.stdout
    tasks: queue.Queue = queue.Queue()
    threading.Thread(target=_listen, args=(link, tasks), daemon=True).start()
    link.send(None)  # ready
    while True:
        _run(*tasks.get(), link)


class _Sender(io.TextIOBase):
    def __init__(self, link: Connection):
        self.link = link

    def write(self, text: str) -> int:
        _send(self.link, "output", text.encode(errors="replace"))
        return len(text)


def _send(link: Connection, kind: str, content) -> None:
    with _sending:
        link.send((kind, content))


def _listen(link: Connection, tasks: queue.Queue) -> None:
    """Pass tasks on, tell where the main thread stands if asked (None), vanish with the parent."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            if message := link.recv():
                tasks.put(message)
            else:
                frame = sys._current_frames()[threading.main_thread().ident]
                stack = traceback.extract_stack(frame)
                _send(link, "stack", place(stack, task.names) if task else "")
    kill_tree(os.getpid())


def kill_tree(pid: int) -> None:
    """Kill a rank and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for found in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()


def _run(directory: str, rank: int, link: Connection) -> None:
    """Do one task, and send the result or the failure; then stay, so that no peer fails by us."""
    global task
    with open(os.path.join(directory, "task"), "rb") as file:
        task = pickle.load(file)
    task.rank = rank
    crash = open(os.path.join(directory, f"crash{rank}"), "wb", 0)  # noqa: SIM115  kept open
    faulthandler.enable(crash)  # tells the parent where this rank was killed by a signal
    try:
        _settle()
        function, args = pickle.loads(task.call)
        join_group(task.backend, task.timeout, task.ranks, directory)
        result = function(task.rank, *args)
        try:
            pickled = dumps(result)
        except Exception as error:
            kind = type(result).__name__
            raise TypeError(f"the result, a {kind}, can't be sent to the parent: {error}") from None
        _send(link, "result", pickled)
        leave_group()
        _flush()
        _send(link, "code", 0)
    except BaseException as error:
        _flush()
        _send(link, "failure", describe(error))


def _settle() -> None:
    """Take over the parent's surroundings, and what is a rank's own."""
    own = {"RANK": task.rank, "LOCAL_RANK": task.rank, "WORLD_SIZE": task.ranks}
    own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": task.threads}
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    defaults = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    os.environ.clear()
    os.environ.update(defaults | task.environment | {k: str(v) for k, v in own.items()})
    os.chdir(task.cwd)
    sys.path[:], sys.argv[:] = task.path, task.argv
    linecache.cache.update(task.sources)
    import numpy
    import torch

    numpy.random.seed()  # else forked ranks draw the same numbers, in every launch
    torch.manual_seed(67280421310721)  # as in a fresh process, also where a rank is used again
    torch.set_num_threads(task.threads)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Tell glibc not to give freed memory back to the system: the next micro-batch wants it again,
    and each new page costs a fault."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            for setting in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
                mallopt(setting, 1 << 30)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        if sys.platform != "win32":
            ctypes.CDLL(None).fflush(None)  # what C code has printed


def join_group(backend: str, timeout: float, local_ranks: int, directory: str | None) -> None:
    """Make the process group, over a file in `directory`: no port that could be taken."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    if directory:
        rank, size = local_rank, local_ranks
        store = dist.FileStore(os.path.join(directory, "store"), size)
    else:
        store, rank, size = _meet_under_torchrun()
        store = dist.PrefixStore(f"launch{next(_launches)}", store)  # the last group's keys stay
    if backend == "auto":
        backend = "nccl" if torch.cuda.device_count() >= local_ranks else "gloo"
    device = torch.device("cuda", local_rank) if backend == "nccl" else None
    if device:
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=min(timeout, 1e7))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device
    )
    dist.barrier()  # links are made lazily: let no rank fail or leave before they exist


@functools.cache
def _meet_under_torchrun() -> tuple:
    import torch.distributed as dist

    return next(dist.rendezvous("env://"))


def leave_group() -> None:
    """Wait for all ranks, so that no message is cut off, then end the process group. Where a step
    has failed, and its error was caught, there are no connections any more to wait by."""
    import torch.distributed as dist

    if dist.is_initialized():
        from minipipe.ranks.failure import failed

        try:
            dist.barrier()
        except RuntimeError:
            if not failed():
                raise
        dist.destroy_process_group()


def describe(error: BaseException) -> dict:
    """What the parent needs to know about an exception."""
    failure = {"time": time.monotonic(), "secondary": False, "original": None}
    link: BaseException | None = error
    while link:
        lost = isinstance(link, (RuntimeError, OSError)) and SECONDARY.search(str(link))
        failure["secondary"] |= bool(lost or getattr(link, "secondary", False))
        link = link.__cause__ or link.__context__
    with contextlib.suppress(Exception):
        failure["original"] = dumps(error)
    lines = traceback.format_exception_only(error)
    failure["cause"] = "".join(lines[-1:] if isinstance(error, SyntaxError) else lines).strip()
    failure["place"] = place(traceback.extract_tb(error.__traceback__), task.names)
    return failure


def place(stack: list[traceback.FrameSummary], names: dict[str, str]) -> str:
    """The user's innermost line in a stack: file and line, source, caret; "" if there is none."""
    frames = [f for f in stack if (f.filename, f.name) != ("<string>", "<module>")]
    frames = [f for f in frames if f.filename != __file__]
    users = [f for f in frames if not LIBRARY.match(f.filename) and PACKAGE not in f.filename]
    frames = users or [f for f in frames if PACKAGE in f.filename]
    if not frames:
        return ""
    where, *source = traceback.format_list(frames[-1:])[0].rstrip().splitlines()
    if len(source) == 1:  # the failing expression is the whole line
        source.append("    " + "^" * len(source[0].strip()))
    file = frames[-1].filename
    return "\n".join([where.replace(f'File "{file}"', names.get(file, file)), *source])


def _reduce_code(code: types.CodeType):
    make, values = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if v == "<dynamic-code>" else v for v in values)


class _Pickler(cloudpickle.Pickler):
    """cloudpickle drops the file's name from code; a traceback needs it to find source lines."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce_code})


def dumps(value) -> bytes:
    """Pickle a value, with functions and classes that can't be imported by value."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()
