"""The benchmarks' own code, at sizes too small to say anything about speed."""

import json

import pytest
from typer.testing import CliRunner

from minipipe import bench, measure
from minipipe.cli import app
from minipipe.costs import Costs
from minipipe.ranks.launch import launch
from minipipe.schedules import build
from minipipe.simulate import simulate

KEYS = ["name", "case", "ours", "theirs", "unit", "ratio", "peer"]


def test_a_case_takes_the_medians_of_both_sides():
    case = measure.case("name", "case", [1.0, 9.0, 2.0], [4.0, 5.0, 3.0], "s", "peer")
    assert (case.ours, case.theirs, case.ratio) == (2.0, 4.0, 0.5)


def test_a_step_lasts_until_its_slowest_rank_is_done():
    assert measure.slowest([[[1, 5], [2, 2]], [[3, 4], [1, 6]]]) == [[3, 5], [2, 6]]


def test_json_has_the_documented_keys(monkeypatch):
    case = measure.Case("fake", "a case", 1.0, 2.0, "s", 0.5, "somebody")
    monkeypatch.setattr(bench, "BENCHMARKS", {"fake": lambda: [case]})
    result = CliRunner().invoke(app, ["bench", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"benchmarks": [
        {"name": "fake", "case": "a case", "ours": 1.0, "theirs": 2.0, "unit": "s", "ratio": 0.5,
         "peer": "somebody"}]}  # fmt: skip
    assert list(case.as_dict()) == KEYS


def test_an_unknown_benchmark_is_refused_with_the_legal_names():
    result = CliRunner().invoke(app, ["bench", "nonsense"])
    assert result.exit_code == 2
    assert "step-overhead" in result.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(bench.TORCH_NAMES))
def test_both_sides_of_step_overhead_run(name):
    ours, theirs = measure.slowest(launch(bench._tiny_step, name, 1, ranks=4, timeout=60))
    assert len(ours) == len(theirs) == 1
    assert ours[0] > 0 and theirs[0] > 0


@pytest.mark.timeout(120)
def test_a_paced_step_takes_at_least_the_predicted_time():
    schedule, slot = build("1f1b", ranks=2, microbatches=3), 0.02
    latency, found = launch(bench._paced, schedule, slot, 1, ranks=2, timeout=60)[0]
    predicted = simulate(schedule, Costs(slot, slot, slot)).makespan
    assert latency >= 0
    assert found[0] >= 0.99 * predicted


def test_both_sides_of_the_simulation_do_the_same_schedule():
    from torch.distributed.pipelining.schedules import _Action

    schedule = build("interleaved", ranks=4, microbatches=8)
    orders = {rank: [_Action.from_str(str(action)) for action in row]
              for rank, row in enumerate(schedule.rows)}  # fmt: skip
    bench._torch_everything(orders, 8, 4)
    bench._everything(schedule)
