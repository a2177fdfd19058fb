"""Tasks of lesson 5: what is kept, and what is computed again."""

import copy
import gc
import math
import weakref

import torch
from torch import nn

import minipipe as mp
from minipipe.teach.testing import Wrong, expect, kind, part, table, within, wrong_table

# 5.1


def kept(answer, forward, expected, case, parameters=()):
    """The answer's count for forward(), which has to be called once."""
    calls = []

    def once():
        calls.append(1)
        return forward()

    got = answer(once, parameters)
    expect(got, expected, case)
    if len(calls) != 1:
        raise Wrong(f"case: {case}\nforward() is to be called once, yours called it {len(calls)} "
                    "times")  # fmt: skip


def leaf(*shape, dtype=torch.float32):
    return torch.rand(*shape, dtype=dtype, requires_grad=True)


@part("5.1", "bytes of what is kept", 50)
def test_bytes(answer, sizes):
    """Tanh and sigmoid keep their outputs, a sum keeps nothing."""
    for rows, width in sizes((1, 1), (2, 3), (5, 7)):
        for name, bytes_each in (("float32", 4), ("float64", 8)):
            x = leaf(rows, width, dtype=getattr(torch, name))
            size, what = rows * width * bytes_each, f"x [{rows}, {width}] of {name}"
            kept(answer, lambda x=x: torch.tanh(x), size, f"tanh(x), {what}")
            kept(answer, lambda x=x: torch.sigmoid(torch.tanh(x) + 1), 2 * size,
                 f"sigmoid(tanh(x) + 1), {what}")  # fmt: skip
            kept(answer, lambda x=x: x + 1, 0, f"x + 1, {what}")
    with torch.no_grad():
        kept(answer, lambda: torch.tanh(leaf(2, 3)), 0, "tanh(x) under no_grad")


@part("5.1", "each storage once", 25)
def test_storages(answer, sizes):
    for rows, width in sizes((1, 2), (2, 3), (4, 9)):
        x, what = leaf(rows, width), f"x [{rows}, {width}] of float32"
        size = 4 * rows * width
        kept(answer, lambda x=x: x * x, size, f"x * x, {what}")
        kept(answer, lambda x=x: x @ x.t(), size, f"x @ x.t(), {what}")
        kept(answer, lambda x=x: torch.relu(torch.tanh(x)).sum(), 2 * size,
             f"relu(tanh(x)), {what}")  # fmt: skip
        kept(answer, lambda x=x: x[:, :1] * x[:, 1:], size,
             f"x[:, :1] * x[:, 1:], two parts of the storage of {what}")  # fmt: skip


@part("5.1", "no parameters", 25)
def test_parameters(answer, sizes):
    """A chain: Linear keeps its input, ReLU and Tanh their outputs; weights are parameters."""
    for rows, ins, middle, outs in sizes((1, 1, 1, 1), (4, 6, 5, 3), (8, 9, 16, 7)):
        first, second = nn.Linear(ins, middle), nn.Linear(middle, outs)
        x, sizes_text = torch.rand(rows, ins), f"{ins} → {middle} → {outs}, {rows} rows"
        for name, model, numbers in (
            ("Linear", nn.Sequential(first), ins),
            ("Linear, ReLU, Linear", nn.Sequential(first, nn.ReLU(), second), ins + middle),
            ("Linear, ReLU, Linear, Tanh", nn.Sequential(first, nn.ReLU(), second, nn.Tanh()),
             ins + middle + outs),
        ):  # fmt: skip
            kept(answer, lambda model=model, x=x: model(x), 4 * rows * numbers,
                 f"{name}, {sizes_text}", model.parameters())  # fmt: skip
        ones = torch.ones(middle, ins)
        kept(answer, lambda model=model, x=x, ones=ones: model(model[0](x) @ ones),
             4 * rows * (2 * ins + middle + outs) + 4 * middle * ins,
             f"Linear, times a matrix of ones that is no parameter, then all four, {sizes_text}",
             model.parameters())  # fmt: skip


# 5.2


def stage(answer, layers):
    made = answer(layers)
    for method in ("forward", "backward"):
        if not callable(getattr(made, method, None)):
            raise Wrong(f"Recomputing(layers).{method} is asked for; yours gives "
                        f"{kind(made)} without it")  # fmt: skip
    return made


def compare(answer, layers, inputs, order, case, random=False):
    """The answer's stage beside autograd, which keeps everything; `order`: of the backwards."""
    plain = copy.deepcopy(layers)
    weights = [torch.rand_like(plain(x)) for x in inputs]
    before = [x.clone() for x in inputs]
    torch.manual_seed(1)
    leaves = [x.clone().requires_grad_() for x in before]
    outputs = [plain(x) for x in leaves]
    following = torch.rand(3)
    for m in order:
        outputs[m].backward(weights[m])
    torch.manual_seed(1)
    mine = stage(answer, layers)
    given = [mine.forward(m, x) for m, x in enumerate(inputs)]
    for m in range(len(inputs)):
        expect(given[m], outputs[m], f"{case}: forward of micro-batch {m}", 1e-5)
    if random:
        state = torch.get_rng_state()
        expect(torch.rand(3), following, f"{case}: three random numbers after all forwards")
        torch.set_rng_state(state)
    for m in order:
        expect(mine.backward(m, weights[m]), leaves[m].grad,
               f"{case}: gradient of the input of micro-batch {m}", 1e-5)  # fmt: skip
    pairs = zip(layers.named_parameters(), plain.parameters(), strict=True)
    for (name, own), right in pairs:
        expect(own.grad, right.grad, f"{case}: .grad of {name} after backwards of all", 1e-5)
    for m, x in enumerate(inputs):
        expect(x, before[m], f"{case}: the input of micro-batch {m} afterwards")
        if x.requires_grad or x.grad is not None:
            raise Wrong(f"case: {case}\nthe x that was given to forward is not to be changed: "
                        "afterwards it has requires_grad or a .grad. x.detach() gives a tensor of "
                        "your own")  # fmt: skip
    if random:
        expect(torch.rand(3), following, f"{case}: three random numbers after all backwards (they "
               "have to go on as if nothing had been computed again)")  # fmt: skip


def net(ins, outs, *more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(ins, 6), nn.Tanh(), *more, nn.Linear(6, outs))


@part("5.2", "equal gradients", 50)
def test_gradients(answer, sizes):
    for count, rows, ins, outs in sizes((1, 1, 1, 1), (1, 2, 3, 2), (3, 4, 5, 3)):
        layers, case = net(ins, outs), f"micro-batches: {count}, rows: {rows}, {ins} → 6 → {outs}"
        inputs = [torch.rand(rows, ins) for _ in range(count)]
        compare(answer, layers, inputs, range(count), f"{case}, first in, first out")
        compare(answer, net(ins, outs), inputs, range(count)[::-1], f"{case}, last in, first out")
    x = torch.rand(2, 3)
    compare(answer, net(3, 2), [x, x], (0, 1), "the same x for two micro-batches")


@part("5.2", "the same random numbers", 30)
def test_random(answer, sizes):
    for count, rows in sizes((1, 3), (2, 4), (4, 6)):
        inputs = [torch.rand(rows, 5) for _ in range(count)]
        case = f"with dropout, micro-batches: {count}, rows: {rows}"
        for order in (range(count), range(count)[::-1]):
            compare(answer, net(5, 3, nn.Dropout(0.5)), inputs, order, case, True)


class Spy(nn.Module):
    """Remembers what went through it, without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.seen, self.graphs = [], []

    def forward(self, x):
        y = x * 2
        self.seen.append(weakref.ref(y))
        self.graphs.append(y.requires_grad)
        return y


@part("5.2", "little is kept", 20)
def test_little(answer):
    spy = Spy()
    mine = stage(answer, net(4, 2, spy))
    outputs = mine.forward(0, torch.rand(3, 4))
    expect(outputs, torch.zeros(3, 2), "shape of the output of forward", math.inf)
    if outputs.requires_grad:
        raise Wrong("the output of forward still has a graph (requires_grad is True): what the "
                    "layers saved stays in memory")  # fmt: skip
    if spy.graphs != [False] or spy.seen[0]() is not None:
        raise Wrong("after forward the output of a layer in the middle is still kept, or a graph "
                    "of it was made: only the input is to be kept")  # fmt: skip
    mine.backward(0, torch.ones(3, 2))
    expect(spy.graphs, [False, True], "a layer in the middle sees tensors without a graph in "
           "forward, and once again with a graph in backward")  # fmt: skip
    mine = stage(answer, net(13, 11))
    mine.forward(0, torch.rand(17, 13))
    if left((17, 11)):
        raise Wrong("after forward the stage still keeps its output: only the input and the state "
                    "of the random numbers are to be kept")  # fmt: skip
    mine.backward(0, torch.ones(17, 11))
    if left((17, 13)):
        raise Wrong("after backward the stage still keeps the micro-batch's input, which nobody "
                    "needs any more")  # fmt: skip


def left(shape):
    """Whether a tensor of this shape is still alive somewhere."""
    gc.collect()
    return any(type(each) is torch.Tensor and each.shape == shape for each in gc.get_objects())


# 5.3


def row_of(text):
    return text.split()


@part("5.3", "without R", 50)
def test_levels(answer, rng, sizes):
    for text, levels in (
        ("0F0 0B0", [1, 0]),
        ("0F0 0F1 0B0 0B1", [1, 2, 1, 0]),
        ("2F0 2F1 2B1 2F2 2B0 2B2", [1, 2, 1, 2, 1, 0]),
    ):
        expect(answer(row_of(text)), levels, f'row "{text}"')
    for (m,) in sizes((5,), (12,)):
        row = shuffled(rng, m, 0)
        expect(answer(list(row)), simulated(row, 0), f'row "{" ".join(row)}"')


@part("5.3", "with R", 50)
def test_levels_again(answer, rng, sizes):
    for text, size, levels in (
        ("0F0 0R0 0B0", 0, [0, 1, 0]),
        ("0F0 0R0 0B0", 0.25, [0.25, 1, 0]),
        ("0F0 0F1 0R0 0B0 0R1 0B1", 0.25, [0.25, 0.5, 1.25, 0.25, 1, 0]),
        ("0F0 0F1 0F2 0B0 0R1 0B1 0B2", 0.5, [1, 1.5, 2.5, 1.5, 2, 1, 0]),
    ):
        expect(answer(row_of(text), size), levels, f'row "{text}", input_size={size}')
    for m, parts in sizes((4, 2), (9, 8)):
        row = shuffled(rng, m, m // 2)
        expect(answer(list(row), 1 / parts), simulated(row, 1 / parts),
               f'row "{" ".join(row)}", input_size={1 / parts}')  # fmt: skip


def shuffled(rng, m, again):
    """A legal row of one rank in a random order, some micro-batches with an R."""
    kinds = {i: "FRB" if i in rng.sample(range(m), again) else "FB" for i in range(m)}
    row, done = [], dict.fromkeys(kinds, 0)
    while left := [i for i in kinds if done[i] < len(kinds[i])]:
        i = rng.choice(left)
        row.append(f"0{kinds[i][done[i]]}{i}")
        done[i] += 1
    return row


def simulated(row, input_size):
    t = mp.simulate(mp.Schedule([row]), mp.Costs(input_size=input_size))
    return [after for _, after in t.levels[0]]


# 5.4

# ranks, micro-batches, inputs that are as large as what a micro-batch keeps, limit; how many R's.
# The third: two micro-batches computed again leave 1 and 2 inputs of 1/4, that is 1 1/2; one would
# leave 2 1/4.
MEMORY = {(1, 1, 2, 1): 0, (1, 2, 2, 2): 0, (1, 3, 4, 2): 2, (2, 4, 4, 3): 2, (3, 5, 8, 2): 4,
          (4, 8, 8, 5): 4, (2, 3, 2, 9): 0}  # fmt: skip


def possible(p, m, parts, limit):
    return parts in (2, 4, 8) and 1 + (m - 1) / parts <= limit


def made(answer, right, p, m, parts, limit):
    size = 1 / parts
    case = f"ranks={p}, microbatches={m}, input_size={size}, limit={limit}"
    shown = right(ranks=p, microbatches=m, input_size=size, limit=limit)
    return table(answer(p, m, size, limit), case, shown), case, shown, mp.Costs(input_size=size)


@part("5.4", "right order", 40)
def test_order(answer, right, sizes):
    """Legal, every F and B once, all forwards first."""
    for p, m, parts, limit in sizes(*MEMORY, only=possible):
        rows, case, shown, _ = made(answer, right, p, m, parts, limit)
        if rows.ranks != p:
            raise wrong_table(f"{p} rows are asked for, one a rank; yours has {rows.ranks}", case,
                              rows, shown)  # fmt: skip
        for rank, row in enumerate(rows.rows):
            mine = sorted(str(a) for a in row if a.kind != "R")
            asked = sorted(f"{rank}{kind}{i}" for kind in "FB" for i in range(m))
            for what, names in (("missing", [a for a in asked if a not in mine]),
                                ("not asked for", [a for a in mine if a not in asked])):
                if names:
                    raise wrong_table(f"row {rank}, {what}: {', '.join(names[:8])}", case, rows,
                                      shown)  # fmt: skip
            if "F" in "".join(a.kind for a in row[m:]):
                raise wrong_table(f"row {rank}: a forward comes after a B or R; in GPipe all "
                                  "forwards come first", case, rows, shown)  # fmt: skip


@part("5.4", "within memory", 40)
def test_memory(answer, right, sizes):
    for p, m, parts, limit in sizes(*MEMORY, only=possible):
        rows, case, shown, costs = made(answer, right, p, m, parts, limit)
        within(rows, case, shown, memory_limit=limit, costs=costs)


@part("5.4", "few recomputes", 20)
def test_few(answer, right, sizes):
    """As few as by hand; in other cases, one fewer would keep too much after the last forward."""
    for p, m, parts, limit in sizes(*MEMORY, only=possible):
        rows, case, shown, costs = made(answer, right, p, m, parts, limit)
        within(rows, case, shown, memory_limit=limit, costs=costs)
        levels = mp.simulate(rows, costs).levels
        for rank, row in enumerate(rows.rows):
            kinds = "".join(a.kind for a in row)
            count, fewest = kinds.count("R"), MEMORY.get((p, m, parts, limit))
            if fewest is not None and count > fewest:
                raise wrong_table(f"rank {rank} computes {count} micro-batches again; {fewest} "
                                  "suffice", case, rows, shown)  # fmt: skip
            kept = [*levels[rank]][kinds.rindex("F")][1]
            more = kept + costs.forward_size - costs.input_size
            if count and more <= limit:
                raise wrong_table(f"rank {rank} computes {count} micro-batches again and keeps "
                                  f"{float(kept):.4g} after its last forward; with one R less it "
                                  f"would be {float(more):.4g}, which is within the limit", case,
                                  rows, shown)  # fmt: skip
