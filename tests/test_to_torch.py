"""Rows from here run by torch's own runtime, and torch's orders simulated by ours."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import minipipe as mp
from minipipe.ranks.launch import launch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "to-torch.md").read_text(encoding="utf-8")
SCRIPT = re.search(r"<!-- script: to_torch.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)[1]
# By hand: stages 0 and 3 on rank 0, a fused and a split backward side by side.
OWN = """
0F0 0F1 3F0 3B0 0F2 3F1 3I1 3F2 3B2 0B0 0B1 3W1 0I2 0W2
1F0 2F0 1F1 2F1 1F2 2B0 1B0 2F2 2I1 1B1 2W1 2B2 1B2
"""
TABLES = {
    **{name: (name, {}) for name in ("naive", "gpipe", "1f1b", "interleaved", "breadth-first",
                                     "zb-h1", "zb-h2", "zb-1p", "zb-auto", "zb-v", "v-half",
                                     "v-min", "dualpipev", "hanayo")},
    "three chunks": ("interleaved", {"chunks": 3}),
    "two waves": ("hanayo", {"waves": 2}),
    "own": (OWN, {}),
    "own, of the page": (re.search(r'parse\("""\n(.*?)"""\)', SCRIPT, re.DOTALL)[1], {}),
}  # fmt: skip


def table(key):
    name, more = TABLES[key]
    if name in mp.SCHEDULES:
        return mp.build(name, ranks=4, microbatches=8, **more)
    return mp.Schedule.parse(name)


def by_torch(rank, rows, parts, x, y, file):
    """One step of torch's runtime with the CSV of the rows; gradients stay in the parts."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    mine, last = rows.stages_of(rank), rows.stages - 1
    stages = [PipelineStage(parts[s], s, rows.stages, torch.device("cpu")) for s in mine]
    runtime = _PipelineScheduleRuntime(stages, rows.microbatches, loss_fn=nn.functional.mse_loss)
    Path(file).write_text(rows.to_csv(), encoding="utf-8")
    runtime._load_csv(file, format="compute_only")
    runtime.step(*([x] if 0 in mine else []), target=y if last in mine else None)


def differences(rank, tables, folder):
    """For each table the largest difference between torch's gradient of a parameter and those of
    one process and of our engine, relative to its largest."""
    found = {}
    for number, rows in enumerate(tables):
        torch.manual_seed(number)
        parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(rows.stages)]
        one, ours = nn.Sequential(*copy.deepcopy(parts)), copy.deepcopy(parts)
        x, y = torch.randn(2, 2 * rows.microbatches, 6, dtype=torch.float64)
        nn.functional.mse_loss(one(x), y).backward()
        by_torch(rank, rows, parts, x, y, f"{folder}/{number}-{rank}.csv")
        mp.Pipeline(ours, rows, nn.functional.mse_loss).step(x, y)
        found[number] = max(
            float((a.grad - b.grad).abs().max() / b.grad.abs().max())
            for s in rows.stages_of(rank) for others in (one, ours)
            for a, b in zip(parts[s].parameters(), others[s].parameters(), strict=True)
        )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Per table the differences of all ranks: one launch for each number of ranks."""
    wrong = {}
    for ranks in (2, 4):
        keys = [key for key in TABLES if table(key).ranks == ranks]
        folder = str(tmp_path_factory.mktemp("csv"))
        each = launch(differences, [table(key) for key in keys], folder, ranks=ranks, timeout=60)
        wrong |= {key: [of[n] for of in each] for n, key in enumerate(keys)}
    return wrong


@pytest.mark.parametrize("key", TABLES)
def test_torchs_runtime_gets_our_gradients_from_our_rows(key, found):
    assert len(found[key]) == table(key).ranks
    assert max(found[key]) < 1e-10


@pytest.mark.parametrize("name, more, words", [
    ("dualpipe", {}, "copies of a stage"),
    ("chimera", {}, "copies of a stage"),
    ("1f1b", {"recompute": True}, "no action R"),
])  # fmt: skip
def test_what_torch_cannot_express_is_refused(name, more, words):
    with pytest.raises(mp.ScheduleError, match=words):
        mp.build(name, ranks=4, microbatches=8, **more).to_csv()


# torch's class, chunks, ours, and its makespan in stage times for F = I = W
ORDERS = [
    ("ScheduleLoopedBFS", 2, "breadth-first", 57),
    ("ScheduleInterleaved1F1B", 2, "interleaved", 57),
    ("ScheduleInterleavedZeroBubble", 1, "zb-h1", 27),
    ("ScheduleInterleavedZeroBubble", 2, "zb-1p", 51),
    ("ScheduleZBVZeroBubble", 2, "zb-v", 51),
    ("ScheduleDualPipeV", 2, "dualpipev", 54),
]


def torchs(cls, chunks, single=False):
    """An object of torch's class, of stages that only say how many they are."""
    from torch.distributed.pipelining import schedules

    stages = [SimpleNamespace(num_stages=4 * chunks, group_size=4, group_rank=0, submod=None,
                              stage_index=4 * chunk, is_first=not chunk, is_last=False)
              for chunk in range(chunks)]  # fmt: skip
    return getattr(schedules, cls)(stages[0] if single else stages, 8)


@pytest.mark.parametrize("cls, chunks, name, makespan", ORDERS)
def test_torchs_orders_are_read_and_simulated(cls, chunks, name, makespan, tmp_path):
    torchs(cls, chunks)._dump_csv(tmp_path / "order.csv", format="compute_only")
    schedule = mp.Schedule.parse((tmp_path / "order.csv").read_text())
    assert mp.simulate(schedule).makespan * chunks == makespan
    assert schedule == mp.build(name, ranks=4, microbatches=8)


def test_torchs_one_stage_orders_are_read_and_the_misprint_is_refused():
    def dumped(cls):
        order = torchs(cls, 1, single=True)._get_pipeline_order()
        computes = ([a for a in order[r] if a and a.is_compute_op] for r in sorted(order))
        return "\n".join(",".join(map(str, row)) for row in computes)

    assert mp.simulate(mp.Schedule.parse(dumped("ScheduleGPipe"))).makespan == 33
    text = dumped("Schedule1F1B")
    if "3F0" not in text:  # torch 2.13 and 2.14 number the last rank's forwards from 1
        with pytest.raises(mp.ScheduleError, match="3F0 is missing"):
            mp.check(mp.Schedule.parse(text))
        text = re.sub(r"3F(\d)", lambda found: f"3F{int(found[1]) - 1}", text)
    assert mp.Schedule.parse(text) == mp.build("1f1b", ranks=4, microbatches=8)
    assert mp.simulate(mp.Schedule.parse(text)).makespan == 33


def test_the_pages_script_runs_with_torchrun(tmp_path):
    assert len(SCRIPT.splitlines()) <= 40
    (tmp_path / "to_torch.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "4", "to_torch.py"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True,
                          timeout=150, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"rank (\d): stages \((\d),\), gradients differ[^:]* by (\d\.\de[-+]\d\d)",
                       done.stdout)  # fmt: skip  (one line may follow another without a break)
    assert sorted((rank, stage) for rank, stage, _ in lines) == [(r, r) for r in "0123"]
    assert all(float(error) < 1e-10 for *_, error in lines)


def test_what_the_page_says_of_its_rows_is_so():
    rows, late = table("own, of the page"), mp.Costs(latency=0.5)
    plain = mp.build("1f1b", ranks=4, microbatches=6)
    times = [mp.simulate(s, c).makespan for c in (late, None) for s in (rows, plain)]
    assert times == [28, 33, 25, 27]
    for number in times:
        assert f" {number:g}" in PAGE
