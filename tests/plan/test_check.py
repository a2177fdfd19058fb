"""Illegal tables are refused with the reason; legal ones are those that the simulator finishes."""

import random
from fractions import Fraction

import plan_common as common
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipipe import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    build,
    check,
    lower,
    lower_bound,
    simulate,
)


def reasons(text: str, **arguments) -> tuple[str, ...]:
    with pytest.raises(ScheduleError) as error:
        check(Schedule.parse(text), **arguments)
    return error.value.reasons


@pytest.mark.parametrize("schedule, label", common.every(), ids=[n for _, n in common.every()])
def test_every_known_schedule_is_legal(schedule, label):
    check(schedule)
    simulate(schedule)


REASONS = {
    # missing
    "0F0 0F1 0B0": "row 0: 0B1 is missing (without its backward pass a stage lacks a gradient)",
    "0F0 0B0 0B1": "row 0: 0F1 is missing (every micro-batch goes forward through every stage)",
    "0B0": "row 0: 0F0 is missing (every micro-batch goes forward through every stage)",
    "0F0 0F1\n1F0": "row 1: 1F1 is missing (every micro-batch goes forward through every stage)",
    "0F0 0I0": "row 0: 0W0 is missing (there is an I, so the weights still lack their gradient)",
    "0F0 0W0": "row 0: 0I0 is missing (there is a W, which follows on an I)",
    "0F0 0R0": "row 0: 0B0 is missing (there is an R, which computes again for a backward pass)",
    # whole numbers left out
    "0F0 0B0\n2F0 2B0": "stage 1 is in no row, though stage 2 is",
    "3F0 3B0": "stages 0 to 2 are in no row, though stage 3 is",
    "0F0 0F2 0B0 0B2": "micro-batch 1 is in no row, though micro-batch 2 is",
    "0F999999999": "micro-batches 0 to 999999998 are in no row, though micro-batch 999999999 is",
    "999999999F0": "stages 0 to 999999998 are in no row, though stage 999999999 is",
    # twice
    "0F0 0F0 0B0": "row 0, place 1 (0F0): stands twice, first at row 0, place 0 (0F0)",
    "0F0 0I0 0W0 0W0": "row 0, place 3 (0W0): stands twice, first at row 0, place 2 (0W0)",
    # apart
    "0F0 1F0 0B0\n1B0": "row 1, place 0 (1B0): stands apart from row 0, place 1 (1F0); "
    "one rank does all of one stage and micro-batch",
    # copies
    "0F0 0B0 0F1 0B1\n1F0 1B0\n1F1 1B1": "stage 1 stands on 2 rows (1, 2), other stages on 1",
    # order on the row
    "0B0 0F0": "row 0, place 0 (0B0): stands before its 0F0, which comes at place 1",
    "0F0 0W0 0I0": "row 0, place 1 (0W0): stands before its 0I0, which comes at place 2",
    "0F0 0B0 0R0": "row 0, place 1 (0B0): stands before its 0R0, which comes at place 2",
    "0R0 0F0 0B0": "row 0, place 0 (0R0): stands before its 0F0, which comes at place 1",
    "0F0 0B0 0I0 0W0": "row 0, place 2 (0I0): 0B0 already is the whole backward pass; "
    "write either B, or I and W",
    # waiting for what comes later on the same rank
    "1F0 0F0 1B0 0B0": "row 0, place 0 (1F0): waits for 0F0, which comes later on the same rank, "
    "at place 1",
    "0F0 1F0 0B0 1B0": "row 0, place 2 (0B0): waits for 1B0, which comes later on the same rank, "
    "at place 3",
    # pairs
    "0F0 0F1 (0F2;0B2) 0B0 0B1": "row 0, place 2 (0F2;0B2): a pair is a forward and a backward of "
    "different micro-batches",
    # updates
    "0F0 0U0 0B0": "row 0, place 1 (0U0): the gradient of micro-batch 0 is not there yet",
    "0F0 0F1 0B1 0U1 0B0": "row 0, place 3 (0U1): the gradient of micro-batch 0 is not there yet",
    "0F0 0B0 0U0 0U0": "row 0, place 3 (0U0): there is no gradient of micro-batch 0 that an "
    "earlier U has not applied",
    "0F0 0B0 0U0\n0F1 0B1 0U1": "row 0, place 2 (0U0): stage 0 stands on several rows; copies that "
    "are updated at times of their own would differ",
    "0F0 0B0 0U0\n1F0 1B0": "row 1: no U of stage 1 applies micro-batch 0",
    "0F0 0B0 0U0 0F1 0B1": "row 0: no U of stage 0 applies micro-batch 1",
    "0U0": "row 0, place 0 (0U0): there is no gradient of micro-batch 0",
}


@pytest.mark.parametrize("text", REASONS)
def test_the_reason_names_row_place_and_action(text):
    found = reasons(text)
    assert any(REASONS[text] in reason for reason in found), found
    for use in (simulate,) if "later on" in REASONS[text] else (lower, simulate):
        with pytest.raises(ScheduleError) as error:
            use(Schedule.parse(text))
        assert error.value.reasons == found


@pytest.mark.parametrize(
    "text",
    [
        "0F0 0F1 0B0",
        "0F0 0F0 0B0",
        "0B0 0F0",
        "0F0 0W0 0I0",
        "1F0 0F0 1B0 0B0",
        "3F0 3B0",
        "0F0 0B0 0R0",
        "0F999999999",
        "0F0 0I0",
    ],
)
def test_one_mistake_gives_one_reason_unless_more_is_wrong(text):
    expected = {"0F999999999": 1, "3F0 3B0": 1}.get(text, 1)
    assert len(reasons(text)) == expected, reasons(text)


def test_a_cycle_between_ranks_names_both_and_what_each_waits_for():
    (reason,) = reasons(
        "0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1\n".replace("0F0 0F1", "0F0")
        .replace("0B1 0B0", "0B0 0F1 0B1")
        .replace("1F0 1B0 1F1", "1F0 1F1 1B0")
    )
    assert reason == (
        "deadlock, each waits for the next: row 0, place 1 (0B0) waits for 1B0 at row 1, place 2; "
        "row 1, place 1 (1F1) waits for 0F1 at row 0, place 2"
    )


def test_a_cycle_of_three_ranks_and_one_who_waits_behind():
    text = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1"
    (reason,) = reasons(text)
    assert reason.count(") waits for ") == 2 and "(0B0)" in reason and "(1F1)" in reason
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(Schedule.parse(text))


def test_independent_reasons_come_together_the_earliest_first():
    found = reasons("0F0 0F1 0F1 0B0 0B1\n1B0 1F0 1F1 1B1\n2F0 2F1 2B0")
    assert len(found) == 3
    assert "row 1, place 0 (1B0): stands before its 1F0" in found[0]
    assert "row 0, place 2 (0F1): stands twice" in found[1]
    assert "row 2: 2B1 is missing" in found[2]


def test_many_missing_actions_are_counted():
    text = " ".join(f"0F{m}" for m in range(30)) + " 0B0"
    assert reasons(text) == (
        "row 0: 0B1, 0B2, 0B3, 0B4, 0B5, 0B6, 0B7, 0B8 and 21 more are missing "
        "(without its backward pass a stage lacks a gradient)",
    )


def test_memory_limit_names_rank_action_and_amount():
    gpipe, one = (build(n, ranks=4, microbatches=8) for n in ("gpipe", "1f1b"))
    check(one, memory_limit=4)
    check(gpipe, memory_limit=8)
    with pytest.raises(ScheduleError) as error:
        check(one, memory_limit=3)
    assert error.value.reasons == (
        "row 0, place 3 (0F3): rank 0 then holds 4 micro-batches' activations, the limit is 3",
    )
    with pytest.raises(ScheduleError) as error:
        check(gpipe, memory_limit=7)
    assert len(error.value.reasons) == 4, "every rank holds 8"
    looped = build("interleaved", ranks=4, microbatches=8)
    check(looped, memory_limit=5.5)
    with pytest.raises(ScheduleError, match="holds 11/2 micro"):
        check(looped, memory_limit=5)
    check(build("gpipe", ranks=2, microbatches=8, recompute=True), memory_limit=1)
    with pytest.raises(ScheduleError, match="holds 9/4 micro"):
        costs = Costs(input_size=Fraction(1, 4))
        check(build("gpipe", ranks=2, microbatches=6, recompute=True), 2, costs)


def test_sizes_and_limits_are_decimals():
    """Three times 0.1 fit into 0.3, though not as binary numbers; the bound knows that too."""
    one, costs = build("1f1b", ranks=3, microbatches=6), Costs(forward_size=0.1, weight_size=0.1)
    check(one, 0.3, costs)
    with pytest.raises(ScheduleError, match="holds 3/10 micro-batches' activations, the limit is"):
        check(one, 0.29, costs)
    assert lower_bound(one, costs, 0.3) == lower_bound(one, Costs(), 3)


def test_memory_limit_comes_with_the_other_reasons():
    found = reasons("0F0 0F1 0B0", memory_limit=1)
    assert [("missing" in r, "limit" in r) for r in found] == [(False, True), (True, False)]


@pytest.mark.parametrize("limit", ["4", True, -1, float("nan"), [4]])
def test_memory_limit_is_a_number(limit):
    with pytest.raises(TypeError, match="memory_limit must be a number"):
        check(build("gpipe", ranks=2, microbatches=2), memory_limit=limit)


# Mutations: whatever is done to a legal table, `check` and `simulate` agree on it.
BASE = [s for s, _ in common.every() if s.microbatches <= 8 and s.ranks <= 4]
BASE += [Schedule.parse("0F0 0B0 0U0 0F1 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1")]


def drop(rows, row, place, pick):
    rows[row].pop(place)


def duplicate(rows, row, place, pick):
    rows[row].insert(pick(len(rows[row]) + 1), rows[row][place])


def swap(rows, row, place, pick):
    other = pick(len(rows[row]))
    rows[row][place], rows[row][other] = rows[row][other], rows[row][place]


def move(rows, row, place, pick):
    target = rows[pick(len(rows))]
    target.insert(pick(len(target) + 1), rows[row].pop(place))


def pair(rows, row, place, pick):
    """Join a forward with a backward of the same row."""
    one, at = rows[row][place], pick(len(rows[row]))
    other = rows[row][at]
    if one.kind == "F" and other.kind == "B" and one.overlapped is None:
        rows[row][place] = one._replace(overlapped=other)
        rows[row].pop(at)


def alter(rows, row, place, pick):
    one = rows[row][place]
    rows[row][place] = Action(one.stage, "FBIWRU"[pick(6)], max(0, one.microbatch + pick(3) - 1))


MUTATIONS = [drop, duplicate, swap, move, pair, alter]


@settings(max_examples=800, deadline=None)
@given(
    st.sampled_from(BASE),
    st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3),
    st.integers(0, 2**32),
)
def test_check_refuses_or_the_table_runs(schedule, mutations, seed):
    pick = random.Random(seed).randrange
    rows = [list(row) for row in schedule.rows]
    for mutate in mutations:
        row = pick(len(rows))
        if rows[row]:
            mutate(rows, row, pick(len(rows[row])), pick)
    if not any(rows):
        return
    mutant = Schedule(rows)
    try:
        check(mutant)
    except ScheduleError as error:
        with pytest.raises(ScheduleError) as again:
            simulate(mutant)
        assert again.value.reasons == error.reasons
        return
    timeline = simulate(mutant)
    assert timeline.makespan >= timeline.lower_bound
    assert all(not levels or levels[-1][1] == 0 for levels in timeline.levels)
    channels = {
        (a, b): lower(mutant).channel(a, b)
        for a in range(mutant.ranks)
        for b in range(mutant.ranks)
    }
    assert sum(map(len, channels.values())) == timeline.messages


@pytest.mark.parametrize("mutate", [drop, duplicate])
@pytest.mark.parametrize("name", common.ORDERS)
def test_no_action_is_too_many_or_too_few(name, mutate):
    schedule = common.order(name)
    for row in range(schedule.ranks):
        for place in range(len(schedule.rows[row])):
            rows = [list(r) for r in schedule.rows]
            mutate(rows, row, place, lambda n: n - 1)
            with pytest.raises(ScheduleError):
                check(Schedule(rows))
