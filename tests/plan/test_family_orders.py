"""The second family: every legal size is a legal table, orders are torch's, others are refused."""

import re
from fractions import Fraction
from types import SimpleNamespace

import pytest

from minipipe import Costs, ScheduleError, build, check, lower_bound, simulate

FAMILY = ("zb-h1", "zb-h2", "zb-1p", "zb-auto", "zb-v", "v-half", "v-min", "dualpipe", "dualpipev",
          "chimera", "hanayo")  # fmt: skip
TWO_WAY = ("dualpipe", "chimera")
V = ("zb-v", "v-half", "v-min", "dualpipev")


def legal(name: str, p: int, m: int) -> bool:
    if name in TWO_WAY and p % 2:
        return False
    return {
        "dualpipe": m % 2 == 0 and m >= 2 * p,
        "dualpipev": m >= 2 * p,
        "chimera": m >= 2,
    }.get(name, True)


def sizes(name: str, most: int = 8) -> list[dict]:
    """1 to 8 ranks, 1 to 2P + 2 micro-batches, what is legal of them."""
    extra = {"zb-1p": [{"chunks": v} for v in (1, 2, 3)], "hanayo": [{"waves": w} for w in (1, 2)]}
    return [
        {"ranks": p, "microbatches": m, **more}
        for p in range(1, most + 1)
        for m in range(1, 2 * p + 3)
        if legal(name, p, m)
        for more in (extra.get(name, [{}]) if p < 5 else extra.get(name, [{}])[-1:])
    ]


@pytest.mark.parametrize("name", FAMILY)
def test_all_sizes_are_legal_and_finish(name):
    for size in sizes(name):
        p, m = size["ranks"], size["microbatches"]
        schedule = build(name, **size)
        check(schedule)
        simulate(schedule)
        held = size.get("chunks", 2 * size.get("waves", 1) if name in (*V, "hanayo") else 1)
        assert (schedule.ranks, schedule.microbatches, schedule.stages) == (p, m, p * held), size
        if name in V:
            for r in range(p):
                assert schedule.stages_of(r) == (r, 2 * p - 1 - r)
        if name in TWO_WAY:
            assert schedule.copies == tuple(range(p))
            assert all(schedule.stages_of(r) == tuple(sorted({r, p - 1 - r})) for r in range(p))
        else:
            assert schedule.copies == ()


def test_zb_1p_takes_every_group_that_interleaved_takes():
    for p in (1, 2, 3, 4):
        for m in range(1, 2 * p + 4):
            for group in range(min(p, m), m + 1):
                for v in (1, 2, 3):
                    simulate(build("zb-1p", ranks=p, microbatches=m, chunks=v, group=group))


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_the_first_half_of_the_micro_batches_runs_down(name):
    for p, m in [(2, 4), (4, 8), (6, 14)]:
        schedule = build(name, ranks=p, microbatches=m)
        for r, row in enumerate(schedule.parts):
            assert all(a.stage == (r if a.microbatch < m // 2 else p - 1 - r) for a in row)


REFUSED = [
    ("dualpipe", 3, 8, "ranks=3 must be even; the nearest legal value is 4"),
    ("dualpipe", 1, 8, "ranks=1 must be even; the nearest legal value is 2"),
    ("dualpipe", 4, 7, "microbatches=7 must be even and at least 2 * ranks = 8; the nearest"),
    ("dualpipe", 4, 6, "the nearest legal value is 8"),
    ("dualpipe", 4, 9, "the nearest legal value is 10"),
    ("dualpipev", 4, 7, "microbatches=7 must be at least 2 * ranks = 8; the nearest"),
    ("chimera", 5, 4, "ranks=5 must be even; the nearest legal value is 6"),
    ("chimera", 4, 1, "microbatches=1 must be at least 2, one for each way; the nearest legal"),
]


@pytest.mark.parametrize("name, p, m, words", REFUSED)
def test_other_sizes_are_refused(name, p, m, words):
    with pytest.raises(ScheduleError) as error:
        build(name, ranks=p, microbatches=m)
    assert words in str(error.value)


@pytest.mark.parametrize("name", FAMILY)
def test_what_is_refused_names_a_value_that_is_not(name):
    for p in range(1, 7):
        for m in range(1, 2 * p + 3):
            if legal(name, p, m):
                continue
            size = {"ranks": p, "microbatches": m}
            for _ in range(2):  # ranks, then micro-batches
                try:
                    build(name, **size)
                    break
                except ScheduleError as error:
                    argument, nearest = re.match(r"(\w+)=.* value is (\d+)$", str(error)).groups()
                    size[argument] = int(nearest)
            build(name, **size)


@pytest.mark.parametrize("waves", [0, -1, 1.5, True, None, "2"])
def test_waves_is_a_whole_number(waves):
    with pytest.raises(ScheduleError, match="waves=.* must be a whole number, at least 1"):
        build("hanayo", ranks=2, microbatches=2, waves=waves)
    with pytest.raises(ScheduleError, match="takes no argument 'waves'"):
        build("zb-v", ranks=2, microbatches=2, waves=1)


def test_too_many_actions_are_refused_before_they_are_made():
    with pytest.raises(ScheduleError, match="waves=10000000 makes too many actions"):
        build("hanayo", ranks=2, microbatches=2, waves=10**7)


@pytest.mark.parametrize("limit", [0, Fraction(1, 2), -1, "4", float("nan")])
def test_a_memory_limit_below_one_micro_batch_is_refused(limit):
    with pytest.raises(ScheduleError, match="memory_limit=.*the nearest legal value is 1$"):
        build("zb-auto", ranks=4, microbatches=8, memory_limit=limit)


def test_costs_are_costs():
    with pytest.raises(TypeError, match="costs must be Costs"):
        build("zb-auto", ranks=4, microbatches=8, costs=3)


def theirs(name: str, ranks: int, microbatches: int, chunks: int) -> list[str]:
    """torch's order; its stages are only what the order needs."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None,
                        stage_index=c * (2 * ranks - 1 if "V" in name else ranks),
                        is_first=not c, is_last=False)
        for c in range(chunks)
    ]  # fmt: skip
    order = getattr(schedules, f"Schedule{name}")(stages, microbatches).pipeline_order
    kinds = ("F", "B", "I", "W", "OVERLAP_F_B")
    return [
        " ".join(
            str(a).removesuffix("OVERLAP_F_B")
            for a in order[rank]
            if a is not None and a.computation_type.value in kinds
        )
        for rank in sorted(order)
    ]


TORCH = [("zb-h1", "InterleavedZeroBubble", 1), ("zb-1p", "InterleavedZeroBubble", 1),
         ("zb-1p", "InterleavedZeroBubble", 2), ("zb-1p", "InterleavedZeroBubble", 3),
         ("zb-v", "ZBVZeroBubble", 2), ("dualpipev", "DualPipeV", 2)]  # fmt: skip


@pytest.mark.parametrize("name, cls, chunks", TORCH)
def test_torchs_order_letter_for_letter(name, cls, chunks):
    compared = 0
    for p in (1, 2, 3, 4, 8):
        for m in range(1, 2 * p + 3):
            if "Interleaved" in cls and m % max(1, m // p) or not legal(name, p, m):
                continue  # torch refuses it
            more = {"chunks": chunks} if name == "zb-1p" else {}
            ours = build(name, ranks=p, microbatches=m, **more)
            assert str(ours).splitlines() == theirs(cls, p, m, chunks), (p, m)
            compared += 1
    assert compared >= 15


def test_rows_do_not_depend_on_the_run():
    """Deterministic: the same sizes give the same rows, whatever was built before."""
    for name in FAMILY:
        size = sizes(name, 4)[-1]
        first = build(name, **size)
        assert build(name, **size) == first


def test_zb_auto_takes_per_stage_costs_and_links():
    costs = Costs(forward=[1, 2, 3], backward_input=[3, 2, 1], backward_weight=[1, 1, 4],
                  latency={(0, 1): 2, (2, 1): 1}, bandwidth=2, message_size=1)  # fmt: skip
    schedule = build("zb-auto", ranks=3, microbatches=5, costs=costs, memory_limit=2)
    check(schedule, 2, costs)


@pytest.mark.parametrize("size, waits, limit", [(0.1, 0.1, 0.4), (0.1, 0.6, 1.8), (0.3, 0.1, 0.9)])
def test_zb_auto_fits_a_limit_that_floats_add_up_to(size, waits, limit):
    """4 times 0.1 fit into 0.4, though as floats 3 times 0.1 are more than 0.3."""
    costs = Costs(forward_size=size, weight_size=waits)
    for p, m in [(2, 4), (3, 7), (4, 8)]:
        schedule = build("zb-auto", ranks=p, microbatches=m, costs=costs, memory_limit=limit)
        check(schedule, limit, costs)
        assert lower_bound(schedule, costs, limit) <= simulate(schedule, costs).makespan


def test_zb_auto_knows_that_messages_follow_each_other_on_a_link():
    costs = Costs(message_size=1, bandwidth=Fraction(1, 4))
    size = {"ranks": 4, "microbatches": 16}
    auto = simulate(build("zb-auto", **size, costs=costs), costs)
    assert auto.makespan <= min(simulate(build(n, **size), costs).makespan
                                for n in ("zb-h1", "zb-h2"))  # fmt: skip
