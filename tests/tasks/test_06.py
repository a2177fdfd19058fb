"""Tasks of lesson 6: 1F1B."""

from minipipe.teach.testing import has_all, part, table, within, wrong_table

CASES = ((1, 1), (2, 1), (2, 2), (2, 3), (3, 4), (4, 3), (4, 8))


def made(answer, right, p, m):
    case = f"ranks={p}, microbatches={m}"
    shown = right(ranks=p, microbatches=m)
    rows = table(answer(p, m), case, shown)
    has_all(rows, p, m, "FB", case, shown)
    return rows, case, shown


@part("6.1", "right order", 60)
def test_order(answer, right, sizes):
    """Legal, and from the first backward on a forward is followed by a backward."""
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        for rank, row in enumerate(rows.rows):
            kinds = "".join(action.kind for action in row)
            if "FF" in kinds[kinds.index("B") :]:
                reason = f"rank {rank} does two forwards in a row after its first backward"
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
