"""The commands that start real processes: `race`, `run` and `bench`."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minipipe.cli import Json, app, fail, print_json, read_schedule, refuse, width

if TYPE_CHECKING:
    from minipipe import Schedule
    from minipipe.race import Result
    from minipipe.training import Job

Ranks = Annotated[int, typer.Option(help="Number of ranks, each a process.")]
Microbatches = Annotated[int, typer.Option(help="Micro-batches that a batch is cut into.")]
Batch = Annotated[int | None, typer.Option(help="Rows a batch (64).")]
Steps = Annotated[int | None, typer.Option(help="Training steps of each entry (120).")]
Model = Annotated[str, typer.Option(help="resnet, vit, mlp or resnet18.")]
Data = Annotated[str, typer.Option(help="mnist, digits, shapes, cifar10 or fashion-mnist.")]
Rate = Annotated[float | None, typer.Option("--learning-rate", help="Of the optimizer, SGD.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the order of the batches.")]
PaceMs = Annotated[float | None, typer.Option(
    help="Milliseconds of a forward on an emulated device (chosen by itself).")]  # fmt: skip
PacedSteps = Annotated[int, typer.Option(help="Steps on emulated devices, for the timelines.")]
Narrate = Annotated[str | None, typer.Option(
    metavar="NAME", help="Tell a measured step of this schedule action by action.")]  # fmt: skip
OwnStep = Annotated[bool, typer.Option(
    "--own-step", help="Each rank updates its weights at its own end of a step.")]  # fmt: skip
Out = Annotated[Path, typer.Option(help="Folder in which each run gets one for its files.")]


@app.command()
def race(
    ranks: Ranks = 4, microbatches: Microbatches = 8, batch: Batch = None, steps: Steps = None,
    schedules: Annotated[str | None, typer.Option(
        help="Names with commas between; +recompute behind a name turns recompute on.")] = None,
    ddp: Annotated[bool, typer.Option(help="Train with DistributedDataParallel too.")] = True,
    model: Model = "resnet", dataset: Data = "mnist", learning_rate: Rate = None, seed: Seed = 0,
    pace_ms: PaceMs = None, paced_steps: PacedSteps = 3, own_step: OwnStep = False,
    narrate: Narrate = None, out: Out = Path("runs"), as_json: Json = False,
) -> None:  # fmt: skip
    """Train the image model on one process, with DDP and by schedules, and compare them."""
    _start(f"minipipe race: one process, {'DDP, ' if ddp else ''}then schedules, on {ranks} ranks")
    from minipipe import ScheduleError
    from minipipe.race import SCHEDULES, named_schedules

    job = _job(model, dataset, batch, steps, learning_rate, seed)
    names = schedules.replace(" ", "").split(",") if schedules else SCHEDULES
    try:
        tables = named_schedules(names, ranks, microbatches)
    except ScheduleError as error:
        refuse(str(error))
    if ddp and job.setting.batch % ranks:
        refuse(f"--batch {job.setting.batch} can't be split evenly over {ranks} ranks for DDP: "
               f"take a multiple of {ranks}, or --no-ddp")  # fmt: skip
    _compare(job, tables, "race", ddp, pace_ms, paced_steps, own_step, narrate, out, as_json)


@app.command()
def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Rows of a schedule; - reads them.")],
    batch: Batch = None, steps: Steps = None, model: Model = "resnet", dataset: Data = "mnist",
    learning_rate: Rate = None, seed: Seed = 0, pace_ms: PaceMs = None,
    paced_steps: PacedSteps = 3, own_step: OwnStep = False, narrate: Narrate = None,
    out: Out = Path("runs"), as_json: Json = False,
) -> None:  # fmt: skip
    """Train with a schedule of one's own from a file, beside one process."""
    from minipipe import ScheduleError, check

    try:
        schedule = read_schedule(file)
        check(schedule)
    except ScheduleError as error:
        fail(f"{file} is not a legal schedule:\n{error}")
    if schedule.forward_only:
        fail(f"{file} has no backward passes, so nothing can be trained")
    if schedule.asynchronous:
        fail(f"{file} updates weights within the table (U), which can't be run yet")
    schedule.name = schedule.name or "own"
    _start(f"minipipe run: one process, then {schedule.name} on {schedule.ranks} ranks")
    job = _job(model, dataset, batch, steps, learning_rate, seed)
    _compare(job, [schedule], "run", False, pace_ms, paced_steps, own_step, narrate, out, as_json)


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]…")] = None,
    as_json: Json = False,
) -> None:
    """Run the side-by-side benchmarks: ours and a peer's, in turns, in one run."""
    from minipipe.bench import BENCHMARKS

    unknown = [name for name in names or [] if name not in BENCHMARKS]
    if unknown:
        refuse(f"no benchmark '{unknown[0]}': {', '.join(BENCHMARKS)}")
    found = []
    for name in names or BENCHMARKS:
        for case in BENCHMARKS[name]():
            found.append(case.as_dict())
            if not as_json:
                typer.echo(case.line())
    if as_json:
        print_json({"benchmarks": found})


def _start(headline: str) -> None:
    """Say something at once, and let the fork server start while torch is imported here."""
    typer.echo(f"{headline} …", err=True)
    from minipipe.ranks.launch import warm

    warm()


def _job(model: str, dataset: str, batch, steps, learning_rate, seed: int) -> Job:
    from minipipe import datasets, models
    from minipipe.training import Job

    for option, value, legal in (("--model", model, models.NAMES),
                                 ("--dataset", dataset, datasets.NAMES)):  # fmt: skip
        if value not in legal:
            refuse(f"{option} {value}: legal are {', '.join(legal)}")
    for option, value in (("--batch", batch), ("--steps", steps),
                          ("--learning-rate", learning_rate)):  # fmt: skip
        if value is not None and not 0 < value < float("inf"):
            refuse(f"{option} {value}: must be a finite number greater than 0")
    if not 0 <= seed < 2**63:
        refuse(f"--seed {seed}: must be from 0 to {2**63 - 1}")
    usual = models.SETTINGS.get(model, models.DEFAULT)
    given = {"batch": batch, "steps": steps, "learning_rate": learning_rate}
    changes = {name: value for name, value in given.items() if value is not None}
    job = Job(replace(usual, model=model, dataset=dataset, **changes), seed)
    try:
        images = job.dataset()
        job.model(images)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        refuse(str(error))
    rows = len(images.train_inputs)
    if job.setting.batch > rows:
        refuse(f"--batch {job.setting.batch}: {dataset} has {rows} training images")
    return job


def _compare(job: Job, schedules: list[Schedule], what: str, ddp: bool, pace_ms, paced_steps: int,
             own_step: bool, narrate: str | None, out: Path, as_json: bool) -> None:  # fmt: skip
    """Run the comparison with a progress display, then show and write what it found."""
    from minipipe.race import OverrunError, folder, write
    from minipipe.race import race as run_race
    from minipipe.ranks.launch import RankError

    names = [schedule.name for schedule in schedules]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        refuse(f"{twice[0]} is named twice")
    for schedule in schedules:
        if schedule.forward_only or schedule.asynchronous:
            refuse(f"{schedule.name}: only schedules with backward passes and without U are "
                   "trained")  # fmt: skip
    layers = len(job.model(job.dataset()))
    most = max(schedules, key=lambda schedule: schedule.stages)
    if most.stages > layers:
        refuse(f"{most.name} has {most.stages} stages, but {job.setting.model} has {layers} layers "
               "to cut: take fewer ranks or chunks, or another --model")  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        refuse(f"--out {out}: {(error.strerror or str(error)).lower()}")
    if narrate is not None and narrate not in names:
        refuse(f"--narrate {narrate}: legal are {', '.join(names)}")
    if paced_steps < 1:
        refuse(f"--paced-steps {paced_steps}: must be at least 1")
    if pace_ms is not None and not 0 < pace_ms < 10_000:
        refuse(f"--pace-ms {pace_ms}: must be between 0 and 10000")
    least = max(schedule.microbatches for schedule in schedules)
    if job.setting.batch < least:
        refuse(f"--batch {job.setting.batch}: {least} micro-batches need at least {least} rows")
    entries = 1 + ddp + len(schedules)
    try:
        with _progress(entries, job.setting.steps) as progress:
            result = run_race(job, schedules, ddp=ddp, pace=pace_ms and pace_ms / 1e3,
                              paced_steps=paced_steps, own_step=own_step, progress=progress)
    except (OverrunError, RankError) as error:
        fail(str(error))
    path = folder(out, what)
    files = write(result, path)
    if as_json:
        print_json(result.summary)
    else:
        _tell(result, narrate)
        typer.echo(f"\nFigures, tables and traces: {path}/ ({len(files)} files)")


def _tell(result: Result, narrate: str | None) -> None:
    from rich.console import Console

    from minipipe import report, trace

    console = Console(width=width() or 124, highlight=False)
    summary = result.summary
    if narrate is not None:
        for sentence in trace.narrate(result.measured[narrate]):
            typer.echo(sentence)
    console.print(*report.race_tables(summary["entries"], console.width))
    pace, cores = summary["pace_ms"], os.cpu_count()
    latencies = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in result.latency.items())
    console.print(
        f"Bubbles are measured on emulated devices: slots of F : I : W = 1 : 1 : 1, {pace:.0f} ms "
        "each for a rank's whole share of the model. Predicted ones are simulated with the same "
        f"slots and with the latency of a message measured beforehand (ms: {latencies}).\n",
        soft_wrap=width() is None,
    )
    console.print(report.in_words(summary["entries"], cores), soft_wrap=width() is None)
    spans = [(e["name"], e["own_span_predicted"], e["own_span_measured"], e["paced_step_ms"])
             for e in summary["entries"] if e["bubble_measured"] is not None]  # fmt: skip
    console.print("\nOwn span is the zero-bubble papers' bubble, the largest over the ranks of "
                  "(own span - busy) / own span; what is idle before a rank's first and after its "
                  "last action does not count in it.")  # fmt: skip
    for name, predicted, measured, step in spans:
        console.print(f"  {name}: own span {report.percent(measured)} measured, "
                      f"{report.percent(predicted)} predicted; step {step:.0f} ms on emulated "
                      "devices", soft_wrap=True)  # fmt: skip


@contextmanager
def _progress(entries: int, steps: int):
    """A function (entry, step) that moves a bar on standard error, or prints a line an entry."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        def tell(name: str, step: int) -> None:
            if not step:
                print(f"training {name} …", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (TextColumn("{task.description:>16}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())  # fmt: skip
    with Progress(*columns, console=console) as bars:
        whole = bars.add_task("all entries", total=entries * steps)
        rows: dict[str, int] = {}

        def move(name: str, step: int) -> None:
            if name not in rows:
                rows[name] = bars.add_task(name, total=steps)
            bars.update(rows[name], completed=step)
            bars.update(whole, completed=(len(rows) - 1) * steps + step)

        yield move
