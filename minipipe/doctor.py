"""What works on this machine, what doesn't, and what to do: the checks of `minipipe doctor`."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import typer

from minipipe.cli import Json, app, print_json

OK, NOTE, FAILS = "ok", "note", "fails"
_INSTALL = "install minipipe again in a virtual environment: python -m pip install -e ."


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what works on this machine, what doesn't, and what to do."""
    found = []
    for finding in examine():
        found.append(finding)
        if not as_json:
            advice = f"\n{'':27}{finding.advice}" if finding.advice else ""
            typer.echo(f"{finding.state:<6}{finding.name:<21}{finding.found}{advice}")
    failed = [finding.name for finding in found if finding.state == FAILS]
    if as_json:
        print_json({"ok": not failed, "checks": [finding._asdict() for finding in found]})
    else:
        typer.echo(f"\nDoes not work: {', '.join(failed)}." if failed else
                   "\nAll that minipipe needs works here.")  # fmt: skip
    if failed:
        raise typer.Exit(1)


class Finding(NamedTuple):
    """One check: `state` is ok, note (works, with a limit) or fails; `advice` says what to do."""

    name: str
    state: str
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """All checks, one after the other; a check that breaks is itself a finding."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("Python", _python),
        *((name, lambda name=name: _package(name))
          for name in ("torch", "torchvision", "matplotlib", "jupyter")),
        ("processor cores", _cores), ("memory", _memory), ("disk", _disk),
        ("start of ranks", _start), ("ranks over loopback", _loopback), ("CUDA GPUs", _cuda),
        ("data files", _data), ("OR-Tools (optional)", _solver), ("browser (optional)", _browser),
    ]  # fmt: skip
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # whatever a broken installation raises is what is looked for
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            yield Finding(name, FAILS, f"{type(error).__name__}: {reason}", _INSTALL)


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} ({sys.executable})"
    return Finding("Python", OK, found)


def _package(name: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, FAILS, "not installed", _INSTALL)
    if name != "jupyter":  # a meta package, of which there is nothing to import
        __import__(name)
    return Finding(name, OK, found)


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    advice = "" if usable >= 4 else ("four ranks share them: timelines are measured on emulated "
                                     "devices, and step times say little about real ones")
    return Finding("processor cores", NOTE if advice else OK, f"{usable} usable", advice)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if memory.available < 2 * 2**30:
        return Finding("memory", NOTE, found, "close other programs, or run with fewer ranks: each "
                       "takes about 300 MB")  # fmt: skip
    return Finding("memory", OK, found)


def _disk() -> Finding:
    folder = os.getcwd()
    free = shutil.disk_usage(folder).free / 2**30
    if not os.access(folder, os.W_OK):
        return Finding("disk", FAILS, f"{folder} can't be written", "change to a folder of yours: "
                       "races write into runs/ where they are started")  # fmt: skip
    low = free < 0.5
    return Finding("disk", NOTE if low else OK, f"{free:.1f} GiB free in {folder}",
                   "make room: a race writes figures and traces into runs/" if low else "")


def _start() -> Finding:
    if hasattr(os, "fork") and os.environ.get("MINIPIPE_START") != "spawn" and \
            "forkserver" in multiprocessing.get_all_start_methods():  # fmt: skip
        return Finding("start of ranks", OK, "fork server, torch loaded once")
    return Finding("start of ranks", NOTE, "spawn, torch loaded by each rank",
                   "the first launch takes some seconds longer; later ones use its ranks again")


def _greet(rank: int) -> float:
    """Rank 0 sends a number to rank 1, and both add up what they have."""
    import torch
    import torch.distributed as dist

    number = torch.full((1,), 20.0 * (1 - rank))
    if rank == 0:
        dist.send(number, 1)
    else:
        dist.recv(number, 0)
    dist.all_reduce(number)
    return number.item()


def _loopback() -> Finding:
    from minipipe.ranks.launch import launch

    name, began = "ranks over loopback", time.perf_counter()
    try:
        sums = launch(_greet, ranks=2, timeout=60, output=False, backend="gloo")
    except Exception as error:  # RankError, or what the system refused
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Finding(name, FAILS, reason, "processes of this machine must reach each other at "
                       "127.0.0.1: check firewall and container rules, and `ulimit -u`")
    if sums != [40.0, 40.0]:
        return Finding(name, FAILS, f"ranks computed {sums}, not 40", _INSTALL)
    return Finding(name, OK, f"2 ranks, gloo, {time.perf_counter() - began:.1f} s")


def _cuda() -> Finding:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if len(names) > 1:
        return Finding("CUDA GPUs", OK, f"{len(names)}: {', '.join(names)}")
    if names:
        return Finding("CUDA GPUs", NOTE, f"1: {names[0]}", "ranks share it, over gloo through "
                       "host memory; with a GPU for each rank they use NCCL")  # fmt: skip
    return Finding("CUDA GPUs", OK, "none; everything runs on the processor")


def _data() -> Finding:
    from minipipe import datasets

    names = ("mnist", "digits")
    for name in names:
        try:
            datasets.load(name)
        except (OSError, ValueError) as error:
            return Finding("data files", FAILS, str(error), "restore them as said, or train on "
                           "shapes, which are drawn by code")  # fmt: skip
    return Finding("data files", OK, f"{', '.join(names)}: present and intact")


def _solver() -> Finding:
    name = "OR-Tools (optional)"
    try:
        from ortools.sat.python import cp_model  # noqa: F401

        return Finding(name, OK, version("ortools"))
    except ImportError:  # PackageNotFoundError too
        return Finding(name, NOTE, "not installed", "only `minipipe optimize` uses it: in "
                       "minipipe's folder, python -m pip install -e '.[optimize]'")  # fmt: skip


def _browser() -> Finding:
    name = "browser (optional)"
    try:
        return Finding(name, OK, getattr(webbrowser.get(), "name", "found"))
    except webbrowser.Error:
        return Finding(name, NOTE, "none on this machine", "only notebooks use one: open the "
                       "address that jupyter prints in a browser elsewhere")  # fmt: skip
