"""The main job: one model trained on one process, with DDP and by schedules, compared honestly.

    minipipe race

Training runs at full speed. The bubbles are then measured over a few steps on emulated devices
(see `emulation.py`), since ranks that share cores can't show a pipeline's speed.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from minipipe import partition, plot, trace
from minipipe.batch import row_counts
from minipipe.costs import Costs
from minipipe.probe import Probe, probe
from minipipe.ranks.launch import launch
from minipipe.schedule import Schedule
from minipipe.schedules import build
from minipipe.simulate import simulate
from minipipe.timeline import Timeline
from minipipe.training import (
    STEP,
    Job,
    Paced,
    Run,
    loss_fn,
    train_alone,
    train_ddp,
    train_pipeline,
)

DEFAULT_PACE = 0.03  # seconds of a forward on an emulated device; interleaved chunks take less
WORK_SHARE = 0.1  # how much of its slot an action's real work may take
SCHEDULES = ("naive", "gpipe", "gpipe+recompute", "1f1b", "interleaved")
LIMIT = 240.0  # seconds that one entry may take


class OverrunError(RuntimeError):
    """More than 1 % of the paced actions took longer than their slot: nothing is shown."""


@dataclass
class Result:
    """What a race found: `summary` is the JSON of the command line, the timelines are by name."""

    summary: dict[str, Any]
    predicted: dict[str, Timeline] = field(default_factory=dict)
    measured: dict[str, Timeline] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)


def named_schedules(names, ranks: int, microbatches: int) -> list[Schedule]:
    """The schedules called so; `+recompute` behind a name turns recompute on."""
    made = []
    for name in names:
        plain = name.removesuffix("+recompute")
        arguments = {"recompute": True} if plain != name else {}
        made.append(build(plain, ranks=ranks, microbatches=microbatches, **arguments))
    return made


def race(job: Job, schedules: list[Schedule], *, ddp: bool = True, pace: float | None = None,
         paced_steps: int = 3, own_step: bool = False,
         progress: Callable[[str, int], None] = lambda name, step: None) -> Result:  # fmt: skip
    """Train every entry by itself from the same weights and batches; all schedules on equally
    many ranks.

    pace: seconds that an emulated device takes for the forward of one rank's whole share of the
    model (I and W take as long each); None chooses it. own_step: each rank of a pipeline takes its
    optimizer step at its own end. progress(name, step) is told of each step.
    Raises OverrunError where the machine is too busy to measure.
    """
    ranks, microbatches = schedules[0].ranks, schedules[0].microbatches
    probes = launch(_probes, job, schedules, ranks=1, threads=1, timeout=LIMIT)[0]
    slot = pace or _slot(schedules, probes)
    one = _launch(train_alone, "one-process", progress, job, ranks=1)
    entries = [_entry("one-process", one, one)]
    if ddp:
        entries.append(_entry("ddp", _launch(train_ddp, "ddp", progress, job, ranks=ranks), one))
    result = Result(
        {"ranks": ranks, "microbatches": microbatches, "batch": job.setting.batch,
         "model": job.setting.model, "dataset": job.setting.dataset,
         "steps": job.setting.steps, "pace_ms": slot * 1e3, "entries": entries}
    )  # fmt: skip
    for schedule in schedules:
        found = _launch(train_pipeline, schedule.name, progress, job, schedule, slot, paced_steps,
                        own_step, ranks=ranks)  # fmt: skip
        entry = _entry(schedule.name, [run for run, _ in found], one)
        entries.append(entry)
        _compare(result, entry, schedule, probes[schedule.name], [p for _, p in found], slot)
    return result


def _probes(rank: int, job: Job, schedules: list[Schedule]) -> dict[str, Probe]:
    """One micro-batch of the largest size through the stages of each schedule."""
    dataset = job.dataset()
    rows = max(row_counts(job.setting.batch, schedules[0].microbatches))
    batch = dataset.train_inputs[:rows], dataset.train_targets[:rows]
    return {
        schedule.name: probe(partition.cut(job.model(dataset), schedule.stages), *batch, loss_fn)
        for schedule in schedules
    }


def _slot(schedules: list[Schedule], probes: dict[str, Probe]) -> float:
    """Slots so long that the real work fits well, also while all ranks share the cores."""
    longest = DEFAULT_PACE
    for schedule in schedules:
        found = probes[schedule.name]
        share = schedule.stages / schedule.ranks
        for forward, backward in zip(found.forward, found.backward, strict=True):
            longest = max(longest, max(forward, backward / 2) * share / WORK_SHARE)
    return round(longest, 3)


def _launch(fn: Callable, name: str, progress: Callable, *arguments, ranks: int) -> list:
    def tell(rank: int, line: str) -> None:
        if line.startswith(STEP):
            progress(name, int(line.removeprefix(STEP)))
        else:
            print(f"[rank {rank}] {line}", file=sys.stderr, flush=True)

    progress(name, 0)
    return launch(fn, *arguments, ranks=ranks, timeout=LIMIT, output=tell)


def _entry(name: str, runs: list[Run], one: list[Run]) -> dict[str, Any]:
    """One line of the comparison; lists have one number a rank."""
    first = runs[0]
    far = max(abs(a - b) for a, b in zip(first.losses, one[0].losses, strict=True))
    return {
        "name": name, "losses": first.losses, "accuracy": first.accuracy,
        "max_gradient_error": max(run.gradient_error for run in runs),
        "max_loss_difference": far,
        "step_ms": 1e3 * median(max(times) for times in zip(*(r.seconds for r in runs),
                                                            strict=True)),
        "bubble_predicted": None, "bubble_measured": None,
        "peak_activation_bytes": [run.activation_bytes for run in runs],
        "parameter_bytes": [run.parameter_bytes for run in runs],
        "bytes_sent": [run.bytes_sent for run in runs],
    }  # fmt: skip


def _compare(result: Result, entry: dict, schedule: Schedule, found: Probe, ranks: list[Paced],
             slot: float) -> None:  # fmt: skip
    """Set the measured timeline beside the predicted one: same slots, and the latency measured."""
    overruns, actions = sum(p.overruns for p in ranks), sum(p.actions for p in ranks)
    paced = ranks[0]
    if overruns > 0.01 * actions:
        raise OverrunError(
            f"{schedule.name}: {overruns} of {actions} paced actions took longer than "
            f"their slot (a forward: {1e3 * slot:.0f} ms), so the timeline would show this "
            "machine's load instead of the schedule. Close other programs, or take a longer "
            "--pace-ms"
        )
    costs = Costs(slot, slot, slot, latency=paced.latency)
    predicted = simulate(schedule, found.costs(costs))
    predicted.time_unit, predicted.memory_unit = "s", "bytes"
    ordered = sorted(paced.timelines, key=lambda t: t.makespan)
    measured = ordered[len(ordered) // 2]
    name = schedule.name
    result.predicted[name], result.measured[name] = predicted, measured
    result.latency[name] = paced.latency
    entry["bubble_predicted"] = float(predicted.bubble.idle_over_total)
    entry["bubble_measured"] = float(measured.bubble.idle_over_total)
    entry["own_span_predicted"] = float(predicted.bubble.own_span)
    entry["own_span_measured"] = float(measured.bubble.own_span)
    entry["peak_activation_bytes_predicted"] = [int(x) for x in predicted.peak_activations]
    entry["paced_step_ms"] = 1e3 * measured.makespan
    entry["latency_ms"] = 1e3 * paced.latency


def folder(root: str | Path, what: str) -> Path:
    """A new folder under `root` for one run's files."""
    path = Path(root) / time.strftime(f"{what}-%Y%m%d-%H%M%S")
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(path.name.split("_")[0] + f"_{number}")
    path.mkdir(parents=True)
    return path


def write(result: Result, path: Path) -> list[Path]:
    """Write tables, figures and traces into a folder; the files written."""
    entries = result.summary["entries"]
    (path / "race.json").write_text(json.dumps(result.summary, indent=1) + "\n")
    with (path / "race.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [key for key in entries[0] if key != "losses"],
                               extrasaction="ignore")  # fmt: skip
        table.writeheader()
        table.writerows(entries)
    figures = {"losses": plot.losses(entries), "memory-and-traffic": plot.bars(entries),
               "bubbles": plot.bubble_bars(entries)}  # fmt: skip
    for name, measured in result.measured.items():
        figures[f"timeline-{name}"] = plot.compare(result.predicted[name], measured)
        trace.write(measured, path / f"trace-{name}.json")
    if result.measured:
        figures["activations"] = plot.memory(*result.measured.values())
    for name, figure in figures.items():
        plot.save(figure, path / f"{name}.png")
    return sorted(path.iterdir())
