"""The lower bound: never above a makespan, equal where the papers' arguments say it is met."""

from fractions import Fraction as Q

import plan_common as common
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minipipe import Costs, Schedule, ScheduleError, build, lower_bound, simulate

EVERY = [s for s, _ in common.every()]
times = st.fractions(0, 4, max_denominator=6)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(EVERY), times, times, times, times, times, st.fractions(0, 1, max_denominator=4)
)
def test_no_order_beats_the_bound(schedule, f, i, w, c, size, exchange):
    costs = Costs(f, i, w, latency=c, message_size=size, bandwidth=2, exchange=exchange)
    assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(EVERY), st.data())
def test_no_order_beats_the_bound_with_costs_of_each_stage(schedule, data):
    def each():
        return data.draw(st.lists(times, min_size=schedule.stages, max_size=schedule.stages))

    latency = {(0, 1): data.draw(times)} if schedule.ranks > 1 else 0
    costs = Costs(each(), each(), each(), latency=latency, recompute=each())
    assert lower_bound(schedule, costs) <= simulate(schedule, costs).makespan


@pytest.mark.parametrize("c", [0, Q(1, 4), 2])
@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 2), (4, 8), (5, 5)])
def test_one_stage_a_rank_fused(p, m, c):
    costs = Costs(3, 4, 1, latency=c)
    gpipe, one = (build(name, ranks=p, microbatches=m) for name in ("gpipe", "1f1b"))
    bound = (m + p - 1) * 8 + 2 * (p - 1) * c
    assert lower_bound(gpipe, costs) == lower_bound(one, costs) == bound
    assert simulate(gpipe, costs).makespan == bound
    if not c:
        assert simulate(one, costs).makespan == bound


@pytest.mark.parametrize("c", [0, Q(1, 4)])
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("p, m", [(2, 4), (3, 3), (4, 8)])
def test_looped_fused(p, m, v, c):
    costs = Costs(3, 4, 1, latency=c)
    for name in ("interleaved", "breadth-first"):
        schedule = build(name, ranks=p, microbatches=m, chunks=v)
        bound = m * 8 + (p - 1) * (Q(8, v) + 2 * c)
        assert lower_bound(schedule, costs) == bound
        if not c:
            assert simulate(schedule, costs).makespan == bound


@pytest.mark.parametrize("f, i, w, c", [(1, 1, 1, 0), (3, 4, 1, Q(1, 4)), (2, 1, 5, 0)])
def test_split_backward(f, i, w, c):
    costs = Costs(f, i, w, latency=c)
    p, m, b = 4, 8, i + w
    bound = max(m * (f + b) + (p - 1) * (f + c), (p - 1) * (f + i + 2 * c) + m * (f + i) + w)
    for name in ("zb-h1", "zb-h2"):
        assert lower_bound(common.order(name), costs) == bound
        if f == i == w:
            assert simulate(common.order(name), costs).makespan == bound == 27
    v_shape = m * (f + b) + (p - 1) * (Q(f, 2) + c)
    assert lower_bound(common.order("zb-v"), costs) == v_shape
    mirrored = m * (f + b) + (Q(p, 2) - 1) * (f + c)
    assert lower_bound(common.order("dualpipe"), costs) == mirrored


def test_v_placement_is_met():
    assert simulate(common.order("zb-v"), Costs(2, 2, 2)).lower_bound == 51


def test_forward_only():
    schedule = build("inference", ranks=4, microbatches=6)
    assert simulate(schedule).lower_bound == simulate(schedule).makespan == 9


def test_a_table_with_gaps_has_no_bound():
    with pytest.raises(ScheduleError, match="only 1 of the stages 0 to 999999999"):
        lower_bound(Schedule.parse("999999999F0"))
    with pytest.raises(TypeError, match="a Schedule is needed"):
        lower_bound("0F0")


@pytest.mark.parametrize("memory, bound", [(None, 33), (4, 33), (3, 39), (2, 51), (1, 96)])
def test_one_stage_a_rank_with_a_memory_limit(memory, bound):
    schedule = build("1f1b", ranks=4, microbatches=8)
    assert lower_bound(schedule, memory_limit=memory) == bound


@pytest.mark.parametrize("p", [3, 4, 5, 8])
@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_v_placement_with_room_for_k_chunks_is_met(p, name):
    for m in (2 * p, 2 * p + 3):
        schedule = build(name, ranks=p, microbatches=m)
        k = 2 * ((p + 2) // 2 if name == "v-half" else (p + 4) // 3)
        bound = lower_bound(schedule, Costs(2, 2, 2), Q(k, 2))
        assert bound == 6 * m + 6 * p - 1 - 3 * k
        assert simulate(schedule, Costs(2, 2, 2)).makespan == bound


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EVERY), times, times, times, times, times, times)
def test_no_order_beats_the_bound_of_the_memory_that_it_takes(schedule, f, i, w, c, kept, late):
    costs = Costs(f, i, w, latency=c, forward_size=kept, weight_size=late)
    t = simulate(schedule, costs)
    peak = max(t.peak_activations)
    if peak:
        bounds = [lower_bound(schedule, costs, limit) for limit in (peak, 2 * peak, None)]
        assert t.makespan >= bounds[0] >= bounds[2] and bounds[1] >= bounds[2]


def test_pairs_that_hide_an_exchange_count_what_remains():
    schedule = common.order("dualpipev")
    for memory in (None, Q(9, 2)):
        bound = lower_bound(schedule, Costs(exchange=Q(1, 4)), memory)
        assert bound <= simulate(schedule, Costs(exchange=Q(1, 4))).makespan
        assert bound < lower_bound(schedule, memory_limit=memory)


@pytest.mark.parametrize("limit", [0, -1, True, "2", float("nan")])
def test_a_limit_is_a_positive_number(limit):
    with pytest.raises(TypeError, match="memory_limit must be a number greater than 0"):
        lower_bound(common.order("zb-v"), memory_limit=limit)
