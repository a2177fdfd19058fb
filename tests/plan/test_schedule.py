"""Rows: their text forms, and what follows from them."""

from fractions import Fraction

import plan_common as common
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_actions import pairs, singles

from minipipe import Action, Schedule, ScheduleError, build, check

rows = st.lists(st.lists(singles | pairs, max_size=6), min_size=1, max_size=4).filter(any)


@given(rows, st.data())
def test_parse_is_the_inverse_of_print(table, data):
    schedule = Schedule(table)
    assert Schedule.parse(str(schedule)) == schedule
    gap = st.sampled_from([" ", "  ", ",", " , ", ",,", "\t", ", ,"])
    lines = ["# a comment", ""]
    for row in table:
        line = "".join(f"{action}{data.draw(gap)}" for action in row) or "-"
        lines += [line + data.draw(st.sampled_from(["", " # rank", "#"])), "  ", "# more"]
    ending = data.draw(st.sampled_from(["\n", "\r\n"]))
    assert Schedule.parse(ending.join(lines)) == schedule


def test_the_example_of_the_contract():
    text = (
        "# 1f1b, 2 ranks, 4 micro-batches\n0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n"
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3\n"
    )
    schedule = Schedule.parse(text)
    assert schedule == build("1f1b", ranks=2, microbatches=4)
    assert schedule.rows[1][1] == Action(1, "B", 0)
    assert hash(schedule) == hash(build("1f1b", ranks=2, microbatches=4))
    assert schedule != text
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 2, 4)
    assert repr(schedule) == "Schedule(2 ranks, 4 micro-batches)"


def test_rows_without_actions_and_empty_cells():
    schedule = Schedule.parse("0F0,,0B0,\n-\n,,1F0,1B0\n -,\n")
    assert [len(row) for row in schedule.rows] == [2, 0, 2, 0]
    assert str(schedule) == "0F0 0B0\n-\n1F0 1B0\n-"
    assert Schedule.parse("\ufeff0F0,0B0\r\n").rows == (Schedule.parse("0F0 0B0").rows[0],)


def test_what_follows_from_the_rows():
    looped = build("interleaved", ranks=4, microbatches=8)
    assert (looped.stages, looped.stages_of(1), looped.copies) == (8, (1, 5), ())
    assert looped.parameter_copies == 1
    two_way = common.order("dualpipe")
    assert (two_way.stages, two_way.copies) == (4, (0, 1, 2, 3))
    assert two_way.holders == {0: (0, 3), 1: (1, 2), 2: (1, 2), 3: (0, 3)}
    assert two_way.parameter_copies == 2
    assert two_way.has_pairs and two_way.splits_backward and not two_way.recomputes
    assert Schedule.parse("0F0 1F0\n2F0").parameter_copies == Fraction(4, 3)
    assert build("inference", ranks=2, microbatches=1).forward_only
    assert build("gpipe", ranks=2, microbatches=1, recompute=True).recomputes
    assert Schedule.parse("0F0 0B0 0U0").asynchronous
    assert not Schedule.parse("(0F1;0B0)").forward_only, "the backward of a pair counts"


@pytest.mark.parametrize(
    "text, place",
    [
        ("0F0 0B0\n1F0 1C0", "row 1, place 1: '1C0'"),
        ("# note\n\n-\n0F0 nonsense", "row 1, place 1: 'nonsense'"),
        ("0F0 (0F1;0B0", "row 0, place 1: '(0F1;0B0'"),
        ("0F0 - 0B0", "row 0, place 1: '-'"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text, place):
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(text)
    assert str(error.value).startswith(place)


@pytest.mark.parametrize("text", ["", "  \n", "# only a comment", "-", "-\n-", ",,,"])
def test_a_table_without_actions_is_refused(text):
    with pytest.raises(ScheduleError, match="no actions"):
        Schedule.parse(text)


@pytest.mark.parametrize(
    "table, words",
    [
        ("0F0 0B0", "rows must be lists"),
        (5, "rows must be lists"),
        (b"0F0", "rows must be lists"),
        ({0: ["0F0"]}, "rows must be lists"),
        ([{"0F0", "0B0"}], "row 0 must be a list"),
        (["0F0 0B0"], "row 0 must be a list"),
        ([["0F0"], 7], "row 1 must be a list"),
        ([["0F0", 7]], "row 0, place 1: 7 is not an action"),
        ([[Action(-1, "F", 0)]], "row 0, place 0"),
        ([[Action(0, "F", 0), Action(0, "X", 0)]], "row 0, place 1"),
        ([[Action("zero", "F", 0)]], "row 0, place 0"),
        ([[Action(0, "F", True)]], "row 0, place 0"),
        ([[Action(0, ["F"], 0)]], "row 0, place 0"),
        ([[Action(0.0, "F", 0)]], "row 0, place 0"),
        ([[Action(0, "B", 0, Action(0, "F", 1))]], "row 0, place 0"),
        ([[Action(0, "F", 0, Action(0, "F", 1, Action(0, "B", 2)))]], "row 0, place 0"),
        ([[Action(0, "F", 0, "0I1")]], "row 0, place 0"),
        ([[Action(0, "F", 0, Action(0, "B", 1.0))]], "row 0, place 0"),
    ],
)
def test_rows_of_something_else_are_refused(table, words):
    with pytest.raises(ScheduleError) as error:
        Schedule(table)
    assert words in str(error.value)


def test_parse_wants_text():
    with pytest.raises(TypeError, match="reads text"):
        Schedule.parse(None)


def test_csv_has_torchs_spelling():
    schedule = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1I1 1W1\n")
    assert schedule.to_csv() == "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1I1,1W1\n"
    assert Schedule.parse(schedule.to_csv()) == schedule
    empty = Schedule.parse("-\n0F0\n-")
    assert Schedule.parse(empty.to_csv()) == empty


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0 0R0 0B0", "no action R"),
        ("0F0 0B0 0U0", "no action U"),
        ("0F0 0R0 0B0 0U0", "no action R or U"),
        ("0F0 0B0\n0F1 0B1", "copies of a stage"),
    ],
)
def test_csv_refuses_what_torch_cannot_express(text, words):
    with pytest.raises(ScheduleError, match=words):
        Schedule.parse(text).to_csv()


@pytest.mark.parametrize("odd", [
    Action(0, "F", 10**9), Action(10**9, "F", 0), Action(0, "F", 1, False), Action(0, "F", 1, [])])
@pytest.mark.parametrize("before", [0, 1, 2047, 2048])
def test_actions_without_a_text_form_are_refused(odd, before):
    """At any place of a row, as they are read from text; rows are read block by block."""
    row = [Action(0, "F", m) for m in range(2, before + 2)]
    with pytest.raises(ScheduleError, match=f"row 0, place {before}: "):
        Schedule([[*row, odd]])


@given(st.text(alphabet="0123456789FBIWRU(); ,-#\n\tOVERLAP_x٣", max_size=60))
def test_any_text_is_read_or_refused_in_words(text):
    try:
        schedule = Schedule.parse(text)
    except ScheduleError:
        return
    assert Schedule.parse(str(schedule)) == schedule
    try:
        check(schedule)
    except ScheduleError as error:
        assert error.reasons
