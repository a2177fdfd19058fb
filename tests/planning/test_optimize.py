"""Certified optima: those that the papers' arguments give, and those of an exhaustive search."""

import functools
import itertools
import json
import math
import sys
from fractions import Fraction as Q

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import minipipe as mp
from minipipe.check import memory_peaks
from minipipe.cli import app
from minipipe.planning.problem import Problem

pytest.importorskip("ortools", reason="pip install 'minipipe[optimize]'")
from minipipe.planning.optimize import optimize  # noqa: E402

FAST = {"workers": 2, "time_limit": 30}


def certified(*sizes, argument=False, **options):
    """Optimum in the unit of the costs; the solver alone proves it unless `argument`."""
    result = optimize(*sizes, argument=argument, **FAST, **options)
    costs, memory = options.get("costs"), options.get("memory")
    assert result.proven and result.bound == result.makespan and result.word == "optimal"
    mp.check(result.schedule, memory_limit=memory, costs=costs)
    assert mp.simulate(result.schedule, costs).makespan == result.makespan
    assert mp.lower_bound(result.schedule, costs, memory) <= result.makespan
    assert result.start is None or result.start[1] >= result.makespan
    return result.makespan


@pytest.mark.parametrize("memory, optimum", [(4, 33), (3, 39), (2, 51)])
def test_one_stage_a_rank_fused(memory, optimum):
    assert certified(4, 8, split=False, memory=memory) == optimum
    bound = mp.lower_bound(mp.build("1f1b", ranks=4, microbatches=8), memory_limit=memory)
    assert bound == optimum


@pytest.mark.parametrize("memory", [None, 7, 4])
def test_zero_bubble_is_27_at_any_memory(memory):
    assert certified(4, 8, memory=memory) == 27


# 6m + 6p - 1 - 3k for k = 4; for the others that is too low, and what the solver alone proves is
# set down here. For k = 5 and 6 bounds.py says the same.
V_SHAPES = [(2, 63), (3, 52), (4, 41), (5, 39), (6, 38)]


@pytest.mark.parametrize("chunks_kept, optimum", V_SHAPES)
def test_v_placement(chunks_kept, optimum):
    assert 2 * certified(3, 6, "v", memory=Q(chunks_kept, 2)) == optimum >= 53 - 3 * chunks_kept


@pytest.mark.parametrize("chunks_kept, name", [(4, "v-min"), (6, "v-half"), (8, "zb-v")])
def test_v_schedules_of_the_papers_are_optimal(chunks_kept, name):
    best = certified(4, 8, "v", memory=Q(chunks_kept, 2), argument=True)
    assert 2 * best == max(6 * 8 + 6 * 4 - 1 - 3 * chunks_kept, 51)
    assert best == mp.simulate(mp.build(name, ranks=4, microbatches=8)).makespan


def test_mirrored_copies_and_loops():
    assert certified(4, 8, "mirrored") == 25  # m(F + B) + (p/2 - 1)F; DualPipe takes 26
    assert certified(2, 4, "loop", chunks=2, split=False, memory=3) == Q(27, 2)


def test_latency_and_bandwidth_are_exact():
    costs = mp.Costs(0.1, 0.25, Q(3, 10), latency=0.05, message_size=1, bandwidth=20)
    result = optimize(2, 3, costs=costs, **FAST)
    exact = mp.Costs(Q(1, 10), Q(1, 4), Q(3, 10), latency=Q(1, 20), message_size=1, bandwidth=20)
    assert result.proven and isinstance(result.makespan, int | Q)
    assert mp.simulate(result.schedule, exact).makespan == result.makespan


def rows_of_a_rank(stage: int, microbatches: int, kinds: str):
    """All orders of one stage's actions in which nothing precedes what it follows on."""
    actions = [mp.Action(stage, k, m) for k in kinds for m in range(microbatches)]
    for row in itertools.permutations(actions):
        at = {action: place for place, action in enumerate(row)}
        if all(at[a] < at[a._replace(kind=b)] for a in row
               for b in [(kinds + kinds[-1])[kinds.index(a.kind) + 1]] if b != a.kind):  # fmt: skip
            yield row


@functools.cache
def all_tables(microbatches: int, kinds: str) -> list[mp.Schedule]:
    rows = [[*rows_of_a_rank(stage, microbatches, kinds)] for stage in range(2)]
    return [mp.Schedule(table) for table in itertools.product(*rows)]


small = st.integers(1, 3)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(["FB", "FIW"]), st.data())
def test_no_table_at_all_is_better(kinds, data):
    """2 ranks, 2 micro-batches, every order there is, micro-batches out of order too."""
    def each():
        return data.draw(st.lists(small, min_size=2, max_size=2))

    costs = mp.Costs(each(), each(), each(), latency=data.draw(st.integers(0, 2)),
                     weight_size=each(), forward_size=each())  # fmt: skip
    least = max(memory_peaks(Problem(2, 2, costs=costs).serial, costs))
    limit = least + data.draw(st.integers(0, 4))
    best = math.inf
    for table in all_tables(2, kinds):
        if max(memory_peaks(table, costs)) <= limit:
            try:
                best = min(best, mp.simulate(table, costs).makespan)
            except mp.ScheduleError:
                continue  # deadlock
    assert certified(2, 2, split=kinds == "FIW", memory=limit, costs=costs) == best


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(["straight", "loop", "v", "mirrored"]), st.booleans(), st.data())
def test_the_bound_never_exceeds_a_certified_optimum(placement, split, data):
    ranks = data.draw(st.sampled_from([2, 4] if placement in ("straight", "mirrored") else [2, 3]))
    microbatches = data.draw(st.integers(2, 4))
    stages = ranks * (1 + (placement in ("loop", "v")))

    def each(least=1):
        one = st.integers(least, 3)
        return data.draw(st.one_of(one, st.lists(one, min_size=stages, max_size=stages)))

    costs = mp.Costs(each(), each(), each(0), latency=data.draw(st.integers(0, 1)),
                     weight_size=each(), forward_size=each())  # fmt: skip
    problem = Problem(ranks, microbatches, placement, split=split, costs=costs)
    least = max(memory_peaks(problem.serial, costs))
    limit = least * Q(data.draw(st.integers(4, 12)), 4)
    result = optimize(ranks, microbatches, placement, split=split, memory=limit, costs=costs,
                      argument=False, workers=2, time_limit=5)  # fmt: skip
    assert problem.argument <= result.argument <= result.makespan
    if result.proven:
        assert mp.lower_bound(problem.serial, costs, limit) <= result.bound


def test_what_is_not_proven_is_called_best_found():
    seen = []
    costs = mp.Costs([1, 2, 1, 1, 2, 1, 1, 3], 1, 2, latency=Q(1, 4))
    result = optimize(4, 12, "v", memory=2, costs=costs, time_limit=0.5, workers=2,
                      progress=lambda *each: seen.append(each))  # fmt: skip
    assert not result.proven
    assert (result.word, result.schedule.name) == ("best found", "best-found")
    assert 0 < result.gap < 1 and result.bound < result.makespan and result.seconds < 10
    assert seen and all(best >= bound for best, bound, _ in seen)
    assert mp.simulate(result.schedule, costs).makespan == result.makespan


@pytest.mark.parametrize("options, message", [
    ({"ranks": 0}, "ranks=0 must be a whole number, at least 1"),
    ({"microbatches": True}, "microbatches=True must be a whole number"),
    ({"placement": "w"}, "placement='w' must be one of straight, loop, v, mirrored"),
    ({"chunks": 2}, "chunks=2 goes with placement=loop"),
    ({"ranks": 3, "placement": "mirrored"}, "nearest legal value is 4"),
    ({"microbatches": 1, "placement": "mirrored"}, "nearest legal value is 2"),
    ({"microbatches": 10**6}, "microbatches=1000000 makes more than"),
    ({"memory": Q(1, 2)}, "memory=1/2 can't hold one micro-batch at a time; the least legal value"),
    ({"memory": "2"}, "memory='2' must be a number"),
    ({"memory": -1}, "memory=-1 must be finite and not negative"),
    ({"split": "no"}, "split='no' must be True (I and W apart) or False (B)"),
    ({"time_limit": 0}, "time_limit=0"),
    ({"workers": 0}, "workers=0"),
    ({"costs": mp.Costs(0)}, "costs: the time of F of stage 0 must be more than 0"),
    ({"costs": mp.Costs(exchange=Q(1, 4))}, "costs: exchange is hidden by overlapped pairs"),
    ({"costs": mp.Costs(message_size=3, bandwidth=1)}, "costs: bandwidth lets messages queue"),
    ({"costs": mp.Costs([1, 2, 3])}, "forward has 3 costs, but the schedule has 4 stages"),
    ({"costs": mp.Costs(Q(1, 2**43 - 1))}, "costs: the times have too fine a common unit"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises((ValueError, TypeError)) as refused:
        optimize(**{"ranks": 4, "microbatches": 8} | options)
    assert message in str(refused.value)


def test_the_command_certifies_and_writes_rows(tmp_path):
    file = tmp_path / "rows.txt"
    sizes = ["--ranks", "3", "--microbatches", "6", "--memory", "2"]
    command = ["optimize", "--placement", "v", *sizes, "--out"]
    result = CliRunner().invoke(app, [*command, str(file), "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["makespan"], found["bound"], found["gap"], found["proven"], found["status"]) == (
        20.5, 20.5, 0, True, "optimal")  # fmt: skip
    assert max(found["peak_activations"]) <= 2 and found["method"].startswith("OR-Tools 9")
    schedule = mp.Schedule.parse(file.read_text())
    assert [[str(a) for a in row] for row in schedule.rows] == found["rows"]
    assert "best found 20.5, bound 20.5, gap 0.0 %" in result.stderr
    shown = CliRunner().invoke(app, [*command[:-1]])
    assert shown.exit_code == 0
    assert "optimal: makespan 20.5, best bound 20.5, gap 0.0 %" in shown.stdout
    assert "by OR-Tools 9" in shown.stdout and " CP-SAT, " in shown.stdout


def test_without_or_tools_there_is_one_clear_line(monkeypatch):
    for name in ("ortools", "ortools.sat.python", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)
    result = CliRunner().invoke(app, ["optimize"])
    assert (result.exit_code, result.stdout) == (2, "")
    line = ("optimize needs OR-Tools: in minipipe's folder, "
            "python -m pip install -e '.[optimize]'")
    assert result.stderr.count("\n") == 1 and result.stderr.strip().endswith(f"optimize: {line}")
    with pytest.raises(ImportError, match=r"pip install 'minipipe\[optimize\]'"):
        optimize(2, 2)
