"""Tasks of lesson 3: GPipe, naive, and an interpreter over real ranks."""

from fractions import Fraction

import minipipe as mp
from minipipe.teach.testing import (
    Wrong,
    expect,
    has_all,
    kind,
    part,
    refusing,
    table,
    within,
    wrong_table,
)

CASES = ((1, 1), (1, 3), (2, 1), (2, 2), (2, 3), (3, 4), (4, 2), (4, 8))


def made(answer, right, p, m, **more):
    case = f"ranks={p}, microbatches={m}" + "".join(f", {k}={v}" for k, v in more.items())
    shown = right(ranks=p, microbatches=m, **more)
    rows = table(answer(p, m, **more), case, shown)
    has_all(rows, p, m, "FRB" if more else "FB", case, shown)
    return rows, case, shown


def all_forwards_first(rows, case, shown):
    for rank, row in enumerate(rows.rows):
        kinds = [action.kind for action in row]
        if "F" in kinds[kinds.index("B") :]:
            reason = f"rank {rank} has a forward behind its first backward"
            raise wrong_table(reason, case, rows, shown)


@part("3.1", "right order", 60)
def test_gpipe_order(answer, right, sizes):
    """Legal, and no forward behind a backward."""
    for p, m in sizes(*CASES):
        all_forwards_first(*made(answer, right, p, m))


@part("3.1", "within memory", 20)
def test_gpipe_memory(answer, right, sizes):
    """All micro-batches are kept; with recompute one."""
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, peaks=[m] * p)
        rows, case, shown = made(answer, right, p, m, recompute=True)
        all_forwards_first(rows, case, shown)
        within(rows, case, shown, peaks=[1] * p)


@part("3.1", "within bubble", 20)
def test_gpipe_bubble(answer, right, sizes):
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        all_forwards_first(rows, case, shown)
        within(rows, case, shown, makespan=3 * (m + p - 1))


@part("3.2", "right order", 60)
def test_naive_order(answer, right, sizes):
    """Legal, and each forward is followed by its own backward."""
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        for rank, row in enumerate(rows.rows):
            for one, two in zip(row[::2], row[1::2], strict=True):
                if (one.kind, two.kind, one.microbatch) != ("F", "B", two.microbatch):
                    reason = f"rank {rank} does {two} directly behind {one}: a micro-batch goes " \
                             "forward and back before the next one starts"  # fmt: skip
                    raise wrong_table(reason, case, rows, shown)


@part("3.2", "within memory", 20)
def test_naive_memory(answer, right, sizes):
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, peaks=[1] * p)


@part("3.2", "within bubble", 20)
def test_naive_bubble(answer, right, sizes):
    """Exactly (p - 1)/p: less would be another schedule."""
    for p, m in sizes(*CASES):
        rows, case, shown = made(answer, right, p, m)
        bubble = mp.simulate(rows).bubble.idle_over_total
        if bubble != Fraction(p - 1, p):
            reason = f"the ranks idle {bubble} of the time, in the naive order {p - 1}/{p}"
            raise wrong_table(reason, case, rows, shown)


# The interpreter. Rows as plain text: the package's own schedules are not needed.

GPIPE = {
    1: "0F0 0F1 0F2 0B0 0B1 0B2",
    2: "0F0 0F1 0F2 0B0 0B1 0B2 / 1F0 1F1 1F2 1B0 1B1 1B2",
    3: "0F0 0F1 0F2 0B2 0B1 0B0 / 1F0 1F1 1F2 1B2 1B1 1B0 / 2F0 2F1 2F2 2B2 2B1 2B0",
}
ONE = "0F0 0B0 / 1F0 1B0"
# 1F1B, and a table of no name: rank 1 is eager, micro-batches go in the order 1, 0, 2, 3.
OTHER = (
    "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 / 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 / "
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    "0F1 0F0 0F2 0F3 0B1 0B0 0B2 0B3 / 1F1 1F0 1F2 1B1 1B0 1F3 1B2 1B3 / "
    "2F1 2B1 2F0 2F2 2B0 2B2 2F3 2B3",
)
WIDTH, LINES = 3, 2


def material(text, seed):
    """Stages, inputs, targets and rows of a case, the same in every process."""
    import torch
    from torch import nn

    rows = [row.split() for row in text.split("/")]
    microbatches = len(rows[0]) // 2
    torch.manual_seed(seed)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in rows]
    inputs, targets = torch.randn(2, microbatches, LINES, WIDTH, dtype=torch.float64)
    return rows, stages, inputs, targets


def run_here(rank, answer, cases):
    """What an answer gives on this rank for each case: its result, the stage's gradients, and
    the kinds of passes that the stage saw, in order."""
    from torch import nn

    results = []
    for text, seed in cases:
        rows, stages, inputs, targets = material(text, seed)
        first, last, seen = rank == 0, rank == len(rows) - 1, []
        stages[rank].register_forward_hook(lambda *_, seen=seen: seen.append("F"))
        stages[rank][0].weight.register_hook(lambda _, seen=seen: seen.append("B"))
        with refusing("minipipe.pipeline:Pipeline", "torch.distributed:all_reduce"):
            result = answer(rows[rank], rank, len(rows), stages[rank], nn.functional.mse_loss,
                            list(inputs) if first else None, list(targets) if last else None,
                            (LINES, WIDTH))  # fmt: skip
        results.append((result, [p.grad for p in stages[rank].parameters()],
                        "".join(seen)))  # fmt: skip
    return results


def compare(cases, ranks):
    """Hold what the ranks gave against autograd on one process with the whole batch."""
    import torch
    from torch import nn

    for number, (text, seed) in enumerate(cases):
        rows, stages, inputs, targets = material(text, seed)
        shown = "\n".join(f"  {' '.join(row)}" for row in rows)
        case = f"ranks: {len(rows)}, micro-batches: {len(rows[0]) // 2}, rows:\n{shown}"
        model = nn.Sequential(*stages)
        loss = nn.functional.mse_loss(model(inputs.flatten(0, 1)), targets.flatten(0, 1))
        loss.backward()
        for rank, results in enumerate(ranks):
            result, gradients, seen = results[number]
            if rank < len(rows) - 1 and result is not None:
                raise Wrong(f"case: {case}\nonly the last rank returns the loss; rank {rank} "
                            f"returned {result!r:.80}")  # fmt: skip
            if rank == len(rows) - 1:
                mine = result
                if isinstance(mine, torch.Tensor) and mine.numel() == 1:
                    mine = mine.item()
                expect(mine, loss.item(), f"{case}\nthe loss that rank {rank} returns", 1e-10)
            for (name, p), mine in zip(stages[rank].named_parameters(), gradients, strict=True):
                what = f"{case}\nthe gradient of {name} on rank {rank}"
                if mine is None:
                    raise Wrong(f"case: {what}\nthere is none: no backward pass has reached it")
                expect(mine, p.grad, what, 1e-10)
            kinds = "".join(word[1] for word in rows[rank])
            expect(seen, kinds, f"{case}\nthe passes of rank {rank}'s stage, in order")


def on_ranks(answer, cases, ranks):
    if not callable(answer):
        raise Wrong(f"run_row must be a function, yours is {kind(answer)}")
    compare(cases, mp.launch(run_here, answer, cases, ranks=ranks, timeout=5, threads=1))


@part("3.3", "GPipe on one rank", 20)
def test_one_rank(answer, rng):
    """No messages: only loss and gradients."""
    cases = [("0F0 0B0", rng.randrange(1000)), (GPIPE[1], rng.randrange(1000))]
    compare(cases, [run_here(0, answer, cases)])


@part("3.3", "GPipe on several ranks", 50)
def test_gpipe_runs(answer, rng):
    on_ranks(answer, [(ONE, rng.randrange(1000)), (GPIPE[2], rng.randrange(1000))], 2)
    on_ranks(answer, [(GPIPE[3], rng.randrange(1000))], 3)


@part("3.3", "any other table", 30)
def test_other_tables_run(answer, rng):
    """1F1B and an order of no name: the interpreter does what the row says."""
    on_ranks(answer, [(text, rng.randrange(1000)) for text in OTHER], 3)
