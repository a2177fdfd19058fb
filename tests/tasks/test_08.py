"""Tasks of lesson 8: the split backward, ZB-H1 and ZB-H2, own span and makespan."""

from fractions import Fraction

from minipipe.costs import Costs
from minipipe.schedule import Schedule
from minipipe.simulate import simulate
from minipipe.teach.testing import (
    Wrong,
    expect,
    has_all,
    kind,
    not_one_at_a_time,
    part,
    table,
    within,
    wrong_table,
)

# inputs, outputs, and the shapes of the x's that the layer is used with before W
LAYERS = ((3, 2, (1,)), (3, 3, (4,)), (2, 5, (3,)), (4, 3, (2, 5)), (2, 3, (2, 2, 3)))


def pair(answer, inputs, outputs, seed):
    """An answer's layer and torch's own one, with the same random weights."""
    import torch

    torch.manual_seed(seed)
    if not callable(answer):
        raise Wrong(f"DeferredLinear has to be a class; yours is {kind(answer)}")
    layer, right = answer(inputs, outputs), torch.nn.Linear(inputs, outputs)
    if not isinstance(layer, torch.nn.Module):
        raise Wrong("DeferredLinear(3, 2) has to be a torch.nn.Module; yours is "
                    f"{kind(layer)}")  # fmt: skip
    for name in ("weight", "bias"):
        if not isinstance(getattr(layer, name, None), torch.nn.Parameter):
            raise Wrong(f"DeferredLinear(3, 2).{name} has to be a parameter, as the cell has it")
    if not callable(getattr(layer, "backward_weight", None)):
        raise Wrong("DeferredLinear needs its method backward_weight; yours has none")
    layer, right = layer.double(), right.double()
    with torch.no_grad():
        layer.weight.copy_(right.weight)
        layer.bias.copy_(right.bias)
    return layer, right


def used(layer, x):
    """A loss whose gradient is another one for each element."""
    import torch

    outputs = layer(x)
    if not isinstance(outputs, torch.Tensor):
        raise Wrong(f"the layer's output has to be a tensor; yours is {kind(outputs)}")
    return (outputs**2 * torch.arange(1, outputs.numel() + 1).view(outputs.shape)).sum()


def nothing_yet(layer, case):
    for name in ("weight", "bias"):
        if getattr(layer, name).grad is not None:
            raise Wrong(f"case: {case}\nafter backward() the {name} has a gradient already; it "
                        "may come in backward_weight() only")  # fmt: skip


def same(layer, right, case):
    for name in ("weight", "bias"):
        got = getattr(layer, name).grad
        if got is None:
            raise Wrong(f"case: {case}\nafter backward_weight() the {name} has no gradient")
        expect(got, getattr(right, name).grad, f"{case}; the gradient of the {name}", 1e-12)


def random(shape, asks=True):
    import torch

    return torch.randn(*shape, dtype=torch.float64).requires_grad_(asks)


def layers(rng):
    for inputs, outputs, shape in LAYERS:
        yield inputs, outputs, (*shape, inputs)
    inputs, outputs = rng.randint(2, 6), rng.randint(2, 6)
    yield inputs, outputs, (rng.randint(2, 4), rng.randint(2, 4), inputs)


@part("8.1", "I: the input's gradient alone", 30)
def test_input_gradient(answer, rng):
    for inputs, outputs, shape in layers(rng):
        case = f"DeferredLinear({inputs}, {outputs}), x of shape {list(shape)}"
        layer, right = pair(answer, inputs, outputs, rng.randint(0, 999))
        mine = random(shape)
        theirs = mine.detach().clone().requires_grad_()
        expect(layer(mine), right(theirs), f"{case}; the output", 1e-12)
        used(layer, mine).backward()
        used(right, theirs).backward()
        if mine.grad is None:
            raise Wrong(f"case: {case}\nafter backward() x has no gradient")
        expect(mine.grad, theirs.grad, f"{case}; the gradient of x", 1e-12)
        nothing_yet(layer, case)


@part("8.1", "W: the weights' gradients", 40)
def test_weight_gradient(answer, rng):
    for place, (inputs, outputs, shape) in enumerate(layers(rng)):
        case = f"DeferredLinear({inputs}, {outputs}), x of shape {list(shape)}"
        layer, right = pair(answer, inputs, outputs, rng.randint(0, 999))
        x = random(shape, asks=place % 2 == 0)
        if not x.requires_grad:
            case += " (data, for which no gradient is asked)"
        used(layer, x).backward()
        used(right, x).backward()
        layer.backward_weight()
        same(layer, right, case)


@part("8.1", "used twice before W", 30)
def test_twice(answer, rng):
    case = "two micro-batches, both backward passes, then backward_weight()"
    layer, right = pair(answer, 3, 2, rng.randint(0, 999))
    for x in (random((2, 3)), random((4, 3))):
        used(layer, x).backward()
        used(right, x).backward()
    nothing_yet(layer, case)
    layer.backward_weight()
    same(layer, right, case)
    layer.backward_weight()
    same(layer, right, f"{case} twice: the second one has nothing left to do")
    x = random((3, 3))
    used(layer, x).backward()
    used(right, x).backward()
    layer.backward_weight()
    same(layer, right, f"{case}, then a third micro-batch: gradients add up")
    layer, right = pair(answer, 3, 3, rng.randint(0, 999))
    x = random((2, 3))
    used(layer, layer(x).tanh()).backward()
    used(right, right(x).tanh()).backward()
    nothing_yet(layer, "layer(layer(x).tanh())")
    layer.backward_weight()
    same(layer, right, "layer(layer(x).tanh()): used twice in one forward")


# The bounds hold for F = I = W, whatever m: the last rank has 3m units of work from its start at
# p - 1 on; or its last I ends no sooner than (p - 1) + 2m, is handed back for p - 1, then comes W.
def shortest(p, m):
    return max(3 * m + p - 1, 2 * (p - 1) + 2 * m + 1)


def made(answer, right, p, m):
    case = f"ranks={p}, microbatches={m}"
    shown = right(ranks=p, microbatches=m)
    rows = table(answer(p, m), case, shown)
    has_all(rows, p, m, "FIW", case, shown)
    for rank, row in enumerate(rows.rows):
        if any(action.stage != rank for action in row):
            raise wrong_table(f"rank {rank} holds stage {rank}, and no other", case, rows, shown)
    return rows, case, shown


def puts_off(rows, most, case, shown):
    """Wrong where a rank does more than `most` forwards before its first I, as GPipe does, or where
    the last rank puts off no W, as in 1F1B. Whoever keeps `most` micro-batches can't do more: each
    is kept until its W. And in the least makespan the last I of the last rank comes so early that
    two W's at least are left there: its way back to rank 0 takes as long."""
    for rank, row in enumerate(rows.rows):
        begun = "".join(action.kind for action in row).find("I")
        if begun > most:
            raise wrong_table(f"rank {rank} does {begun} forwards before its first I; more than "
                              f"{most} are not needed", case, rows, shown)  # fmt: skip
    left = "".join(action.kind for action in rows.rows[-1]).rpartition("I")[2]
    if rows.ranks > 1 and rows.microbatches > 1 and left.count("W") < 2:
        raise wrong_table("the last rank has only one W left after its last I: none was put off "
                          "to let an I go first", case, rows, shown)  # fmt: skip


H1 = ((1, 1), (1, 3), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 4), (4, 4), (4, 8), (5, 12))


@part("8.2", "right order", 60)
def test_h1_order(answer, right, sizes):
    """Legal, with I and W for each B, not one micro-batch at a time, and W's that wait."""
    for p, m in sizes(*H1):
        rows, case, shown = made(answer, right, p, m)
        not_one_at_a_time(rows, case, shown)
        puts_off(rows, p, case, shown)


@part("8.2", "within memory", 20)
def test_h1_memory(answer, right, sizes):
    """1F1B's largest peak, on each rank: (p - r) + r micro-batches."""
    for p, m in sizes(*H1):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, memory_limit=min(m, p))


@part("8.2", "within bubble", 20)
def test_h1_bubble(answer, right, sizes):
    for p, m in sizes(*H1):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, makespan=shortest(p, m))


H2 = ((1, 1), (1, 3), (2, 1), (2, 3), (2, 4), (3, 1), (3, 5), (3, 7), (4, 7), (4, 8), (5, 12))


@part("8.4", "right order", 60)
def test_h2_order(answer, right, sizes):
    """Legal, with few micro-batches too, and not one micro-batch at a time."""
    for p, m in sizes(*H2):
        rows, case, shown = made(answer, right, p, m)
        not_one_at_a_time(rows, case, shown)
        if m >= 2 * p - 1:
            puts_off(rows, 2 * p - 1, case, shown)
            begun = "".join(action.kind for action in rows.rows[0]).find("I")
            if begun <= p and p > 1:
                raise wrong_table(f"rank 0 does {begun} forwards before its first I, no more than "
                                  "in ZB-H1", case, rows, shown)  # fmt: skip


@part("8.4", "within memory", 20)
def test_h2_memory(answer, right, sizes):
    """(2p - 1 - 2r) + 2r micro-batches on each rank."""
    for p, m in sizes(*H2):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, memory_limit=min(m, 2 * p - 1))


@part("8.4", "within bubble", 20)
def test_h2_bubble(answer, right, sizes):
    """Nothing idle within an own span, and the least makespan."""
    enough = [(p, m) for p, m in H2 if m >= 2 * p - 1]
    for p, m in sizes(*enough, only=lambda p, m: m >= 2 * p - 1):
        rows, case, shown = made(answer, right, p, m)
        within(rows, case, shown, makespan=shortest(p, m))
        t = simulate(rows, Costs())
        for rank in range(p):
            spans = t.spans_of(rank)
            idle = spans[-1].end - spans[0].start - t.busy[rank]
            if idle:
                reason = (f"rank {rank} idles for {idle} of the units from its own start, "
                          f"{spans[0].start}, to its own end, {spans[-1].end}; 0 is possible")
                raise wrong_table(reason, case, rows, shown)


# Lists of (rank, start, end) in whole units, and both bubbles, counted on squared paper.
SPANS = (
    # one rank that never waits
    ([(0, 0, 2)], Fraction(0), Fraction(0)),
    # 1 of its 3 units is idle
    ([(0, 0, 1), (0, 2, 3)], Fraction(1, 3), Fraction(1, 3)),
    # each rank has 2 units, of which it works 1; neither waits within its own span
    ([(0, 0, 1), (1, 1, 2)], Fraction(1, 2), Fraction(0)),
    # 2 · 6 units, 5 of them at work; rank 1 idles for 1 of its 4
    ([(0, 0, 1), (0, 1, 2), (1, 2, 3), (1, 4, 6)], Fraction(7, 12), Fraction(1, 4)),
    # 2 · 7 units, 6 at work; rank 0 idles for 4 of 7, rank 1 for 0 of 3
    ([(1, 3, 5), (0, 6, 7), (0, 0, 2), (1, 2, 3)], Fraction(8, 14), Fraction(4, 7)),
    # 3 · 10 units, 8 at work; rank 0 idles for 7 of 10, rank 1 for 3 of 6, rank 2 for 0 of 2
    ([(0, 10, 12), (1, 12, 14), (2, 14, 15), (2, 15, 16), (1, 17, 18), (0, 19, 20)],
     Fraction(22, 30), Fraction(7, 10)),
    # 3 · 5 units, 11 at work; rank 0 never idles, rank 1 for 2 of 5, rank 2 for 0 of 3
    ([(0, 0, 5), (1, 0, 1), (1, 3, 5), (2, 1, 2), (2, 2, 4)], Fraction(4, 15), Fraction(2, 5)),
)  # fmt: skip
# Rows whose predicted spans are asked for, too; any times of their actions are legal.
TABLES = (
    "0F0 0B0\n1F0 1B0\n2F0 2B0", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n2F0 2F1 2F2 2B0 2B1 2B2",
    "0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1F1 1I0 1I1 1W0 1W1", "0F0 2F0 2B0 0B0\n1F0 1B0",
)  # fmt: skip


def span_lists(rng):
    """(spans, both bubbles): the lists above, the same on another clock, then predicted ones."""
    yield from SPANS
    for unit in (1, Fraction(1, 3), Fraction(1, 7), 5):
        spans, *both = rng.choice(SPANS[1:])
        begin, number = rng.randint(0, 9), rng.randint(1, 5)
        spans = [(rank + number, (begin + start) * unit, (begin + end) * unit)
                 for rank, start, end in spans]  # fmt: skip
        yield rng.sample(spans, len(spans)), *both
    for text in TABLES:
        times = [Fraction(rng.randint(1, 9), rng.choice((1, 2, 3))) for _ in range(4)]
        t = simulate(Schedule.parse(text), Costs(*times[:3], latency=times[3]))
        spans = [(rank, span.start, span.end) for rank in range(t.schedule.ranks)
                 for span in t.spans_of(rank)]  # fmt: skip
        yield rng.sample(spans, len(spans)), t.bubble.idle_over_total, t.bubble.own_span


def check_bubble(answer, rng, place, name):
    for spans, *both in span_lists(rng):
        shown = ", ".join(f"({rank}, {start}, {end})" for rank, start, end in spans)
        case = f"spans = [{shown}]"
        got = answer(list(spans))
        if not isinstance(got, (tuple, list)) or len(got) != 2:
            asked = "two numbers are asked for, (idle of the makespan, idle of the own span)"
            raise Wrong(f"case: {case}\n{asked}; yours is {kind(got)}, {str(got)[:100]}")
        value, right = got[place], both[place]
        expect(value, right, f"{case}; {name}")
        if not isinstance(value, (int, Fraction)):
            raise Wrong(f"case: {case}\n{name} has to be exact, Fraction({right}); yours is "
                        f"{kind(value)}, {value}")  # fmt: skip


@part("8.3", "of the makespan", 50)
def test_of_makespan(answer, rng):
    check_bubble(answer, rng, 0, "idle of the makespan")


@part("8.3", "of the own span", 50)
def test_of_own_span(answer, rng):
    check_bubble(answer, rng, 1, "idle of the own span")
