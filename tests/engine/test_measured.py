"""What a real step's timeline says, without a word about speed; and what engine/ may hold."""

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from ranks import batch, error, gradients, linears, mean_mse, on_ranks, one_process, schedule
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

ENGINE = Path(mp.__file__).parent / "engine"
pytestmark = pytest.mark.timeout(60)
TABLES = [schedule("gpipe", 4, 5), schedule("1f1b", 4, 5), schedule("1f1b+recompute", 4, 3),
          schedule("interleaved", 4, 4, chunks=2), schedule("naive", 4, 2),
          mp.Schedule.parse("0F0 0F1 0B0 0B1\n-\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1\n-")]  # fmt: skip


def timelines(rank, tables, **arguments):
    found = []
    for rows in tables:
        pipe = Pipeline(linears(rows.stages), rows, mean_mse, **arguments)
        x = batch(3 * rows.microbatches, 8)
        for _ in range(2):
            step = pipe.step(x, x)
        line = step.timeline
        found.append((line.spans, line.makespan, line.busy, step.ledger, line.bubble, line.origin))
    return found


def check(rows, spans, makespan):
    """In order, without overlap, and each after what it waited for, on one clock."""
    assert min(span.start for span in spans) == 0
    assert max(span.end for span in spans) == makespan
    assert all(0 <= span.start <= span.end <= makespan for span in spans)
    for rank in range(rows.ranks):
        own = [span for span in spans if span.rank == rank]
        assert tuple(span.action for span in own) == rows.rows[rank]
        assert all(before.end <= after.start for before, after in pairwise(own))
    ends = {str(span.action): span.end for span in spans}
    for span in spans:
        s, m = span.action.stage, span.action.microbatch
        needs = {"F": [f"{s - 1}F{m}"], "B": [f"{s + 1}B{m}", f"{s}F{m}", f"{s}R{m}"],
                 "R": [f"{s}F{m}"]}[span.action.kind]  # fmt: skip
        assert all(ends.get(need, 0) <= span.start for need in needs), span


def test_the_timeline_keeps_the_order_of_things():
    everyone = on_ranks(timelines, TABLES, ranks=4)
    for number, rows in enumerate(TABLES):
        found = [rank[number] for rank in everyone]
        spans, makespan, busy, ledger, bubble, origin = found[0]
        assert all(other == found[0] for other in found), "the same on every rank"
        assert origin == "measured"
        check(rows, spans, makespan)
        idle = 1 - sum(busy) / (rows.ranks * makespan)
        assert bubble.idle_over_total == pytest.approx(idle) and 0 <= idle < 1


def test_the_ledger_sums_to_the_makespan():
    for rank in on_ranks(timelines, TABLES, ranks=4)[:1]:
        for _, makespan, busy, ledger, _, _ in rank:
            for own, compute in zip(ledger, busy, strict=True):
                parts = [own.compute, own.transfer, *own.waiting]
                assert min(parts) >= 0 and own.compute == compute
                assert sum(parts) == pytest.approx(makespan, rel=1e-9)


class Sleeps(nn.Linear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def slow(rank):
    model = [Sleeps(8, 8).double() for _ in range(2)]
    pipe = Pipeline(model, schedule("gpipe", 2, 3), mean_mse)
    pipe.step(batch(6, 8), batch(6, 8))
    return pipe.step(batch(6, 8), batch(6, 8)).timeline.spans


def test_an_action_takes_at_least_as_long_as_its_stage():
    spans = on_ranks(slow, ranks=2)[0]
    forwards = [span for span in spans if span.action.kind == "F"]
    assert len(forwards) == 6 and all(span.end - span.start >= 0.02 for span in forwards)
    second = [span.start for span in forwards if span.rank == 1]
    assert second[0] >= 0.02


def paced(rank, rows, costs):
    model = linears(rows.stages)
    pipe = Pipeline(model, rows, mean_mse, pace=mp.Pace(costs))
    for _ in range(2):
        pipe.zero_grad()
        step = pipe.step(batch(9, 8), batch(9, 8, seed=2))
    _, wanted = one_process(linears(rows.stages), batch(9, 8), batch(9, 8, seed=2))
    return step.timeline.spans, step.timeline.origin, error(gradients(pipe), wanted)


def test_emulated_devices_keep_to_their_slots():
    """And to their links; that the work is done within a slot is not for here, nor how fast."""
    rows = schedule("1f1b", 3, 4)
    costs = mp.Costs(forward=0.01, backward_input=0.02, backward_weight=0.01, latency=0.005)
    for spans, origin, off in on_ranks(paced, rows, costs, ranks=3):
        assert origin == "emulated" and off < 1e-10
        check(rows, spans, max(span.end for span in spans))
        ends = {str(span.action): span.end for span in spans}
        for span in spans:
            s, m = span.action.stage, span.action.microbatch
            forward = span.action.kind == "F"
            slot, need = (0.01, f"{s - 1}F{m}") if forward else (0.03, f"{s + 1}B{m}")
            assert span.end - span.start == pytest.approx(slot, abs=1e-6)
            assert span.start >= ends.get(need, -1) + 0.005 - 0.001


def test_no_schedule_is_known_to_the_engine():
    """DESIGN.md: a new schedule adds no line to the engine, nor to what stands around it."""
    around = [*ENGINE.parent.glob("ranks/*.py"), *map(ENGINE.parent.joinpath, (
        "pipeline.py", "results.py", "batch.py", "lower.py", "partition.py"))]  # fmt: skip
    files = [*ENGINE.rglob("*.py"), *(file for file in around if file.exists())]
    assert len(files) > 6
    for file in files:
        text = file.read_text()
        for name in mp.SCHEDULES:
            for word in {name, name.replace("-", "_"), name.replace("-", "")}:
                # "inference" and "naive" are everyday words too.
                quoted = rf"[\"'`]{re.escape(word)}[\"'`]"
                alone = rf"\b{re.escape(word)}\b"
                pattern = quoted if name in ("inference", "naive") else alone
                assert not re.search(rf"(?i){pattern}", text), f"{word} in {file.name}"


def test_the_engine_is_small():
    lines = {file.name: len(file.read_text().splitlines()) for file in ENGINE.rglob("*.py")}
    assert sum(lines.values()) <= 1200, lines
