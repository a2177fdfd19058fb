"""Tasks of lesson 2: the staircase, counting its bubble, micro-batches and their gradients."""

import re
from fractions import Fraction

import torch
from torch import nn

from minipipe.teach.testing import Wrong, expect, kind, part

# 2.1

# What is asked for, drawn by hand.
STAIRCASES = {
    (1, 1): """
GPU 0: F0
Idle fraction: 0%""",
    (2, 1): """
GPU 0: F0  .
GPU 1:  . F0
Idle fraction: 50%""",
    (2, 3): """
GPU 0: F0 F1 F2  .
GPU 1:  . F0 F1 F2
Idle fraction: 25%""",
    (3, 2): """
GPU 0: F0 F1  .  .
GPU 1:  . F0 F1  .
GPU 2:  .  . F0 F1
Idle fraction: 50%""",
    (3, 1): """
GPU 0: F0  .  .
GPU 1:  . F0  .
GPU 2:  .  . F0
Idle fraction: 67%""",
    (4, 6): """
GPU 0: F0 F1 F2 F3 F4 F5  .  .  .
GPU 1:  . F0 F1 F2 F3 F4 F5  .  .
GPU 2:  .  . F0 F1 F2 F3 F4 F5  .
GPU 3:  .  .  . F0 F1 F2 F3 F4 F5
Idle fraction: 33%""",
    (5, 10): """
GPU 0: F0 F1 F2 F3 F4 F5 F6 F7 F8 F9  .  .  .  .
GPU 1:  . F0 F1 F2 F3 F4 F5 F6 F7 F8 F9  .  .  .
GPU 2:  .  . F0 F1 F2 F3 F4 F5 F6 F7 F8 F9  .  .
GPU 3:  .  .  . F0 F1 F2 F3 F4 F5 F6 F7 F8 F9  .
GPU 4:  .  .  .  . F0 F1 F2 F3 F4 F5 F6 F7 F8 F9
Idle fraction: 29%""",
}


def lines_of(answer, ranks, microbatches):
    """The lines of the answer's text, of the text drawn by hand (None: there is none), and the
    case."""
    case = f"ranks={ranks}, microbatches={microbatches}"
    text = answer(ranks, microbatches)
    if not isinstance(text, str):
        hint = " (return the text, don't print it)" if text is None else ""
        raise Wrong(f"case: {case}\na text is asked for, yours is {kind(text)}{hint}")
    lines = [line.rstrip() for line in text.rstrip("\n").split("\n")]
    if len(lines) != ranks + 1:
        raise Wrong(f"case: {case}\n{ranks + 1} lines are asked for, one a rank and a last one; "
                    f"yours are {len(lines)}:\n{text}")  # fmt: skip
    drawn = STAIRCASES.get((ranks, microbatches))
    return lines, drawn and drawn.strip().split("\n"), case


def cells_of(line, stage):
    return line.replace(f"GPU {stage}:", "", 1).split()


@part("2.1", "who does what when", 60)
def test_staircase_cells(answer, sizes):
    for ranks, microbatches in sizes(*STAIRCASES):
        lines, drawn, case = lines_of(answer, ranks, microbatches)
        mine = [cells_of(line, stage) for stage, line in enumerate(lines[:-1])]
        for stage, cells in enumerate(mine):
            if drawn and cells != (right := cells_of(drawn[stage], stage)):
                raise Wrong(f"case: {case}\nthe line of stage {stage}\n"
                            f"expected: {' '.join(right)}\nyours:    {' '.join(cells)}")
        if not drawn:
            check_staircase(mine, microbatches, f"{case}\n" + "\n".join(lines))


def check_staircase(stages, microbatches, case):
    """What makes a staircase of the cells read from a text that nobody drew before."""
    for stage, cells in enumerate(stages):
        work = [cell for cell in cells if cell != "."]
        if work != [f"F{m}" for m in range(microbatches)]:
            raise Wrong(f"case: {case}\nthe line of stage {stage} has to have all of F0 to "
                        f"F{microbatches - 1}, in order, and dots; it has {' '.join(work)}")
        if len(cells) != len(stages[0]):
            raise Wrong(f"case: {case}\nthe lines of stage 0 and {stage} have "
                        f"{len(stages[0])} and {len(cells)} cells")  # fmt: skip
        if not stage and cells[: len(work)] != work:
            raise Wrong(f"case: {case}\nstage 0 waits for nobody, so it need not pause before "
                        f"F{microbatches - 1}")  # fmt: skip
        for name in work if stage else ():
            later = cells.index(name) - stages[stage - 1].index(name)
            if later != 1:
                raise Wrong(f"case: {case}\n{name} is done on stage {stage} {later} steps after "
                            f"stage {stage - 1}; right behind it, that is 1 step, is possible")
    for step, column in enumerate(zip(*stages, strict=True)):
        if set(column) == {"."}:
            raise Wrong(f"case: {case}\nnobody works in step {step}: it is not needed")


@part("2.1", "the exact text", 20)
def test_staircase_text(answer, sizes):
    for ranks, microbatches in sizes(*STAIRCASES):
        lines, drawn, case = lines_of(answer, ranks, microbatches)
        for stage, line in enumerate(lines[:-1]):
            if drawn and line != drawn[stage]:
                raise Wrong(f"case: {case}\nthe line of stage {stage}\n"
                            f"expected: {drawn[stage]!r}\nyours:    {line!r}")  # fmt: skip
            if not re.fullmatch(rf"GPU {stage}:(  \.| F\d+)+", line):
                raise Wrong(f"case: {case}\nthe line of stage {stage} is not made of 'GPU "
                            f"{stage}:' and cells such as '  .' and ' F0'\nyours:    {line!r}")


# 3 dots a line, of 27 cells each
IDLE = {case: text.split("\n")[-1] for case, text in STAIRCASES.items()} | {
    (4, 24): "Idle fraction: 11%"}  # fmt: skip


@part("2.1", "the idle fraction", 20)
def test_staircase_idle(answer, sizes):
    for ranks, microbatches in sizes(*IDLE):
        lines, _, case = lines_of(answer, ranks, microbatches)
        if (ranks, microbatches) in IDLE:
            expect(lines[-1], IDLE[ranks, microbatches], f"{case}, the last line")
            continue
        found = re.fullmatch(r"Idle fraction: (\d+)%", lines[-1])
        cells = [cell for stage, line in enumerate(lines[:-1]) for cell in cells_of(line, stage)]
        dots = cells.count(".")
        if not found or abs(Fraction(int(found[1]), 100) - Fraction(dots, len(cells) or 1)) > (
                Fraction(1, 200)):  # fmt: skip
            raise Wrong(f"case: {case}, the last line\nyour text has {dots} dots in {len(cells)} "
                        f"cells, and says: {lines[-1]}")  # fmt: skip


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
            raise Wrong(f"case: {table}\na Fraction is asked for, yours is "
                        f"{kind(mine)}, {mine!r:.60}")  # fmt: skip
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
