"""What the tests of the plan half share."""

import functools
import pathlib
import re

import minipipe as mp

HERE = pathlib.Path(__file__).parent
PLAN = HERE.parent.parent / "minipipe"
ORDERS = {
    name: rows.strip() + "\n"
    for name, rows in re.findall(
        r"^## (\S+)\n((?:[^#\n].*\n)+)", (HERE / "orders.txt").read_text(), re.MULTILINE
    )
}
# The schedules of issue A; those of later issues have tests of their own.
NAMES = ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "inference")


def sizes(name: str) -> list[dict]:
    """Small sizes: 1 to 4 ranks, 1 to 2P + 1 micro-batches, 1 to 3 chunks where there are some."""
    chunks = (1, 2, 3) if name in ("interleaved", "breadth-first", "inference") else (None,)
    return [
        {"ranks": p, "microbatches": m} | ({"chunks": v} if v else {})
        for p in (1, 2, 3, 4)
        for m in range(1, 2 * p + 2)
        for v in chunks
    ]


@functools.cache
def order(name: str) -> mp.Schedule:
    return mp.Schedule.parse(ORDERS[name], name)


def every() -> list[tuple[mp.Schedule, str]]:
    """Many legal schedules, each with a label."""
    built = [(mp.build(name, **size), f"{name} {size}") for name in NAMES for size in sizes(name)]
    built += [
        (mp.build(name, **size, recompute=True), f"{name} recompute {size}")
        for name in ("gpipe", "1f1b")
        for size in sizes(name)
    ]
    return built + [(order(name), name) for name in ORDERS]
