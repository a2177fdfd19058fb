"""Predicted times, bubbles, waiting, memory and bytes, with numbers that a person can check."""

from fractions import Fraction as Q

import plan_common as common
import pytest

from minipipe import Costs, Schedule, ScheduleError, build, simulate
from minipipe.timeline import Timeline, Waiting

ONE_TWO = Costs()  # F = 1, B = I + W = 2
ONE_ONE = Costs(backward_input=Q(1, 2), backward_weight=Q(1, 2))
UNIT = Costs(forward=2, backward_input=2, backward_weight=2)  # 1 a chunk where there are two


def test_two_ranks_one_micro_batch_by_hand():
    """0F0 0-1, 1F0 1-2, 1B0 2-4, 0B0 4-6."""
    t = simulate(Schedule.parse("0F0 0B0\n1F0 1B0"))
    assert [(s.rank, str(s.action), s.start, s.end) for s in t.spans] == [
        (0, "0F0", 0, 1),
        (0, "0B0", 4, 6),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
    ]
    assert t.spans_of(1) == t.spans[2:]
    assert (t.makespan, t.ideal, t.busy) == (6, 3, (3, 3))
    assert t.waiting == (Waiting(fill=0, inside=3, drain=0), Waiting(fill=1, inside=0, drain=2))
    assert t.bubble.idle_over_total == Q(1, 2) and t.bubble.idle_over_ideal == 1
    assert t.bubble.own_span == Q(1, 2), "rank 0 spans 6 and computes 3"
    assert t.bubble.time == 3
    assert t.levels == [[(1, 1), (1, 0)], [(1, 1), (1, 0)]]
    assert t.memory_curve(0) == ((0, 0), (0, 1), (1, 1), (4, 1), (6, 0))
    assert (t.origin, t.time_unit, t.memory_unit, t.messages) == (
        "predicted",
        "",
        "micro-batches",
        2,
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_golden_values(name):
    schedule = build(name, ranks=4, microbatches=8)
    t = simulate(schedule, ONE_TWO)
    assert (t.makespan, t.ideal, t.bubble.idle_over_total) == (33, 24, Q(3, 11))
    t = simulate(schedule, ONE_ONE)
    assert (t.makespan, t.bubble.idle_over_total, t.bubble.idle_over_ideal) == (
        22,
        Q(3, 11),
        Q(3, 8),
    )
    assert t.bubble.time == 6
    assert t.peak_activations == ((8, 8, 8, 8) if name == "gpipe" else (4, 3, 2, 1))
    t = simulate(build(name, ranks=8, microbatches=32), ONE_ONE)
    assert (t.makespan, t.bubble.idle_over_total) == (78, Q(7, 39))
    assert simulate(build(name, ranks=4, microbatches=1)).bubble.idle_over_total == Q(3, 4)


def test_the_golden_values_of_interleaving():
    t = simulate(build("interleaved", ranks=4, microbatches=8))
    assert t.makespan == Q(57, 2) and t.bubble.idle_over_total == Q(3, 19)
    assert [2 * peak for peak in t.peak_activations] == [11, 9, 7, 5]
    t = simulate(build("interleaved", ranks=2, microbatches=4))
    assert t.makespan == Q(27, 2) and t.bubble.idle_over_total == Q(1, 9)


SIZES = [(p, m) for p in range(1, 6) for m in range(1, 2 * p + 3)]
TIMES = [(1, 1, 1), (1, Q(1, 2), Q(1, 2)), (3, 4, 5), (2, 1, 0), (Q(1, 3), 1, Q(2, 7))]


def costs(f, i, w, **more):
    return Costs(forward=f, backward_input=i, backward_weight=w, **more)


@pytest.mark.parametrize("f, i, w", TIMES)
@pytest.mark.parametrize("p, m", SIZES)
def test_formulas_of_one_stage_a_rank(p, m, f, i, w):
    c, b = costs(f, i, w), i + w
    naive, gpipe, one, staircase = (
        simulate(build(name, ranks=p, microbatches=m), c)
        for name in ("naive", "gpipe", "1f1b", "inference")
    )
    assert naive.makespan == m * p * (f + b)
    assert naive.bubble.idle_over_total == Q(p - 1, p)
    assert naive.peak_activations == (1,) * p
    for t in (gpipe, one):
        assert t.makespan == (m + p - 1) * (f + b)
        assert t.bubble.time == (p - 1) * (f + b)
        assert t.bubble.idle_over_total == Q(p - 1, m + p - 1)
        assert t.bubble.idle_over_ideal == Q(p - 1, m)
    assert gpipe.peak_activations == (m,) * p
    assert one.peak_activations == tuple(min(m, p - r) for r in range(p))
    assert staircase.makespan == (m + p - 1) * f
    assert staircase.peak_activations == (0,) * p, "forward only keeps nothing"


@pytest.mark.parametrize("f, i, w", TIMES)
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p, m", [(p, k * p) for p in (1, 2, 3, 4) for k in (1, 2, 3)])
def test_formulas_of_looped_schedules(p, m, v, f, i, w):
    c, b = costs(f, i, w), i + w
    looped = [simulate(build("breadth-first", ranks=p, microbatches=m, chunks=v), c)]
    assert looped[0].peak_activations == (m,) * p
    for group in [n for n in range(p, m + 1) if m % n == 0]:
        schedule = build("interleaved", ranks=p, microbatches=m, chunks=v, group=group)
        looped.append(simulate(schedule, c))
        assert looped[-1].peak_activations == tuple(
            Q(min(m * v, (v - 1) * group + 2 * (p - 1 - r) + 1), v) for r in range(p)
        )
    for t in looped:
        assert t.bubble.time == (p - 1) * (f + b) / Q(v)
        assert t.bubble.idle_over_total == Q(p - 1, v * m + p - 1)
    t = simulate(build("inference", ranks=p, microbatches=m, chunks=v), c)
    assert t.bubble.idle_over_total == Q(p - 1, v * m + p - 1)


def test_interleaving_with_groups_that_do_not_divide_is_never_slower_than_1f1b():
    for p, v in [(2, 2), (3, 2), (4, 2), (4, 3)]:
        for m in range(1, 3 * p + 1):
            one = simulate(build("1f1b", ranks=p, microbatches=m))
            for group in range(min(p, m), m + 1):
                t = simulate(build("interleaved", ranks=p, microbatches=m, chunks=v, group=group))
                assert t.makespan <= one.makespan, (p, v, m, group)


def test_recompute_started_early():
    """R needs no gradient: the bubble is (p - 1)(F + B) over an ideal of m(2F + B)."""
    for p, m, makespan in [(4, 4, 25), (4, 8, 41)]:
        t = simulate(build("gpipe", ranks=p, microbatches=m, recompute=True))
        assert (t.makespan, t.ideal, t.bubble.time) == (makespan, m * 4, (p - 1) * 3)
        assert t.peak_activations == (1,) * p, "inputs count only where they have a size"
        t = simulate(
            build("gpipe", ranks=p, microbatches=m, recompute=True), Costs(input_size=Q(1, 8))
        )
        assert t.peak_activations == (m * Q(1, 8) + Q(7, 8),) * p
    t = simulate(build("gpipe", ranks=2, microbatches=2, recompute=True), Costs(recompute=5))
    assert t.busy == (16, 16)


@pytest.mark.parametrize("c", [Q(1, 10), Q(1, 100)])
@pytest.mark.parametrize("p, m", [(p, k * p) for p in (2, 3, 4, 6) for k in (1, 2, 3)])
def test_latency(p, m, c):
    """GPipe takes 2(p - 1)c longer, 1F1B c[2(p - 1)m/p + 2(p - 2)] where p divides m."""
    for name, longer in [
        ("gpipe", 2 * (p - 1) * c),
        ("1f1b", c * (2 * (p - 1) * Q(m, p) + 2 * (p - 2))),
    ]:
        schedule = build(name, ranks=p, microbatches=m)
        late = simulate(schedule, Costs(latency=c))
        assert late.makespan - simulate(schedule).makespan == longer
        assert late.transfers[0] == m * c and late.messages == 2 * (p - 1) * m


def test_latency_of_single_links():
    schedule = build("gpipe", ranks=2, microbatches=1)
    assert simulate(schedule, Costs(latency={(0, 1): 5})).makespan == 6 + 5
    assert simulate(schedule, Costs(latency={(1, 0): 7})).makespan == 6 + 7
    assert simulate(schedule, Costs(latency={(0, 1): 5, (1, 0): 7})).transfers == (5, 7)
    assert simulate(schedule, Costs(latency={})).makespan == 6


def test_messages_of_one_link_follow_each_other():
    """Each takes 4 on the wire: 0F0 ends at 1 and arrives at 5, 0F1 ends at 2 and arrives at 9."""
    schedule = build("inference", ranks=2, microbatches=2)
    t = simulate(schedule, Costs(message_size=8, bandwidth=2))
    assert [s.start for s in t.spans_of(1)] == [5, 9]
    assert (t.makespan, t.bytes_sent, t.transfers) == (10, (16, 0), (8, 0))
    t = simulate(schedule, Costs(message_size=8, bandwidth={(0, 1): 2}, latency=Q(1, 2)))
    assert [s.start for s in t.spans_of(1)] == [Q(11, 2), Q(19, 2)]
    t = simulate(schedule, Costs(message_size=8, bandwidth={(1, 0): 2}))
    assert t.makespan == 3, "the other direction is not in the way"


def test_bytes_by_border():
    sizes = Costs(message_size=[3, 5, 7, 11])  # behind stages 0, 1, 2; nothing crosses behind 3
    t = simulate(build("gpipe", ranks=4, microbatches=2), sizes)
    assert t.bytes_sent == (6, 10 + 6, 14 + 10, 14)
    t = simulate(build("interleaved", ranks=2, microbatches=2), sizes)
    assert t.bytes_sent == (2 * (3 + 7 + 5), 2 * (5 + 3 + 7)), "each border is crossed both ways"
    v_shape = Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert simulate(v_shape, sizes).bytes_sent == (3 + 7, 3 + 7), "stages 1 and 2 meet on rank 1"
    assert simulate(common.order("dualpipe"), Costs(message_size=1)).bytes_sent == (8, 16, 16, 8)


def test_costs_per_stage():
    t = simulate(
        build("gpipe", ranks=2, microbatches=2),
        Costs(forward=[1, 3], backward_input=[2, 1], backward_weight=[0, 2]),
    )
    # 0F 0-1 1-2; 1F 1-4 4-7; 1B 7-10 10-13; 0B 10-12 13-15
    assert [(s.start, s.end) for s in t.spans] == [
        (0, 1),
        (1, 2),
        (10, 12),
        (13, 15),
        (1, 4),
        (4, 7),
        (7, 10),
        (10, 13),
    ]
    t = simulate(build("gpipe", ranks=2, microbatches=2), Costs(forward_size=[10, 7]))
    assert t.peak_activations == (20, 14)


def test_a_split_backward_keeps_for_w_what_it_needs():
    schedule = Schedule.parse("0F0 0F1 0I0 0I1 0W0 0W1")
    t = simulate(schedule, Costs(weight_size=Q(1, 4)))
    assert t.levels == [
        [(1, 1), (2, 2), (2, Q(5, 4)), (Q(5, 4), Q(1, 2)), (Q(1, 2), Q(1, 4)), (Q(1, 4), 0)]
    ]
    assert t.peak_activations == (2,)
    assert simulate(schedule, Costs(weight_size=2)).peak_activations == (4,), "W may keep more"


@pytest.mark.parametrize("exchange, takes", [(0, 3), (Q(1, 4), Q(9, 4)), (Q(1, 2), 2), (1, 2)])
def test_a_pair_hides_an_exchange(exchange, takes):
    """max((1 - x)(F + B), F, B) for F = 1, B = 2."""
    t = simulate(Schedule.parse("0F0 (0F1;0B0) 0B1"), Costs(exchange=exchange))
    assert [(s.start, s.end) for s in t.spans] == [(0, 1), (1, 1 + takes), (1 + takes, 3 + takes)]
    assert t.levels == [[(1, 1), (2, 1), (1, 0)]]
    assert t.lower_bound <= t.makespan


def test_a_pair_starts_with_the_later_input_and_releases_both_at_its_end():
    """1F0 2-3, 1B0 3-5; the pair waits for 1B0 although 0F1 could start at once, and 1F1 waits
    for the end of the pair although the forward alone takes 1."""
    t = simulate(Schedule.parse("0F0 (0F1;0B0) 0B1\n1F0 1B0 1F1 1B1"))
    assert [(s.start, s.end) for s in t.spans_of(0)] == [(0, 1), (4, 7), (10, 12)]
    assert [(s.start, s.end) for s in t.spans_of(1)] == [(1, 2), (2, 4), (7, 8), (8, 10)]


def test_updates_take_their_time():
    table = Schedule.parse("0F0 0B0 0U0 0F1 0B1 0U1")
    assert simulate(table, Costs(update=Q(1, 2))).makespan == 7
    assert simulate(table).lower_bound == 6


PAPERS = {  # chunk units: makespan, own span of the longest rank, idle over total
    "gpipe": (33, 33),
    "1f1b": (33, 33),
    "interleaved": (57, 57),
    "breadth-first": (57, 57),
    "zb-h1": (27, 27),
    "zb-h2": (27, 24),
    "zb-1p": (51, 51),
    "zb-v": (51, 48),
    "dualpipev": (54, 54),
    "dualpipe": (26, 26),
}


@pytest.mark.parametrize("name", PAPERS)
def test_values_to_check_against(name):
    schedule = common.order(name)
    t = simulate(schedule, UNIT if schedule.stages == 8 else ONE_TWO)
    makespan, own = PAPERS[name]
    assert t.makespan == makespan
    spans = [t.spans_of(r)[-1].end - t.spans_of(r)[0].start for r in range(4)]
    assert max(spans) == own
    assert t.bubble.own_span == max(Q(s - b, s) for s, b in zip(spans, t.busy, strict=True))


def test_zero_bubble_is_a_claim_about_the_own_span():
    assert simulate(common.order("zb-h2")).bubble.own_span == 0
    assert simulate(common.order("zb-v"), UNIT).bubble.own_span == 0
    assert simulate(common.order("zb-h1")).bubble.time == 3, "(p - 1)(F + I - W)"
    # peaks, in chunks: (p - r)M_B + r M_W, (2p - 1 - 2r)M_B + 2r M_W, and 2p everywhere
    assert simulate(common.order("zb-h1")).peak_activations == (4, 4, 4, 4)
    assert simulate(common.order("zb-h2")).peak_activations == (7, 7, 7, 7)
    assert simulate(common.order("zb-v")).peak_activations == (4, 4, 4, 4)
    assert simulate(common.order("zb-1p")).peak_activations == (4, 4, 4, 4)
    assert simulate(common.order("dualpipe")).peak_activations == (5, 5, 5, 5)
    assert simulate(common.order("dualpipev")).peak_activations == (Q(9, 2),) * 4


def test_chimera():
    assert simulate(common.order("chimera"), ONE_ONE).bubble.idle_over_total == Q(1, 5)
    assert simulate(common.order("chimera")).bubble.idle_over_total == Q(1, 4), "with B = 2F"


def test_exact_numbers_stay_exact():
    schedule = build("interleaved", ranks=3, microbatches=4)
    whole = simulate(schedule, UNIT)
    numbers = [whole.makespan, whole.ideal, whole.lower_bound, *whole.busy, whole.bubble.time]
    assert {*map(type, numbers)} == {int}
    thirds = simulate(schedule, costs(Q(1, 3), Q(1, 7), Q(1, 11), latency=Q(1, 13)))
    assert {type(time) for s in thirds.spans for time in (s.start, s.end)} <= {Q, int}
    assert not any(type(s.end) is Q and s.end.denominator == 1 for s in thirds.spans)
    assert type(thirds.makespan) is Q and type(thirds.bubble.idle_over_total) is Q
    floats = simulate(schedule, costs(1 / 3, 1 / 7, 1 / 11, latency=1 / 13))
    assert type(floats.makespan) is float and type(floats.bubble.own_span) is float
    assert floats.makespan == pytest.approx(float(thirds.makespan))
    mixed = simulate(build("gpipe", ranks=2, microbatches=2), Costs(forward=0.5, latency=Q(1, 4)))
    assert mixed.makespan == pytest.approx(3 * 2.5 + 0.5)


def test_huge_and_tiny_numbers():
    t = simulate(
        build("gpipe", ranks=2, microbatches=2),
        Costs(forward=10**30, backward_input=0, backward_weight=Q(1, 10**30)),
    )
    assert t.makespan == 3 * 10**30 + 3 * Q(1, 10**30)
    free = simulate(build("1f1b", ranks=3, microbatches=2), costs(0, 0, 0))
    assert free.makespan == 0 and free.bubble.idle_over_total == 0 and free.bubble.own_span == 0


def test_a_rank_without_actions_waits_all_the_time():
    t = simulate(Schedule.parse("-\n0F0 0B0\n-"))
    # The one stage is 3 whole shares of the model.
    assert t.waiting == (Waiting(9, 0, 0), Waiting(0, 0, 0), Waiting(9, 0, 0))
    assert t.bubble.idle_over_total == Q(2, 3) and t.peak_activations == (0, 3, 0)


def test_one_rank_has_no_bubble():
    for name in common.NAMES:
        t = simulate(build(name, ranks=1, microbatches=3))
        assert (t.bubble.idle_over_total, t.bubble.time, t.messages) == (0, 0, 0), name


def test_waiting_adds_up():
    for schedule, label in common.every():
        t = simulate(schedule, costs(3, 4, 5, latency=Q(1, 3), exchange=Q(1, 5)))
        for waiting, busy in zip(t.waiting, t.busy, strict=True):
            assert waiting.fill + waiting.inside + waiting.drain + busy == t.makespan, label
            assert min(waiting.fill, waiting.inside, waiting.drain) >= 0, label
        assert t.bubble.idle_over_total == 1 - sum(t.busy) / (schedule.ranks * Q(t.makespan)), label


def test_what_would_hang_is_reported_with_who_waits_for_whom():
    with pytest.raises(ScheduleError) as error:
        simulate(Schedule.parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))
    assert error.value.reasons == (
        "deadlock, each waits for the next: row 0, place 1 (0B0) waits for 1B0 at row 1, place 2; "
        "row 1, place 1 (1F1) waits for 0F1 at row 0, place 2",
    )


def test_a_measured_timeline_is_the_same_class():
    schedule = Schedule.parse("0F0 0B0\n1F0 1B0")
    t = Timeline(
        schedule,
        [0.0, 4.0, 1.0, 2.0],
        [1.0, 6.0, 2.0, 4.0],
        [[(8, 8), (8, 0)], [(4, 4), (4, 0)]],
        origin="measured",
        time_unit="s",
        memory_unit="bytes",
        bytes_sent=[16, 16],
        messages=2,
        transfers=[0.1, 0.1],
    )
    predicted = simulate(schedule)
    assert t.makespan == predicted.makespan and t.bubble.own_span == predicted.bubble.own_span
    assert t.waiting == predicted.waiting and t.busy == predicted.busy
    assert t.peak_activations == (8, 4) and t.levels[1][1] == (4, 0)
    assert t.memory_curve(1)[-1] == (4.0, 0) and t.lower_bound is None
