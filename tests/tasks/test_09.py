"""Tasks of lesson 9: the V placement, copies, DualPipe's figure, overlapped pairs."""

from fractions import Fraction

import minipipe as mp
from minipipe.teach.testing import Wrong, expect, kind, part, run_on_ranks


def v_table(ranks):
    """The package's table of one micro-batch on a V."""
    return mp.build("zb-v", ranks=ranks, microbatches=1)


@part("9.1", "the stages of a rank", 50)
def test_stages(answer, sizes):
    for (ranks,) in sizes((1,), (2,), (3,), (4,), (9,)):
        table = v_table(ranks)
        for rank in range(ranks):
            held = tuple(table.stages_of(rank))
            expect(answer(rank, ranks), held, f"rank={rank}, ranks={ranks}")


@part("9.1", "the messages", 50)
def test_messages(answer_module, sizes):
    messages = getattr(answer_module, "v_messages", None)
    if messages is None:
        raise Wrong("the cell must define `v_messages` too; it does not")
    for (ranks,) in sizes((1,), (2,), (3,), (4,), (9,)):
        program = mp.lower(v_table(ranks))
        sent = [m for rank in range(ranks) for step in program.steps(rank) for m in step.sends
                if m.kind == "F"]  # fmt: skip
        links = [(m.source, m.target) for m in sorted(sent, key=lambda m: m.stage)]
        expect(messages(ranks), links, f"ranks={ranks}")


# Two copies of a stage: four ranks hold stages as DualPipe has them, r and 3 - r.


def made(stage, rank, dtype):
    """The parameters of a stage's copy, the same on both ranks, with this rank's gradients."""
    import torch

    weights = torch.Generator().manual_seed(stage)
    own = torch.Generator().manual_seed(10 + 4 * stage + rank)
    parameters = []
    for shape in ((3, 2), (2,), (), (200, 3)):
        value = torch.randn(shape, generator=weights, dtype=torch.float64).to(dtype)
        parameters.append(torch.nn.Parameter(value))
        parameters[-1].grad = torch.randn(shape, generator=own, dtype=torch.float64).to(dtype)
    return parameters


def on_each_rank(rank, add):
    """For both dtypes and each stage of this rank: its gradients after the sum, and its weights
    after an update."""
    import torch

    found = {}
    for dtype in (torch.float64, torch.float32):
        for stage in sorted((rank, 3 - rank)):
            parameters = made(stage, rank, dtype)
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
            add(parameters, 3 - rank)
            found[dtype, stage] = [p.grad for p in parameters]
            if all(isinstance(p.grad, torch.Tensor) for p in parameters):
                optimizer.step()
            found[dtype, stage, "weights"] = [p.detach() for p in parameters]
    return found


def with_missing(rank, add):
    """Two ranks; rank 0 has no gradient for the bias, rank 1 none for the scalar."""
    import torch

    parameters = made(0, rank, torch.float64)
    parameters[1 + rank].grad = None
    add(parameters, 1 - rank)
    return [p.grad for p in parameters]


def compare_sums(found, dtype, tolerance):
    import torch

    for stage in range(4):
        ranks = (stage, 3 - stage)
        pairs = zip(*(made(stage, rank, dtype) for rank in ranks), strict=True)
        sums = [a.grad + b.grad for a, b in pairs]
        for rank in ranks:
            for grad, total in zip(found[rank][dtype, stage], sums, strict=True):
                case = f"stage {stage} on rank {rank}, .grad of shape {tuple(total.shape)}"
                if isinstance(grad, torch.Tensor) and grad.dtype != total.dtype:
                    raise Wrong(f"case: {case}\nits dtype was {total.dtype}, now {grad.dtype}")
                expect(grad, total, case, tolerance)


@part("9.2", "the sum", 50)
def test_sum(answer):
    import torch

    compare_sums(run_on_ranks(on_each_rank, answer, 4), torch.float64, 1e-12)


@part("9.2", "equal to the last bit", 30)
def test_bits(answer):
    """In float32: gradients and, after an update, weights of both copies."""
    import torch

    found = run_on_ranks(on_each_rank, answer, 4)
    compare_sums(found, torch.float32, 1e-6)
    for stage in range(2):
        first, second = found[stage], found[3 - stage]
        for what, *key in ((".grad",), ("the weights after an update", "weights")):
            key = (torch.float32, stage, *key)
            for a, b in zip(first[key], second[key], strict=True):
                if not torch.equal(a, b):
                    raise Wrong(f"case: stage {stage}\n{what} of both copies, of shape "
                                f"{tuple(a.shape)}, are not equal to the last bit: they differ by "
                                f"up to {(a - b).abs().max().item():.3g}")  # fmt: skip


@part("9.2", "a gradient that is None", 20)
def test_missing(answer):
    import torch

    each = [made(0, rank, torch.float64) for rank in range(2)]
    sums = [a.grad + b.grad for a, b in zip(*each, strict=True)]
    sums[1], sums[2] = each[1][1].grad, each[0][2].grad
    for rank, grads in enumerate(run_on_ranks(with_missing, answer, 2)):
        for place, (grad, total) in enumerate(zip(grads, sums, strict=True)):
            missing = {1: "None on rank 0", 2: "None on rank 1"}.get(place, "there on both ranks")
            expect(grad, total, f"a gradient that was {missing}, afterwards on rank {rank}", 1e-12)


# Figures: tables of two-way schedules, also upside down and with other numbers of micro-batches.


def figures(rng):
    """(case, rows of texts, width, the right answer), from small to large."""
    made = [("chimera", 2, 2), ("dualpipe", 2, 4), ("chimera", 4, 3), ("dualpipev", 2, 4),
            ("dualpipe", 4, 8), ("dualpipev", 4, 9), ("dualpipe", 6, 14)]  # fmt: skip
    for name, ranks, microbatches in made:
        table = mp.build(name, ranks=ranks, microbatches=microbatches)
        down = range(microbatches if name == "dualpipev" else (microbatches + 1) // 2)
        for other in (False, True):
            numbers, rows, text = list(range(microbatches)), list(table.rows), ""
            if other:
                rng.shuffle(numbers)
                rows, text = rows[::-1], ", upside down, micro-batches numbered in another order"
            rows = [[renamed(action, numbers) for action in row] for row in rows]
            t = mp.simulate(mp.Schedule(rows), mp.Costs(*[table.stages // ranks] * 3))
            first = sorted(numbers[m] for m in down)
            second = sorted({*range(microbatches)} - {*first})
            right = {
                "down": second if other else first, "up": first if other else second,
                "copies": [*range(ranks)] if name != "dualpipev" else [],
                "pairs": [sum(a.overlapped is not None for a in row) for row in t.schedule.rows],
                "idle": [int(t.makespan - busy) for busy in t.busy],
            }  # fmt: skip
            case = f"{name}, {ranks} ranks, {microbatches} micro-batches{text}"
            yield case, rows, int(t.makespan), right


def renamed(action, numbers):
    parts = [f"{a.stage}{a.kind}{numbers[a.microbatch]}" for a in action.parts]
    return parts[0] if len(parts) == 1 else f"({parts[0]};{parts[1]})"


def compare_figures(answer, rng, *keys):
    for case, rows, width, right in figures(rng):
        if width < 60:
            lines = "\n".join(f"  {' '.join(row)}" for row in rows)
            case = f"{case}, width={width}\n{lines if len(rows) < 5 else ''}".rstrip()
        mine = answer([list(row) for row in rows], width)
        if not isinstance(mine, dict):
            raise Wrong(f"case: {case}\na dictionary is asked for, yours is "
                        f"{kind(mine)}")  # fmt: skip
        for key in keys:
            if key not in mine:
                raise Wrong(f'case: {case}\nthe dictionary has no "{key}"')
            expect(mine[key], right[key], f'{case}\n"{key}"')


@part("9.3", "which way", 40)
def test_ways(answer, rng):
    compare_figures(answer, rng, "down", "up")


@part("9.3", "copies and pairs", 30)
def test_copies_and_pairs(answer, rng):
    compare_figures(answer, rng, "copies", "pairs")


@part("9.3", "idle columns", 30)
def test_idle(answer, rng):
    compare_figures(answer, rng, "idle")


# forward, backward, exchange | time of the pair
PAIRS = (
    (1, 1, Fraction(0), 2),  # nothing to hide: one after the other
    (1, 1, Fraction(1, 4), Fraction(3, 2)),  # 3/4 of compute for each
    (1, 1, Fraction(1, 2), 1),
    (1, 2, Fraction(1, 8), Fraction(21, 8)),  # 7/8 and 14/8 of compute
    (1, 2, Fraction(1, 2), 2),  # compute would be 1 1/2, but the backward takes 2 by itself
    (2, 1, Fraction(1, 2), 2),  # and now the forward
    (2, 5, Fraction(0), 7),
    (2, 5, Fraction(1, 7), 6),
    (2, 5, Fraction(3, 4), 5),
    (7, 3, Fraction(1, 5), 8),
    (7, 3, Fraction(1), 7),
)


@part("9.4", "a pair", 60)
def test_pair(answer, sizes):
    for (times,) in sizes((1,), (2,), (7,), (40,)):  # passes twice as long: so is the pair
        for forward, backward, share, right in PAIRS:
            forward, backward, right = times * forward, times * backward, times * right
            case = f"forward={forward}, backward={backward}, exchange={share}"
            expect(answer(forward, backward, share), right, case)


# Times of F, I and W, and what a pair then takes with these shares of exchange.
SHARES = (Fraction(0), Fraction(1, 4), Fraction(3, 5))
ROWS = [
    ((1, 1, 1), (3, Fraction(9, 4), 2)),
    ((2, 3, 1), (6, Fraction(9, 2), 4)),
    ((4, 1, 2), (7, Fraction(21, 4), 4)),
]


@part("9.4", "a row", 40)
def test_row(answer_module):
    busy = getattr(answer_module, "busy", None)
    if busy is None:
        raise Wrong("the cell must define `busy` too; it does not")
    small = mp.Schedule.parse("0F0 0F1 (0F2;0B0) 0B1 0I2 0W2")
    tables = [small, *(mp.build("dualpipe", ranks=p, microbatches=2 * p) for p in (2, 4, 6))]
    for table in tables:
        for times, pairs in ROWS:
            plain = mp.simulate(table, mp.Costs(*times)).busy  # pairs that hide nothing
            for share, pair in zip(SHARES, pairs, strict=True):
                for rank, row in enumerate(table.rows[: table.ranks // 2 or 1]):
                    hidden = (sum(times) - pair) * sum(len(action.parts) == 2 for action in row)
                    row = [str(action) for action in row]
                    case = (f"row={' '.join(row)}, forward={times[0]}, backward_input={times[1]}, "
                            f"backward_weight={times[2]}, exchange={share}")  # fmt: skip
                    expect(busy(row, *times, share), plain[rank] - hidden, case)
