"""The named schedules: their rows, sizes, and what `build` says to wrong arguments."""

import inspect
import re

import plan_common as common
import pytest

from minipipe import SCHEDULES, ScheduleError, build, check, simulate


def docstring_rows(name: str) -> str:
    blocks = re.findall(r"```\n(.*?)\n\s*```", SCHEDULES[name].__doc__, re.DOTALL)
    assert blocks, f"the docstring of {name} shows no rows"
    return inspect.cleandoc(blocks[0].strip("\n"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_docstring_shows_the_rows_for_4_ranks(name):
    rows = docstring_rows(name)
    microbatches = 1 + max(int(m) for m in re.findall(r"[FBIWRU](\d+)", rows))
    assert str(build(name, ranks=4, microbatches=microbatches)) == rows


@pytest.mark.parametrize("name", [n for n in common.ORDERS if n in SCHEDULES])
def test_the_orders_of_the_papers_letter_for_letter(name):
    microbatches = 4 if name == "chimera" else 8
    assert str(build(name, ranks=4, microbatches=microbatches)) + "\n" == common.ORDERS[name]


@pytest.mark.parametrize("name", common.NAMES)
def test_all_sizes_are_legal_and_finish(name):
    """M < P, M = 1, P = 1, P = 2 and what doesn't divide: each works, nothing is lost."""
    for size in common.sizes(name):
        schedule = build(name, **size)
        check(schedule)
        simulate(schedule)
        stages = size["ranks"] * size.get("chunks", 1)
        assert (schedule.ranks, schedule.stages) == (size["ranks"], stages), size
        assert schedule.microbatches == size["microbatches"]
        kinds = "F" if name == "inference" else "FB"
        assert sum(map(len, schedule.rows)) == stages * size["microbatches"] * len(kinds)
        assert schedule.name == name


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_recompute_stands_before_each_backward(name):
    for size in common.sizes(name):
        plain = build(name, **size)
        schedule = build(name, **size, recompute=True)
        assert schedule.name == f"{name}+recompute"
        assert [[a for a in row if a.kind != "R"] for row in schedule.rows] == [
            list(row) for row in plain.rows
        ]
        for row in schedule.rows:
            for one, following in zip(row, row[1:], strict=False):
                assert (one.kind == "R") == (following.kind == "B")


def test_interleaved_takes_every_group_between_ranks_and_micro_batches():
    for p in (1, 2, 3, 4):
        for v in (1, 2, 3):
            for m in range(1, 2 * p + 4):
                for group in range(min(p, m), m + 1):
                    schedule = build("interleaved", ranks=p, microbatches=m, chunks=v, group=group)
                    simulate(schedule)
                assert schedule.microbatches == m


def test_one_chunk_is_the_plain_schedule():
    for p, m in [(1, 1), (2, 3), (4, 4), (4, 9)]:
        rows = build("1f1b", ranks=p, microbatches=m)
        assert str(build("breadth-first", ranks=p, microbatches=m, chunks=1)).count("B") == p * m
        looped = build("interleaved", ranks=p, microbatches=m, chunks=1)
        assert simulate(looped).makespan == simulate(rows).makespan


WRONG = [
    ({"ranks": 0}, "ranks=0 must be a whole number, at least 1"),
    ({"ranks": -3}, "ranks=-3"),
    ({"ranks": "4"}, "ranks='4' must be a whole number"),
    ({"ranks": True}, "ranks=True"),
    ({"ranks": 4.0}, "ranks=4.0"),
    ({"ranks": None}, "ranks=None"),
    ({"microbatches": 0}, "microbatches=0 must be a whole number, at least 1"),
    ({"microbatches": [8]}, "microbatches=[8]"),
    ({"chunks": 0}, "chunks=0"),
    ({"chunks": None}, "chunks=None"),
    ({"group": 0}, "group=0"),
    (
        {"group": 3},
        "group=3 must be between min(ranks, microbatches) = 4 and microbatches = 8; "
        "the nearest legal value is 4",
    ),
    ({"group": 9}, "the nearest legal value is 8"),
    ({"microbatches": 2, "group": 3}, "the nearest legal value is 2"),
    (
        {"grup": 4},
        "interleaved takes no argument 'grup'; it takes ranks, microbatches, chunks, group",
    ),
    ({"recompute": True}, "takes no argument 'recompute'"),
    ({"microbatches": 10**9}, "microbatches=1000000000 makes too many actions"),
    ({"ranks": 10**12}, "ranks=1000000000000 makes too many actions"),
]


@pytest.mark.parametrize("wrong, words", WRONG)
def test_wrong_arguments_are_named(wrong, words):
    with pytest.raises(ScheduleError) as error:
        build("interleaved", **{"ranks": 4, "microbatches": 8, **wrong})
    assert words in str(error.value)


@pytest.mark.parametrize(
    "name, hint",
    [
        ("gpip", "did you mean 'gpipe'?"),
        ("1F1B", "gpipe, 1f1b"),
        ("", "no schedule"),
        (None, "no schedule"),
        (["gpipe"], "no schedule"),
        (5, "no schedule"),
    ],
)
def test_an_unknown_name_lists_the_known_ones(name, hint):
    with pytest.raises(ScheduleError) as error:
        build(name, ranks=4, microbatches=8)
    assert hint in str(error.value) and "interleaved" in str(error.value)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_recompute_is_true_or_false(value):
    with pytest.raises(ScheduleError, match="recompute=.* must be True or False"):
        build("gpipe", ranks=2, microbatches=2, recompute=value)
