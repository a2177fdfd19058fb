"""The commands that look for rows: `optimize`, which certifies them, and `search`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minipipe.cli import (
    Json,
    app,
    exact_number,
    parse_costs,
    print_json,
    refuse,
    summary,
)

if TYPE_CHECKING:
    from minipipe.costs import Costs, Number
    from minipipe.planning.problem import Result

Ranks = Annotated[int, typer.Option(help="Number of ranks.")]
Microbatches = Annotated[int, typer.Option(help="Number of micro-batches.")]
Placement = Annotated[str, typer.Option(
    help="straight (stage r on rank r), loop (stage s on rank s mod ranks), v (down the ranks and "
         "back up), or mirrored (two copies, half of the micro-batches each way).")]  # fmt: skip
Chunks = Annotated[int | None, typer.Option(help="Stages a rank, for --placement loop (2).")]
Memory = Annotated[str | None, typer.Option(
    metavar="X", help="What a rank may keep at most, in whole-share micro-batches.")]  # fmt: skip
CostsText = Annotated[str | None, typer.Option(
    "--costs", help="F=1,I=1,W=1,latency=0; F=1:2:1:1 is a cost a stage.")]  # fmt: skip
Latency = Annotated[str | None, typer.Option(
    metavar="X", help="The time of a message, as latency=X in --costs.")]  # fmt: skip
Split = Annotated[bool, typer.Option("--split/--fused", help="I and W apart, or B in one.")]
Out = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Write the rows, for show, check and run.")]  # fmt: skip


@app.command()
def optimize(
    ranks: Ranks = 4, microbatches: Microbatches = 8, placement: Placement = "straight",
    chunks: Chunks = None, split: Split = True, memory: Memory = None, costs: CostsText = None,
    latency: Latency = None,
    time_limit: Annotated[float, typer.Option(metavar="S", help="Seconds for the solver.")] = 60,
    workers: Annotated[int, typer.Option(help="Threads of the solver.")] = 2,
    argument: Annotated[bool, typer.Option(
        help="Give the solver the lower bound that `show` prints, or let it prove alone.")] = True,
    out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Find the rows with the least makespan, and prove that there are no better ones."""
    try:
        from minipipe.planning.optimize import optimize as solve
        from minipipe.planning.optimize import version

        version()
    except ImportError:
        refuse("optimize needs OR-Tools: in minipipe's folder, "
               "python -m pip install -e '.[optimize]'")
    _can_write(out)
    with _watched(time_limit) as progress:
        result = _found(solve, ranks, microbatches, placement, memory, costs, latency,
                        chunks=chunks, split=split, time_limit=time_limit, workers=workers,
                        argument=argument, progress=progress)  # fmt: skip
    _report(*result, out, as_json)


@app.command()
def search(
    ranks: Ranks = 4, microbatches: Microbatches = 16, placement: Placement = "straight",
    chunks: Chunks = None, split: Split = True, memory: Memory = None, costs: CostsText = None,
    latency: Latency = None,
    steps: Annotated[int, typer.Option(
        help="Moves to try; the same rows for the same number and seed.")] = 20_000,
    seconds: Annotated[float | None, typer.Option(
        metavar="S", help="Stop then, however many moves were tried.")] = None,
    seed: Annotated[int, typer.Option(help="Of the random moves.")] = 0,
    out: Out = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Find good rows in seconds: uneven stages, slow links, a memory limit."""
    from minipipe.planning.search import search as look

    _can_write(out)
    with _watched(seconds) as progress:
        result = _found(look, ranks, microbatches, placement, memory, costs, latency,
                        chunks=chunks, split=split, steps=steps, seconds=seconds, seed=seed,
                        progress=progress)  # fmt: skip
    _report(*result, out, as_json)


def _can_write(out: Path | None) -> None:
    """Say before a long search, and not behind it, that its result has no place to go."""
    if out is not None and (out.is_dir() or not os.access(out if out.exists() else out.parent,
                                                          os.W_OK)):  # fmt: skip
        refuse(f"--out {out}: is no file that can be written")


def _found(find: Callable[..., Result], ranks: int, microbatches: int, placement: str,
           memory: str | None, costs: str | None, latency: str | None,
           **options) -> tuple[Result, Costs]:  # fmt: skip
    """Run it with numbers read from text; bad arguments end with 2."""
    if memory is not None:
        options["memory"] = exact_number(memory, f"--memory {memory}", "2 or 5/2")
    if latency is not None and "latency" in (costs or ""):
        refuse("--latency: --costs already has a latency; give one of them")
    prices = parse_costs(",".join(filter(None, [costs, latency and f"latency={latency}"])))
    try:
        return find(ranks, microbatches, placement, costs=prices, **options), prices
    except ValueError as error:
        refuse(str(error))


@contextmanager
def _watched(limit: float | None) -> Iterator[Callable]:
    """A function that is told best, bound and seconds, and shows them on standard error: in one
    line that changes, or in a line each where that is no terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from minipipe.report import number, percent

    console, began = Console(stderr=True), time.monotonic()
    known: list = [None, 0]

    def line(seconds: float | None = None) -> str:
        best, bound = known
        seconds = time.monotonic() - began if seconds is None else seconds
        clock = f"{seconds:.1f} s" + (f" of {limit:g}" if limit else "")
        if not best:
            return clock
        return (f"best found {number(best)}, bound {number(bound)}, "
                f"gap {percent((best - bound) / best)}, {clock}")  # fmt: skip

    def told(best: Number | None, bound: Number, seconds: float) -> None:
        if [best, bound] != known:
            known[:] = [best, bound]
            if not console.is_terminal:
                typer.echo(line(seconds), err=True)

    if not console.is_terminal:
        yield told
        return

    class Now:
        def __rich__(self) -> Text:
            return Text(line())

    with Live(Now(), console=console, refresh_per_second=5, transient=True):
        yield told


def _certificate(result: Result) -> list[str]:
    """What is known about the rows, and from whom."""
    from minipipe.report import number, percent

    lines = [f"{result.word}: makespan {number(result.makespan)}, "
             f"best bound {number(result.bound)}, gap {percent(result.gap)}",
             f"by {result.method}, {result.seconds:.1f} s; "
             f"the argument of bounds.py alone gives {number(result.argument)}"]  # fmt: skip
    if result.start:
        lines.append(f"best named schedule with this placement and limit: {result.start[0]}, "
                     f"{number(result.start[1])}")  # fmt: skip
    else:
        lines.append("no named schedule has this placement, size and limit")
    return lines


def _report(result: Result, prices: Costs, out: Path | None, as_json: bool) -> None:
    from minipipe import simulate

    schedule, lines = result.schedule, _certificate(result)
    if out is not None:
        text = "".join(f"# {line}\n" for line in lines) + f"{schedule}\n"
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            refuse(f"--out {out}: {(error.strerror or str(error)).lower()}")
        typer.echo(f"wrote {out}", err=True)
    if as_json:
        print_json({
            **summary(simulate(schedule, prices)), "status": result.word, "makespan":
            result.makespan, "bound": result.bound, "gap": result.gap, "proven": result.proven,
            "method": result.method, "seconds": result.seconds, "best_named": result.start and {
                "name": result.start[0], "makespan": result.start[1]},
        })  # fmt: skip
    else:
        typer.echo("\n".join([str(schedule), "", *lines]))
        sys.stdout.flush()
