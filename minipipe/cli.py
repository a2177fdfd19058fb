"""The command line: `minipipe show 1f1b --ranks 4 --microbatches 8`, and the other commands.

A command ends with 0 on success, 2 on bad arguments, 1 where what it checks fails. With `--json`
standard output has one JSON object and nothing else. What a command needs is imported inside it,
so that help and schedules don't wait for torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from minipipe import Costs, Schedule, Timeline

# Typer brings its own copy of click or uses click itself, as its version has it.
_UsageError, _ClickException = (
    next(each for each in typer.BadParameter.__mro__ if each.__name__ == name)
    for name in ("UsageError", "ClickException")
)

# The names in --costs, and the fields of Costs that they stand for.
COSTS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "R": "recompute",
         "U": "update", "latency": "latency", "bandwidth": "bandwidth", "exchange": "exchange",
         "message": "message_size", "input": "input_size"}  # fmt: skip


class _OneLine(TyperGroup):
    """Bad arguments are told in one line, without a traceback, and end with 2."""

    def main(self, *args: Any, **options: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a console without × prints ? instead
                stream.reconfigure(errors="replace")
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except _ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                where = getattr(getattr(error, "ctx", None), "command_path", "minipipe")
                typer.echo(f"{where}: {' '.join(error.format_message().split())}", err=True)
            code = error.exit_code
        except typer.Abort:
            code = 130
        except NotImplementedError as error:  # in a student's tree: which task comes first
            typer.echo(f"minipipe: {error}", err=True)
            code = 1
        except OSError as error:  # a full disk, or output that goes nowhere
            where = f"{error.filename}: " if error.filename else ""
            typer.echo(f"minipipe: {where}{(error.strerror or str(error)).lower()}", err=True)
            code = 1
            if not error.filename and sys.stdout:  # what is left there can't go out at the end
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(cls=_OneLine, add_completion=False, no_args_is_help=True,
                  pretty_exceptions_enable=False,
                  help="Pipeline-parallel training, step by step on real processes.")  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main() -> None:
    """Entry point of `minipipe` and `python -m minipipe`."""
    app(prog_name="minipipe")


@app.callback()
def _commands() -> None:
    """Pipeline-parallel training, step by step on real processes."""


# ---- helpers that all commands share -----------------------------------------------------------


def refuse(message: str) -> NoReturn:
    """End with 2: an argument is bad."""
    raise _UsageError(message)


def fail(message: str) -> NoReturn:
    """End with 1: what the command checks fails; the message may have several lines."""
    typer.echo(message, err=True)
    raise typer.Exit(1)


def print_json(result: dict) -> None:
    """One JSON object on standard output; exact fractions become floats where they aren't whole."""
    typer.echo(json.dumps(result, default=_plain, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    return value.item()  # a number of numpy or torch


def width() -> int | None:
    """Characters in a line of the terminal; None where the output goes elsewhere."""
    there = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if there else None


def read_schedule(file: str) -> Schedule:
    """The rows in a file, or on standard input for `-`; ends with 2 if there is no such file, and
    raises ScheduleError if they can't be read as rows."""
    from minipipe import Schedule

    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        refuse(f"{file} is not a text file")
    except OSError as error:
        refuse(f"{file} can't be read: {(error.strerror or str(error)).lower()}")
    return Schedule.parse(text, "" if file == "-" else Path(file).stem)


def exact_number(text: str, what: str, example: str) -> Fraction:
    """The number in an argument, exactly: 4, 0.5, 5/2; ends with 2 if it is none, or no size that
    a float has."""
    try:
        if re.search(r"e[+-]?\d{3}", text.lower()) or abs(value := Fraction(text)) > 10**99:
            raise ValueError
    except (ValueError, ZeroDivisionError):
        refuse(f"{what} is not a number such as {example}")
    return value


def parse_costs(text: str | None) -> Costs:
    """Costs from `F=1,I=1,W=1/2,latency=0.1`; `F=1:2:1:1` gives each stage its own."""
    from minipipe import Costs
    from minipipe.costs import exact

    given = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        if name == "B":
            refuse("costs: B is I and W together: give I and W")
        if name not in COSTS:
            refuse(f"costs: '{pair}' is none of {', '.join(f'{each}=…' for each in COSTS)}")
        if COSTS[name] in given:
            refuse(f"costs: {name} is given twice")
        numbers = [exact(exact_number(number, f"costs: {name}={value}", "1, 0.5 or 1/2"))
                   for number in value.split(":")]  # fmt: skip
        given[COSTS[name]] = numbers if len(numbers) > 1 else numbers[0]
    try:
        return Costs(**given)
    except (TypeError, ValueError) as error:
        refuse(f"costs: {error}")


def build_schedule(name: str, ranks: int | None, microbatches: int | None,
                   costs: Costs | None = None,
                   **own: int | bool | Fraction | None) -> Schedule:  # fmt: skip
    """A schedule by name, or from a file of rows; `own` are arguments of the schedule, or None,
    and costs are for those that take them into account."""
    from minipipe import SCHEDULES, ScheduleError, build
    from minipipe.family import takes

    own = {key: value for key, value in own.items() if value not in (None, False)}
    costs = {"costs": costs} if name in SCHEDULES and takes(name, "costs") else {}
    if name not in SCHEDULES and (name == "-" or Path(name).is_file()):
        given = own | {k: v for k, v in (("ranks", ranks), ("microbatches", microbatches)) if v}
        if given:
            refuse(f"{', '.join(given)}: the rows in {name} already say that")
        try:
            return read_schedule(name)
        except ScheduleError as error:
            fail(f"{name} is not a schedule:\n{error}")
    if name not in SCHEDULES and (Path(name).suffix or len(Path(name).parts) > 1):
        refuse(f"{name}: no such file, and no schedule: {', '.join(SCHEDULES)}")
    try:
        return build(name, ranks=4 if ranks is None else ranks,
                     microbatches=8 if microbatches is None else microbatches, **own, **costs)
    except ValueError as error:
        refuse(str(error) if isinstance(error, ScheduleError) else f"costs: {error}")


def predict(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate; ends with 1 and the reasons if the rows are not a legal schedule."""
    from minipipe import ScheduleError, simulate

    try:
        return simulate(schedule, costs)
    except ScheduleError as error:
        fail(f"not a legal schedule:\n{error}")
    except ValueError as error:  # as many costs as stages
        refuse(f"costs: {error}")


# ---- show --------------------------------------------------------------------------------------


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(
        metavar="NAME", help="Name of a schedule, or a FILE of rows.")] = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Every schedule at this size, in one table.")] = False,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks (4).")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Number of micro-batches (8).")] = None,
    chunks: Annotated[int | None, typer.Option(help="Stages a rank.")] = None,
    group: Annotated[int | None, typer.Option(
        help="Micro-batches of one chunk in a row (interleaved).")] = None,
    waves: Annotated[int | None, typer.Option(help="Waves of stages (hanayo).")] = None,
    recompute: Annotated[bool, typer.Option(
        "--recompute", help="Keep inputs only and compute activations again.")] = False,
    memory_limit: Annotated[str | None, typer.Option(
        metavar="X", help="What a rank may keep at most, in micro-batches (zb-auto).")] = None,
    costs: Annotated[str | None, typer.Option(
        help="F=1,I=1,W=1,latency=0; fractions such as 1/2 are exact, F=1:2:1:1 is a cost a "
             f"stage. Names: {', '.join(COSTS)}.")] = None,
    forward_only: Annotated[bool, typer.Option(
        "--forward-only", help="Only the forward pass, as a staircase.")] = False,
    figure: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Draw the timeline as PNG, SVG or PDF.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Draw a schedule and its figures: rows, a picture by time, bubbles, memory."""
    from minipipe import ScheduleError, report

    prices = parse_costs(costs)
    own = {"chunks": chunks, "group": group, "waves": waves, "recompute": recompute}
    for argument, value in own.items():
        if value is not None and argument != "recompute" and value < 1:
            refuse(f"{argument}={value} must be a whole number, at least 1")
    if memory_limit is not None:
        own["memory_limit"] = exact_number(memory_limit, f"--memory-limit {memory_limit}",
                                           "4 or 5/2")  # fmt: skip
    if every or name is None:
        if name is not None or forward_only or not every:
            refuse("give --all alone, without NAME and --forward-only" if every else
                   "NAME is missing: a schedule, a file of rows, or --all")  # fmt: skip
        cli_all.show_all(ranks, microbatches, prices, own, figure, as_json)
        return
    schedule = build_schedule(name, ranks, microbatches, costs=prices, **own)
    if forward_only:
        try:
            schedule = report.forward_part(schedule)
        except ScheduleError as error:
            refuse(f"--forward-only: {error}")
    t = predict(schedule, prices)
    if figure is not None:
        draw("timeline", t, figure)
    if as_json:
        print_json(summary(t))
    elif forward_only:
        typer.echo("\n".join(report.staircase(t)))
    else:
        _print_timeline(t)


def summary(t: Timeline) -> dict:
    """What `show --json` prints."""
    schedule = t.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "rows": [[str(action) for action in row] for row in schedule.rows],
        "makespan": t.makespan,
        "ideal": t.ideal,
        "bubble": {key: getattr(t.bubble, key)
                   for key in ("idle_over_total", "idle_over_ideal", "own_span", "time")},
        "peak_activations": list(t.peak_activations),
        "parameter_copies": schedule.parameter_copies,
        "lower_bound": t.lower_bound,
    }  # fmt: skip


def draw(kind: str, what: Any, path: Path) -> None:
    """Write a figure, the function `kind` of plot; ends with 2 if the file can't be written."""
    from minipipe import plot

    if not path.suffix:
        refuse(f"--figure {path}: give the file an ending: .png, .svg or .pdf")
    try:
        plot.save(getattr(plot, kind)(what), path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None)
        refuse(f"--figure {path}: {reason.lower() if reason else error}")
    typer.echo(f"wrote {path}", err=True)


def _print_timeline(t: Timeline) -> None:
    from rich.console import Console

    from minipipe import report

    typer.echo(f"# {report.headline(t.schedule)}\n{t.schedule}\n")
    lines = report.text_picture(t, width())
    if lines:
        one = report.number(report.slot(t))
        typer.echo("\n".join([f"By time, a column is {one}:", *lines, ""]))
    else:
        typer.echo("(Too many columns for a text picture; --figure FILE draws it.)\n")
    console = Console()
    console.print(report.figures_table(t), *report.ranks_tables(t, console.width))


# ---- check -------------------------------------------------------------------------------------


@app.command()
def check(
    file: Annotated[str, typer.Argument(
        metavar="FILE", help="A file of rows; - reads standard input.")],
    memory_limit: Annotated[str | None, typer.Option(
        metavar="X", help="What a rank may keep at most, in whole-share micro-batches.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say whether rows are a legal schedule, and if not, why."""
    import minipipe as mp

    limit = None
    if memory_limit is not None:
        limit = exact_number(memory_limit, f"--memory-limit {memory_limit}", "4 or 5/2")
        if limit < 0:
            refuse(f"--memory-limit {memory_limit} must not be negative")
    where = "standard input" if file == "-" else file
    reasons: tuple[str, ...] = ()
    try:
        schedule = read_schedule(file)
        mp.check(schedule, memory_limit=limit)
    except mp.ScheduleError as error:
        reasons = error.reasons
    if as_json:
        print_json({"legal": not reasons, "reasons": list(reasons),
                    **({} if reasons else _follows(schedule))})  # fmt: skip
    elif reasons:
        typer.echo("\n".join([f"{where} is not a legal schedule:", *(f"- {r}" for r in reasons)]))
    else:
        typer.echo(_legal(schedule, where))
    if reasons:
        raise typer.Exit(1)


def _follows(schedule: Schedule) -> dict:
    """What follows from the rows alone; memory in whole-share micro-batches."""
    import minipipe as mp

    t = mp.simulate(schedule)
    return {
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "stages_of": [list(schedule.stages_of(rank)) for rank in range(schedule.ranks)],
        "copies": list(schedule.copies),
        "parameter_copies": schedule.parameter_copies,
        "peak_activations": list(t.peak_activations),
        "messages": t.messages,
        "forward_only": schedule.forward_only,
        "splits_backward": schedule.splits_backward,
        "recomputes": schedule.recomputes,
        "asynchronous": schedule.asynchronous,
    }


def _legal(schedule: Schedule, where: str) -> str:
    from minipipe import report

    facts = _follows(schedule)
    says = {"forward_only": "forward only: `evaluate` runs it, a training step can't",
            "splits_backward": "the backward pass is split into I and W",
            "recomputes": "activations are computed again (R)",
            "asynchronous": "weights are updated inside the step (U)"}  # fmt: skip
    lines = [f"{where} is a legal schedule: {report.count(schedule.ranks, 'rank')}, "
             f"{report.count(schedule.stages, 'stage')}, {schedule.microbatches} micro-batch"
             f"{'' if schedule.microbatches == 1 else 'es'}, "
             f"{report.count(facts['messages'], 'message')} between ranks"]  # fmt: skip
    for rank, (stages, peak) in enumerate(
        zip(facts["stages_of"], facts["peak_activations"], strict=True)
    ):
        held = f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        lines.append(f"rank {rank}: {held if stages else 'no stage'}; keeps the activations of "
                     f"{report.number(peak)} micro-batch{'' if peak == 1 else 'es'} at most")
    lines += [text for key, text in says.items() if facts[key]]
    if schedule.copies:
        lines.append(f"copies of stages {', '.join(map(str, schedule.copies))}: their gradients "
                     "are summed before the update")  # fmt: skip
    return "\n".join(lines)


# They add their commands.
from minipipe import cli_all, cli_grade, cli_plan, cli_run, cli_teach, doctor  # noqa: E402, F401
