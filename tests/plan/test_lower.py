"""Sends and receives that follow from the rows."""

import plan_common as common
import pytest

from minipipe import Schedule, ScheduleError, build, lower
from minipipe.lower import Message


def test_messages_of_a_small_table():
    program = lower(build("1f1b", ranks=2, microbatches=2))
    steps = [
        (str(s.action), [*map(str, s.receives)], [*map(str, s.sends)]) for s in program.steps(0)
    ]
    assert steps == [
        ("0F0", [], ["the activation of 0F0"]),
        ("0F1", [], ["the activation of 0F1"]),
        ("0B0", ["the gradient of 1B0"], []),
        ("0B1", ["the gradient of 1B1"], []),
    ]
    assert program.channel(0, 1) == (Message("F", 0, 0, 0, 1), Message("F", 0, 1, 0, 1))
    assert program.channel(1, 0) == (Message("B", 1, 0, 1, 0), Message("B", 1, 1, 1, 0))


def test_a_split_backward_sends_its_gradient_behind_i():
    program = lower(Schedule.parse("0F0 0I0 0W0\n1F0 1I0 1W0"))
    assert [[*map(str, s.sends)] for s in program.steps(1)] == [[], ["the gradient of 1B0"], []]
    assert [len(s.receives) for s in program.steps(0)] == [0, 1, 0]


def test_stages_that_meet_on_one_rank_hand_over_without_a_message():
    program = lower(common.order("zb-v"))
    assert not [m for m in program.channel(3, 3)]
    for rank in range(4):
        for step in program.steps(rank):
            assert all(m.source != m.target for m in step.receives + step.sends)
    three_to_four = [s for s in program.steps(3) if s.action.stage == 4 and s.action.kind == "F"]
    assert all(not step.receives for step in three_to_four)
    alone = lower(build("interleaved", ranks=1, microbatches=3, chunks=3))
    assert not any(step.receives + step.sends for step in alone.steps(0))


def test_a_pair_waits_for_both_and_sends_both():
    program = lower(common.order("dualpipe"))
    step = next(s for s in program.steps(1) if str(s.action) == "(2F6;1B0)")
    assert set(step.receives) == {Message("F", 1, 6, 2, 1), Message("B", 2, 0, 2, 1)}
    assert set(step.sends) == {Message("F", 2, 6, 1, 0), Message("B", 1, 0, 1, 0)}
    # The copy of the stage on the row of its own micro-batch: 4 to 7 run up, 0 to 3 down.
    assert {(m.source, m.target) for m in program.channel(3, 2) if m.kind == "F"} == {(3, 2)}
    assert {m.microbatch for m in program.channel(0, 1) if m.kind == "F"} == {0, 1, 2, 3}


EVERY = common.every()


@pytest.mark.parametrize("schedule, label", EVERY, ids=[label for _, label in EVERY])
def test_receives_equal_sends_for_each_ordered_pair_of_ranks(schedule, label):
    """Trap 5: what a rank receives from another is what that one sends; and in its order, so that
    a rank which takes the messages of a channel in order always finds the one that it needs."""
    program = lower(schedule)
    received: dict = {}
    for rank in range(schedule.ranks):
        for step in program.steps(rank):
            for message in step.receives:
                assert message.target == rank
                received.setdefault((message.source, rank), []).append(message)
    for a in range(schedule.ranks):
        for b in range(schedule.ranks):
            sent = program.channel(a, b)
            assert all((m.source, m.target) == (a, b) for m in sent)
            assert len(set(sent)) == len(sent)
            assert sorted(sent) == sorted(received.get((a, b), []))
    total = sum(len(v) for v in received.values())
    assert total == program.routes().total()


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "breadth-first"])
def test_every_schedule_runs_when_receives_are_taken_in_the_senders_order(name):
    """No tags (NCCL): a receive that is posted in the sender's order blocks nobody for ever, even
    if a send ends only when its receive is posted and a rank posts no receive ahead of need."""
    for size in common.sizes(name):
        program = lower(build(name, **size))
        ranks = range(program.schedule.ranks)
        channels = {(a, b): program.channel(a, b) for a in ranks for b in ranks}
        sent = dict.fromkeys(channels, 0)
        place = [0] * len(ranks)
        moved = True
        while moved:
            moved = False
            for rank in ranks:
                steps = program.steps(rank)
                while place[rank] < len(steps) and all(
                    m in channels[m.source, rank][: sent[m.source, rank]]
                    for m in steps[place[rank]].receives
                ):
                    for m in steps[place[rank]].sends:
                        assert channels[rank, m.target][sent[rank, m.target]] == m
                        sent[rank, m.target] += 1
                    place[rank] += 1
                    moved = True
        assert place == [len(row) for row in program.schedule.rows], size


def test_two_ranks_whose_neighbours_on_both_sides_are_the_same():
    """Trap 9: at P = 2 activations and gradients of both chunks share the two channels."""
    program = lower(build("interleaved", ranks=2, microbatches=4))
    down, up = program.channel(0, 1), program.channel(1, 0)
    assert {(m.kind, m.stage) for m in down} == {("F", 0), ("F", 2), ("B", 2)}
    assert {(m.kind, m.stage) for m in up} == {("F", 1), ("B", 1), ("B", 3)}
    assert len(down) == len(up) == 12
    for rank in (0, 1):
        for step in program.steps(rank):
            for m in step.receives:
                one, kind, number, _ = step.action
                expected = (kind, one - 1 if kind == "F" else one + 1, number)
                assert (m.kind, m.stage, m.microbatch) == expected


def test_lowering_refuses_what_is_not_legal():
    for text in ("0F0 0F0 0B0", "0F0 0B0\n2F0 2B0", "0B0 0F0", "0F0 1F0 0B0\n1B0"):
        with pytest.raises(ScheduleError):
            lower(Schedule.parse(text))
    with pytest.raises(TypeError, match="a Schedule is needed, not str"):
        lower("0F0 0B0")
