"""The second family against the published numbers: makespans, bubbles, peaks."""

from fractions import Fraction

import pytest

from minipipe import Costs, build, check, simulate

UNIT = Costs()


def run(name, p, m, costs=UNIT, **more):
    return simulate(build(name, ranks=p, microbatches=m, **more), costs)


@pytest.mark.parametrize(
    "name, p, m, makespan",
    [
        ("zb-h1", 4, 4, 15), ("zb-h1", 4, 8, 27), ("zb-h2", 4, 8, 27), ("zb-auto", 4, 8, 27),
        ("zb-1p", 4, 4, Fraction(27, 2)), ("zb-1p", 4, 8, Fraction(51, 2)),
        ("zb-v", 4, 4, 15), ("zb-v", 4, 8, Fraction(51, 2)),
        ("dualpipe", 4, 8, 26), ("dualpipe", 8, 20, 66),
        ("dualpipev", 4, 8, 27), ("dualpipev", 4, 10, 33),
    ],
)  # fmt: skip
def test_values_to_check_against(name, p, m, makespan):
    assert run(name, p, m).makespan == makespan


def test_idle_of_the_published_figures():
    assert run("dualpipe", 8, 20).bubble.time == 6
    assert run("dualpipev", 4, 10).bubble.time == 3


def test_own_spans():
    assert run("zb-v", 4, 8).bubble.own_span == 0  # 24 of 24
    assert run("zb-h2", 4, 8).bubble.own_span == 0
    assert run("zb-h1", 4, 8).bubble.own_span == Fraction(3, 27)
    for p in (2, 3, 4, 5):
        assert run("zb-v", p, 2 * p - 1).bubble.own_span == 0
        assert run("zb-v", p, 2 * p + 2).makespan == 3 * (2 * p + 2) + Fraction(p - 1, 2)


TIMES = [(1, 1, 1), (10, 12, 8), (3, 4, 2), (5, 5, 1), (2, 3, 3), (1, 1, 0)]


@pytest.mark.parametrize("f, i, w", TIMES)
def test_bubbles_for_times_that_differ(f, i, w):
    """(p - 1)(F + I - W) holds for W <= F and W <= I; for F < W <= I it is (p - 1)I."""
    costs = Costs(forward=f, backward_input=i, backward_weight=w)
    for p in (2, 3, 4, 6):
        for m in (p, 2 * p, 3 * p):
            assert run("zb-h1", p, m, costs).bubble.time == (p - 1) * max(f + i - w, i)
            for v in (1, 2, 3):
                bubble = run("zb-1p", p, m, costs, chunks=v).bubble.time
                assert bubble == Fraction((p - 1) * max(f + i - w, i), v), (p, m, v)
        t = run("zb-h2", p, 3 * p, costs)
        gaps = t.bubble.own_span * 3 * p * (f + i + w) / (1 - t.bubble.own_span)
        assert gaps == max(0, (p - 1) * (f + i - 2 * w), (p - 1) * (i - f))


def test_zero_bubble_makespans():
    for p in (1, 2, 3, 4, 6):
        for m in (2 * p - 1, 2 * p, 3 * p):
            assert run("zb-h2", p, m).bubble.time == p - 1
            if m >= p:
                t = run("zb-h1", p, m)
                assert t.bubble.idle_over_total == Fraction(p - 1, 3 * m + p - 1)


@pytest.mark.parametrize("f, w", [(1, 1), (2, 1), (3, 2), (4, 0)])
def test_bubbles_of_dualpipe(f, w):
    """(p/2 - 1)(pair + B - 3W), exact for F = I and W <= F; for DualPipeV with PP = 2p stages."""
    costs = Costs(forward=f, backward_input=f, backward_weight=w)
    for p in (2, 4, 6, 8):
        for m in (2 * p, 2 * p + 2, 3 * p):
            term = (f + f + w) + (f + w) - 3 * w
            assert run("dualpipe", p, m, costs).bubble.time == (p // 2 - 1) * term
            half = Fraction(term, 2)  # a stage has half of a rank's share
            assert run("dualpipev", p, m, costs).bubble.time == (p - 1) * half


def test_dualpipes_formula_is_not_exact_where_f_and_i_differ():
    costs = Costs(forward=10, backward_input=12, backward_weight=8)
    for p in (4, 6, 8):
        assert run("dualpipe", p, 2 * p, costs).bubble.time == (p // 2 - 1) * 24  # formula: 26


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_peaks(p):
    m, ranks = 3 * p, range(p)
    kept = Fraction(1, 3)
    small = Costs(weight_size=kept)
    for costs, weight in ((UNIT, 1), (small, kept)):
        peaks = run("zb-h1", p, m, costs).peak_activations
        assert peaks == tuple(p - r + r * weight for r in ranks)
        # where W is the smaller one a rank holds most before its first W, or behind its last F
        peaks = run("zb-h2", p, m, costs).peak_activations
        assert peaks == tuple(2 * p - 1 - 2 * r + 2 * r * weight for r in ranks)
    for v in (1, 2, 3):
        for group in (p, p + 1, m):
            peaks = run("zb-1p", p, m, chunks=v, group=group).peak_activations
            size = m // (m // group) + (m % (m // group) > 0)
            assert max(peaks) == Fraction(min(m * v, (v - 1) * size + p), v)
        assert len(set(run("zb-1p", p, m, chunks=v).peak_activations)) == 1
    assert run("zb-v", p, m).peak_activations == (p,) * p
    assert max(run("dualpipev", p, m).peak_activations) == p + Fraction(1, 2)
    if p % 2 == 0:
        assert set(run("dualpipe", p, m + m % 2).peak_activations) == {p + 1}
        assert build("dualpipe", ranks=p, microbatches=2 * p).parameter_copies == 2


@pytest.mark.parametrize("name, share", [("v-half", 2), ("v-min", 3)])
def test_v_schedules_meet_the_bound_of_their_memory(name, share):
    for p in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        kept = (p + 2) // 2 if share == 2 else (p + 4) // 3
        for m in range(1, 2 * p + 3):
            schedule = build(name, ranks=p, microbatches=m)
            check(schedule, memory_limit=kept)
            t = simulate(schedule)
            if m >= 2 * p:
                assert max(t.peak_activations) == kept
                units = 6 * m + 6 * p - 1 - 6 * kept if p >= 3 else 6 * m + p - 1
                assert t.makespan * 2 == units, (p, m)


def test_large_v_schedules_take_linear_time():
    assert simulate(build("v-half", ranks=4, microbatches=3000)).bubble.idle_over_total < 0.001


def test_chimera():
    equal = Costs(backward_input=Fraction(1, 2), backward_weight=Fraction(1, 2))  # B = F
    for p in (2, 4, 6, 8):
        for m in (p, 2 * p, 3 * p):
            t = run("chimera", p, m, equal)
            assert t.bubble.idle_over_total == Fraction(p - 2, 2 * m + p - 2)
            assert (min(t.peak_activations), max(t.peak_activations)) == (p // 2 + 1, p)
            assert t.schedule.parameter_copies == 2
    assert run("chimera", 4, 4, equal).bubble.idle_over_total == Fraction(1, 5)
    assert run("chimera", 4, 4).bubble.idle_over_total == Fraction(1, 4)  # B = 2F


def test_hanayo_is_not_as_its_formula_says():
    """(2P - 2)/(3PW + P - 1) for M = P, B = 2F."""
    ours = {1: Fraction(1, 3), 2: Fraction(13, 61), 4: Fraction(13, 109)}
    for waves, idle in ours.items():
        assert run("hanayo", 4, 4, waves=waves).bubble.idle_over_total == idle
        assert abs(idle - Fraction(6, 12 * waves + 3)) < Fraction(1, 14)
        assert idle != Fraction(6, 12 * waves + 3)


def test_hanayo_keeps_no_more_than_1f1b():
    for p in (1, 2, 3, 4, 6):
        for waves in (1, 2, 3):
            for m in (1, p, p + 1, 3 * p):
                check(build("hanayo", ranks=p, microbatches=m, waves=waves), memory_limit=p)


PAPER = [
    (24, 18522, 18086, 9337, 601, 0.1585, 0.1083),
    (32, 18513, 18086, 9331, 626, 0.1242, 0.0837),
    (64, 18546, 18097, 9321, 762, 0.0674, 0.0444),
]


@pytest.mark.parametrize("m, f, i, w, c, h1, h2", PAPER)
def test_table_5_of_the_zero_bubble_paper(m, f, i, w, c, h1, h2):
    """8 ranks, T_comm between them; ZB-1p is the heuristic in 1F1B's memory."""
    costs = Costs(forward=f, backward_input=i, backward_weight=w, latency=c)
    auto = build("zb-auto", ranks=8, microbatches=m, costs=costs, memory_limit=8)
    ours = [run("zb-h1", 8, m, costs), run("zb-h2", 8, m, costs), simulate(auto, costs)]
    assert [float(t.bubble.own_span) for t in ours] == pytest.approx([h1, h2, h1], abs=1e-4)


COSTS = [
    {},
    {"forward": 10, "backward_input": 12, "backward_weight": 8},
    {"forward": 2, "backward_input": 3, "backward_weight": 1, "latency": 1},
    {"forward": 4, "backward_input": 3, "backward_weight": 5, "weight_size": Fraction(1, 2)},
    {"forward": 1, "backward_input": 1, "backward_weight": 1, "weight_size": 2},
]


@pytest.mark.parametrize("kind", range(len(COSTS)))
def test_zb_auto_is_never_slower_than_what_has_its_memory(kind):
    costs = Costs(**COSTS[kind])
    least = COSTS[kind].get("weight_size", 1)
    for p in (1, 2, 3, 4, 6):
        for m in (1, p, 2 * p, 2 * p + 1):
            others = [run(name, p, m, costs) for name in ("zb-h1", "zb-h2")]
            if least == 1:  # what W needs is not kept apart by 1F1B
                others.append(run("1f1b", p, m, costs))
            for limit in (None, max(1, least), p + 1, 2 * p + 1):
                size = {"ranks": p, "microbatches": m, "memory_limit": limit}
                schedule = build("zb-auto", **size, costs=costs)
                check(schedule, limit, costs)
                makespan = simulate(schedule, costs).makespan
                for other in others:
                    if limit is None or max(other.peak_activations) <= limit:
                        assert makespan <= other.makespan, (p, m, limit, other.schedule.name)
