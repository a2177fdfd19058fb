"""The heuristic: never worse than any named schedule, better on uneven stages, always the same."""

import json
from fractions import Fraction as Q

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import minipipe as mp
from minipipe.check import memory_peaks
from minipipe.cli import app
from minipipe.planning.problem import Problem
from minipipe.planning.search import search

UNEVEN = [
    (4, 16, "straight", False, 4, ([1, 2, 1, 1],) * 3, 0),
    (4, 16, "straight", False, 6, ([3, 2, 4, 1], [3, 2, 5, 1], [2, 2, 3, 1]), 1),
    (4, 16, "straight", True, 3, ([1, 2, 1, 1], [1, 3, 1, 1], [1, 1, 2, 1]), Q(1, 2)),
    (4, 8, "v", True, 3, ([1, 2, 1, 1, 2, 1, 1, 3],) * 3, Q(1, 4)),
    (4, 8, "loop", True, 4, ([1, 2, 1, 1, 2, 1, 1, 3],) * 3, Q(1, 4)),
    (4, 8, "mirrored", True, 5, ([1, 2, 1, 3], [1, 2, 1, 2], [1, 2, 1, 2]), 0),
]


def legal(result, costs, memory):
    """The rows are legal, their makespan is what is said, and the bound holds."""
    mp.check(result.schedule, memory_limit=memory, costs=costs)
    assert mp.simulate(result.schedule, costs).makespan == result.makespan >= result.bound
    assert result.proven == (result.makespan == result.bound)


@pytest.mark.parametrize("ranks, microbatches, placement, split, memory, times, latency", UNEVEN)
def test_better_than_every_named_schedule_on_uneven_stages(
    ranks, microbatches, placement, split, memory, times, latency
):
    costs = mp.Costs(*times, latency=latency)
    result = search(ranks, microbatches, placement, split=split, memory=memory, costs=costs,
                    steps=2000)  # fmt: skip
    legal(result, costs, memory)
    assert result.makespan < result.start[1]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["straight", "loop", "v", "mirrored"]), st.booleans(), st.data())
def test_never_worse_than_any_named_schedule(placement, split, data):
    ranks = data.draw(st.sampled_from([2, 4] if placement == "mirrored" else [1, 2, 3]))
    microbatches = data.draw(st.integers(2, 8))
    stages = ranks * (1 + (placement in ("loop", "v")))
    one = st.fractions(Q(1, 2), 3, max_denominator=3)

    def each():
        return data.draw(st.one_of(one, st.lists(one, min_size=stages, max_size=stages)))

    costs = mp.Costs(each(), each(), each(), latency=data.draw(st.integers(0, 2)), message_size=1,
                     bandwidth=data.draw(st.sampled_from([None, Q(1, 3)])),
                     exchange=data.draw(st.sampled_from([0, Q(1, 4)])))  # fmt: skip
    problem = Problem(ranks, microbatches, placement, split=split, costs=costs)
    limit = max(memory_peaks(problem.serial, costs)) * data.draw(st.integers(1, 5))
    result = search(ranks, microbatches, placement, split=split, memory=limit, costs=costs,
                    steps=60)  # fmt: skip
    legal(result, costs, limit)
    for name in mp.SCHEDULES:
        try:
            named = mp.build(name, ranks=ranks, microbatches=microbatches)
            mp.check(named, memory_limit=limit, costs=costs)
        except ValueError:
            continue
        if (named.holders == problem.serial.holders and not named.forward_only
                and not named.asynchronous and (split or not named.splits_backward)):  # fmt: skip
            assert result.makespan <= mp.simulate(named, costs).makespan, name


def test_rows_are_timed_as_simulate_times_them():
    costs = mp.Costs([1, 2, 1, 1], 2, 1, latency=Q(1, 2), message_size=1, bandwidth=Q(1, 3))
    problem = Problem(4, 8, costs=costs)
    for schedule in problem.named:
        starts, span = problem.times(problem.order(schedule))
        own = mp.simulate(problem.schedule(problem.order(schedule)), costs)
        assert Q(span, problem.scale) == own.makespan
        by_action = {span.action: span.start for span in own.spans}
        assert [Q(t, problem.scale) for t in starts] == [by_action[a] for a in problem.actions]


def test_the_same_seed_finds_the_same_rows():
    options = {"memory": 3, "split": False, "costs": mp.Costs(*[[1, 2, 1, 1]] * 3), "steps": 500}
    one, other = (search(4, 12, **options, seed=3) for _ in range(2))
    assert one.schedule == other.schedule


@pytest.fixture
def moves(monkeypatch):
    """The moves that a search tries, one item each."""
    from minipipe.planning import search as module

    tried, move = [], module._move
    monkeypatch.setattr(module, "_move", lambda *all: (tried.append(1), move(*all))[1])
    return tried


@pytest.mark.parametrize("size, options", [
    ((2, 4), {"split": False}), ((2, 4, "v"), {}), ((4, 8), {"split": False, "memory": 3}),
    (UNEVEN[0][:3], {"split": False, "memory": 4, "costs": mp.Costs(*UNEVEN[0][5])}),
])  # fmt: skip
def test_it_tries_no_move_once_the_lower_bound_is_met(size, options, moves):
    """By a named schedule, or by a list schedule where all named ones are worse."""
    result = search(*size, **options, steps=10**9, seconds=30)
    assert result.proven and not moves
    legal(result, options.get("costs"), options.get("memory"))


def test_it_stops_at_the_move_that_meets_the_lower_bound(moves):
    ranks, microbatches, placement, split, memory, times, latency = UNEVEN[1]
    result = search(ranks, microbatches, placement, split=split, memory=memory,
                    costs=mp.Costs(*times, latency=latency), steps=3000)  # fmt: skip
    assert result.proven and 0 < len(moves) < 1000, "the first of three starts does it"


def test_seconds_stop_it():
    result = search(4, 16, "v", memory=2, costs=mp.Costs(1, 2, 3), steps=10**9, seconds=1)
    assert result.seconds < 15 and result.gap < 1


@pytest.mark.parametrize("options, message", [
    ({"steps": -1}, "steps=-1 must be at least 0"),
    ({"seconds": 0}, "seconds=0 more than 0"),
    ({"split": "no"}, "split='no' must be True .* or False"), ({"split": None}, "split=None"),
    ({"memory": 0}, "memory=0 can't hold one micro-batch at a time; the least legal value is 1"),
])  # fmt: skip
def test_refusals(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        search(4, 8, **options)


def test_the_command(tmp_path):
    file = tmp_path / "rows.txt"
    command = ("search --ranks 4 --microbatches 8 --costs F=1:2:1:1 --latency 1/2 --memory 3 "
               f"--steps 300 --out {file}").split()  # fmt: skip
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["bound"] <= found["makespan"] <= found["best_named"]["makespan"]
    assert found["status"] in ("optimal", "best found") and found["method"] == "search"
    checked = CliRunner().invoke(app, ["check", str(file), "--memory-limit", "3"])
    assert checked.exit_code == 0
    for bad in (["--costs", "latency=1"], ["--memory", "x"], ["--placement", "zigzag"]):
        refused = CliRunner().invoke(app, [*command, *bad])
        assert (refused.exit_code, refused.stdout) == (2, ""), bad
