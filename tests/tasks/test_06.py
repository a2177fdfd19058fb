"""Tasks of lesson 6: 1F1B."""

from minipipe.costs import Costs
from minipipe.schedule import Schedule
from minipipe.simulate import simulate
from minipipe.teach.testing import (
    expect,
    has_all,
    not_one_at_a_time,
    part,
    table,
    within,
    wrong_table,
)

# 6.1

CASES = ((1, 1), (2, 1), (2, 2), (2, 3), (3, 4), (4, 2), (4, 8))


def made(answer, right, p, m):
    case = f"ranks={p}, microbatches={m}"
    shown = right(ranks=p, microbatches=m)
    rows = table(answer(p, m), case, shown)
    has_all(rows, p, m, "FB", case, shown)
    return rows, case, shown


@part("6.1", "right order", 60)
def test_order(answer, right, sizes):
    """Legal, and not one micro-batch at a time; from the first backward on a forward is followed
    by a backward; with more micro-batches than a rank needs to start, some forwards come after the
    first backward."""
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        not_one_at_a_time(rows, case, shown)
        for rank, row in enumerate(rows.rows):
            kinds = "".join(action.kind for action in row)
            if "FF" in kinds[kinds.index("B") :]:
                reason = f"rank {rank} does two forwards in a row after its first backward"
                raise wrong_table(reason, case, rows, shown)
            if m > p - rank and "BF" not in kinds:
                reason = f"rank {rank} does all forwards before its first backward, as in GPipe"
                raise wrong_table(reason, case, rows, shown)


@part("6.1", "within memory", 20)
def test_memory(answer, right, sizes):
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, peaks=[min(m, p - rank) for rank in range(p)])


@part("6.1", "within bubble", 20)
def test_bubble(answer, right, sizes):
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, makespan=3 * (m + p - 1))


# 6.2


def shuffled(rng, ranks, stages, microbatches):
    """A legal table in a random order; stage s stands on rank s % ranks."""
    rows, left = [[] for _ in range(ranks)], []
    for m in range(microbatches):
        left.append([f"{s}F{m}" for s in range(stages)]
                    + [f"{s}B{m}" for s in reversed(range(stages))])  # fmt: skip
    while left := [actions for actions in left if actions]:
        action = rng.choice(left).pop(0)
        rows[int(action.replace("B", "F").partition("F")[0]) % ranks].append(action)
    return rows


def counted(answer, rows, sizes):
    shown = "\n      ".join(" ".join(row) for row in rows)
    copy = [list(row) for row in rows]
    peaks = simulate(Schedule(rows), Costs(forward_size=list(sizes))).peak_activations
    expect(answer(copy, list(sizes)), list(peaks), f"sizes={list(sizes)}, rows:\n      {shown}")


@part("6.2", "one stage a rank", 60)
def test_peaks(answer, rng, sizes):
    counted(answer, [["0F0", "0B0"]], [7])
    counted(answer, [["0F0", "0F1", "0B0", "0B1"]], [7])
    counted(answer, [["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]], [7])
    counted(answer, [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], [7, 100])
    for p, m in sizes((3, 4), (4, 9)):
        counted(answer, shuffled(rng, p, p, m), [rng.randint(1, 99) for _ in range(p)])


@part("6.2", "several stages a rank", 40)
def test_peaks_of_chunks(answer, rng, sizes):
    counted(answer, [["0F0", "1F0", "1B0", "0B0"]], [7, 100])
    counted(answer, [["1F0", "1B0"], ["0F0", "0B0"]], [7, 100])
    counted(answer, [["0F0", "2F0", "2B0", "0B0"], ["1F0", "3F0", "3B0", "1B0"]], [1, 20, 300, 4])
    for p, chunks, m in sizes((2, 2, 3), (3, 3, 5)):
        size = [rng.randint(1, 99) for _ in range(p * chunks)]
        counted(answer, shuffled(rng, p, p * chunks, m), size)


# 6.3


def clocked(answer, right, limits, m):
    case = f"limits={limits}, microbatches={m}"
    shown = right(limits=limits, microbatches=m)
    rows = table(answer(list(limits), m), case, shown)
    has_all(rows, len(limits), m, "FB", case, shown)
    if limits[0] > 1:
        not_one_at_a_time(rows, case, shown)
    return rows, case, shown


def least(p, m, k):
    """The least makespan with room for k on every rank: a micro-batch is away from rank 0 for
    3p, so with k places a new group of k starts every 3p, and members of one follow 3 apart."""
    groups, rest = divmod(m - 1, min(k, p))
    return 3 * p * (groups + 1) + 3 * rest


ROOM = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 3, 2), (3, 4, 2), (4, 8, 3), (4, 8, 6))


@part("6.3", "right order", 30)
def test_clock_order(answer, right, sizes):
    """Legal, and every action once, whatever the limits are; where rank 0 has room for two, not one
    micro-batch at a time."""
    for p, m, k in sizes(*ROOM):
        clocked(answer, right, [k] * p, m)
        clocked(answer, right, [p - rank for rank in range(p)], m)
        clocked(answer, right, [1 + rank % k for rank in range(p)], m)


@part("6.3", "within memory", 40)
def test_clock_memory(answer, right, sizes):
    for p, m, k in sizes(*ROOM):
        for limits in ([k] * p, [p - rank for rank in range(p)], [1 + r % k for r in range(p)]):
            rows, case, shown = clocked(answer, right, limits, m)
            within(rows, case, shown, peaks=limits)


@part("6.3", "within bubble", 30)
def test_clock_bubble(answer, right, sizes):
    for p, m, k in sizes(*ROOM):
        for limits, time in (([k] * p, least(p, m, k)),
                             ([p - rank for rank in range(p)], 3 * (m + p - 1))):  # fmt: skip
            rows, case, shown = clocked(answer, right, limits, m)
            within(rows, case, shown, peaks=limits, makespan=time)
