"""Tasks of lesson 2: the staircase, counting its bubble, micro-batches and their gradients."""

import math
from fractions import Fraction

import torch
from torch import nn

from minipipe.teach.testing import Wrong, expect, part

# 2.1

STAIRCASES = ((1, 1), (2, 1), (2, 3), (3, 2), (3, 1), (4, 6), (5, 10))


def lines_of(answer, ranks, microbatches):
    """The lines of the answer's text, and the case."""
    case = f"ranks={ranks}, microbatches={microbatches}"
    text = answer(ranks, microbatches)
    if not isinstance(text, str):
        hint = " (return the text, don't print it)" if text is None else ""
        raise Wrong(f"case: {case}\na text is asked for, yours is a {type(text).__name__}{hint}")
    lines = [line.rstrip() for line in text.rstrip("\n").split("\n")]
    if len(lines) != ranks + 1:
        raise Wrong(f"case: {case}\n{ranks + 1} lines are asked for, one a rank and a last one; "
                    f"yours are {len(lines)}:\n{text}")  # fmt: skip
    return lines, case


def right_lines(ranks, microbatches):
    """What stands in each line, by the rule that stage s has micro-batch t - s in step t."""
    steps = range(ranks + microbatches - 1)
    names = {m: f"F{m}" for m in range(microbatches)}
    return [[names.get(t - stage, ".") for t in steps] for stage in range(ranks)]


def is_clear(ranks, microbatches):
    """Whether the idle share in percent does not end in exactly one half."""
    return (100 * Fraction(ranks - 1, ranks + microbatches - 1)) % 1 != Fraction(1, 2)


@part("2.1", "who does what when", 60)
def test_staircase_cells(answer, sizes):
    for ranks, microbatches in sizes(*STAIRCASES):
        lines, case = lines_of(answer, ranks, microbatches)
        for stage, cells in enumerate(right_lines(ranks, microbatches)):
            mine = lines[stage].replace(f"GPU {stage}:", "", 1).split()
            if mine != cells:
                raise Wrong(f"case: {case}\nthe line of stage {stage}\n"
                            f"expected: {' '.join(cells)}\nyours:    {' '.join(mine)}")  # fmt: skip


@part("2.1", "the exact text", 20)
def test_staircase_text(answer, sizes):
    for ranks, microbatches in sizes(*STAIRCASES):
        lines, case = lines_of(answer, ranks, microbatches)
        for stage, cells in enumerate(right_lines(ranks, microbatches)):
            right = f"GPU {stage}: " + " ".join(cell.rjust(2) for cell in cells)
            if lines[stage] != right:
                raise Wrong(f"case: {case}\nthe line of stage {stage}\n"
                            f"expected: {right!r}\nyours:    {lines[stage]!r}")  # fmt: skip


@part("2.1", "the idle fraction", 20)
def test_staircase_idle(answer, sizes):
    for ranks, microbatches in sizes(*STAIRCASES, (4, 24), only=is_clear):
        lines, case = lines_of(answer, ranks, microbatches)
        cells = sum(right_lines(ranks, microbatches), [])
        percent = math.floor(Fraction(100 * cells.count("."), len(cells)) + Fraction(1, 2))
        expect(lines[-1], f"Idle fraction: {percent}%", f"{case}, the last line")


# 2.2


def random_table(rng, ranks, steps, ends_early):
    """A table and its idle slots, known because they are chosen: `ends_early` leaves out what is
    None at the end of rows; the last rank always works last."""
    places = [(rank, step) for rank in range(ranks) for step in range(steps)]
    places.remove((ranks - 1, steps - 1))
    idle = rng.sample(places, rng.randint(0, len(places)))
    table = [[None if (rank, step) in idle else f"F{step}" for step in range(steps)]
             for rank in range(ranks)]  # fmt: skip
    if ends_early:
        for row in table:
            while row and row[-1] is None:
                row.pop()
    return table, Fraction(len(idle), ranks * steps)


# In the last step of each some rank works: whether steps without any count isn't asked.
FULL = (([["F0"]], 0), ([[None, "F0"]], Fraction(1, 2)),
        ([["F0", None], [None, "F0"]], Fraction(1, 2)),
        ([["F0", "F1", None], [None, "F0", "F1"]], Fraction(1, 3)),
        ([["F0", None, None, "B0"], [None, None, "F0", None]], Fraction(5, 8)))  # fmt: skip
EARLY = (([["F0"], [None, "F0"]], Fraction(1, 2)), ([["F0"], []], Fraction(1, 2)),
         ([["F0", "F1"], [None, "F0", "F1"]], Fraction(1, 3)),
         ([["F0"], [None, "F0"], [None, None, "F0"]], Fraction(2, 3)))  # fmt: skip


def tables(rng, fixed, ends_early):
    yield from fixed
    for ranks, steps in ((2, 3), (3, 4), (4, 9)):
        yield random_table(rng, ranks, steps, ends_early)


def share_of(answer, table):
    """The answer's share of a copy, so that it can't change the table."""
    return answer([list(row) for row in table])


@part("2.2", "full rows", 40)
def test_idle_full(answer, rng):
    for table, right in tables(rng, FULL, False):
        expect(share_of(answer, table), right, str(table))


@part("2.2", "rows that end early", 40)
def test_idle_early(answer, rng):
    for table, right in tables(rng, EARLY, True):
        expect(share_of(answer, table), right, str(table))


@part("2.2", "exact", 20)
def test_idle_exact(answer, rng):
    for table, right in tables(rng, FULL, False):
        mine = share_of(answer, table)
        if isinstance(mine, bool) or not isinstance(mine, (Fraction, int)):
            raise Wrong(f"case: {table}\na Fraction is asked for, yours is the "
                        f"{type(mine).__name__} {mine!r:.60}")  # fmt: skip
        if mine != right:
            raise Wrong(f"case: {table}\nexpected: {right}\nyours:    {mine}")


# 2.3


COUNTS = {(1, 1): [1], (2, 1): [2], (2, 2): [1, 1], (3, 2): [2, 1], (5, 4): [2, 1, 1, 1],
          (10, 4): [3, 3, 2, 2], (64, 7): [10, 9, 9, 9, 9, 9, 9]}  # fmt: skip


@part("2.3", "counts", 100)
def test_row_counts(answer, sizes):
    def is_legal(rows, microbatches):
        return rows >= microbatches

    for rows, microbatches in sizes(*COUNTS, only=is_legal):
        case = f"rows={rows}, microbatches={microbatches}"
        mine = answer(rows, microbatches)
        if (rows, microbatches) in COUNTS:
            expect(mine, COUNTS[rows, microbatches], case)
        elif (len(mine), sum(mine)) != (microbatches, rows):
            raise Wrong(f"case: {case}\n{microbatches} counts are asked for, which sum to {rows}\n"
                        f"yours:    {mine}")  # fmt: skip
        elif max(mine) - min(mine) > 1 or list(mine) != sorted(mine, reverse=True):
            raise Wrong(f"case: {case}\nthe counts may differ by 1 at most, the larger ones first\n"
                        f"yours:    {mine}")  # fmt: skip


# 2.4


class Seen(nn.Sequential):
    """A model that notes how many rows each of its calls gets."""

    def forward(self, x):
        self.rows.append(len(x))
        return super().forward(x)


def make_model(seed):
    torch.manual_seed(seed)
    model = Seen(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model.rows = []
    return model


def accumulated(answer, counts, seed):
    """The model after the answer, what that returned, gradients and loss of the whole batch."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(counts), 3, generator=generator, dtype=torch.float64)
    targets = torch.randn(sum(counts), 2, generator=generator, dtype=torch.float64)
    one = make_model(seed)
    loss = nn.functional.mse_loss(one(inputs), targets)
    loss.backward()
    right = {name: p.grad for name, p in one.named_parameters()}
    model = make_model(seed)
    mine = answer(model, nn.functional.mse_loss, inputs, targets, list(counts))
    return model, mine, right, loss.item()


def compare(answer, counts, seed):
    model, mine, right, loss = accumulated(answer, counts, seed)
    case = f"counts={list(counts)}"
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            raise Wrong(f"case: {case}\nthe gradient of {name} is missing: .grad is None")
        expect(parameter.grad, right[name], f"{case}, the gradient of {name}", 1e-10)
    expect(mine, loss, f"{case}, the loss that is returned", 1e-10)
    if sorted(model.rows) != sorted(counts):
        raise Wrong(f"case: {case}\nthe model has to be called once for each micro-batch\n"
                    f"rows of your calls: {model.rows}")  # fmt: skip


@part("2.4", "even micro-batches", 40)
def test_even(answer, rng):
    for microbatches, rows in ((1, 1), (1, 3), (2, 1), (2, 3), (4, 2)):
        compare(answer, [rows] * microbatches, rng.randrange(1000))


@part("2.4", "uneven micro-batches", 60)
def test_uneven(answer, rng):
    several = [rng.randint(1, 5) for _ in range(4)]
    for counts in ([2, 1], [3, 3, 2], [5, 5, 5, 1], [1, 4], several):
        compare(answer, counts, rng.randrange(1000))
