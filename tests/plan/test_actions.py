"""Actions and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipipe import Action, ScheduleError
from minipipe.actions import KINDS

numbers = st.integers(0, 10**9 - 1)
singles = st.builds(Action, numbers, st.sampled_from(sorted(KINDS)), numbers, st.none())
pairs = st.builds(
    lambda s, m, t, k: Action(s, "F", m, Action(t, "B", k)), numbers, numbers, numbers, numbers
)


@given(singles | pairs)
def test_parse_is_the_inverse_of_print(action):
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action} ") == action


def test_text_of_actions():
    assert str(Action(3, "F", 5)) == "3F5"
    assert Action.parse("12W30") == Action(12, "W", 30)
    pair = Action.parse("(0F4;7B3)")
    assert pair == Action(0, "F", 4, Action(7, "B", 3))
    assert pair.parts == (Action(0, "F", 4), Action(7, "B", 3))
    assert Action.parse("0F4").parts == (Action(0, "F", 4),)
    assert Action.parse("( 0F4 ; 7B3 )OVERLAP_F_B") == pair, "as torch writes it, and with blanks"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "0F",
        "F0",
        "0f0",
        "0X0",
        "0F0F0",
        "0F-1",
        "-1F0",
        "0 F0",
        "0F0;0B0",
        "0F0x",
        "٣F٥",
        "0F0000000000",
        "9999999999F0",
        "1" * 5000 + "F0",
        "()",
        "(0F0)",
        "(0F0;)",
        "(0F0;0B1",
        "((0F0;0B1);0B2)",
        "(0F0;0B1)OVERLAP",
        "(0F0;0B1;0W2)",
        "0UNSHARD",
        "0U",
    ],
)
def test_what_is_not_an_action_is_refused_in_words(text):
    with pytest.raises(ScheduleError, match="is not an action: write stage") as error:
        Action.parse(text)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("text", ["(0B0;0F1)", "(0F0;0F1)", "(0F4;7I3)", "(0U0;0B1)"])
def test_a_pair_is_forward_and_backward(text):
    with pytest.raises(ScheduleError, match="a pair is \\(F;B\\)"):
        Action.parse(text)


@pytest.mark.parametrize("value", [None, 5, b"0F0", ["0F0"], (0, "F", 0)])
def test_only_text_is_parsed(value):
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(value)


@pytest.mark.parametrize("text", ["1SEND_F0", "2RECV_B3", "0RESHARD", "0REDUCE_GRAD"])
def test_torch_rows_with_messages_get_the_way_out(text):
    with pytest.raises(ScheduleError, match="compute_only"):
        Action.parse(text)


def test_an_error_with_many_reasons_stays_readable():
    error = ScheduleError(*(f"reason {n}" for n in range(30)))
    assert len(error.reasons) == 30
    assert str(error).splitlines()[-2:] == ["reason 19", "… and 10 more"]
    assert isinstance(error, ValueError)
