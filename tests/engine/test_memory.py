"""Bytes that autograd keeps, exact: in the ratio of the counts, 0 after a step (trap kind 12)."""

import weakref

import pytest
import torch
from ranks import batch, keeps_nothing, linears, on_ranks, schedule
from torch import nn

import minipipe as mp
from minipipe.engine.stage import Stage
from minipipe.memory import Meter
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)
WIDTH, ROWS, ITEM = 8, 3, 8  # of a micro-batch; bytes of a float64
KEPT = ROWS * WIDTH * ITEM  # what a linear layer without bias keeps of a micro-batch: its input


def peaks(rank, tables, make=linears, width=WIDTH, rows=ROWS):
    """Peak bytes of two steps with each table, and the level after them."""
    found = []
    for table in tables:
        pipe = Pipeline(make(table.stages), table, keeps_nothing)
        x = batch(rows * table.microbatches, width)
        one, two = (pipe.step(x, x) for _ in range(2))
        assert one.peak_activation_bytes == two.peak_activation_bytes
        found.append((two.peak_activation_bytes, left(two, rank)))
    return found


def left(step, rank) -> int:
    """What the rank still keeps after its last action."""
    return step.timeline.levels[rank][-1][1]


def test_gpipe_to_1f1b_is_eight_to_four_to_one():
    tables = [schedule("gpipe", 4, 8), schedule("1f1b", 4, 8)]
    found = on_ranks(peaks, tables, ranks=4)
    assert [rank[0][0] for rank in found] == [8 * KEPT] * 4
    assert [rank[1][0] for rank in found] == [4 * KEPT, 3 * KEPT, 2 * KEPT, KEPT]
    assert all(level == 0 for rank in found for _, level in rank)


def test_no_growth_with_the_microbatches():
    """Trap 84, 100: activations are kept for the entire step."""
    sizes = (1, 2, 3, 4, 8, 16)
    found = on_ranks(peaks, [schedule("1f1b", 4, m) for m in sizes], ranks=4)
    for rank, counts in enumerate(found):
        assert [peak // KEPT for peak, _ in counts] == [min(m, 4 - rank) for m in sizes]


def test_interleaved_and_naive_counts():
    tables = [schedule("interleaved", 4, 8, chunks=2), schedule("naive", 4, 3),
              schedule("breadth-first", 4, 2, chunks=3)]  # fmt: skip
    found = on_ranks(peaks, tables, ranks=4)
    assert [rank[0][0] // KEPT for rank in found] == [11, 9, 7, 5]
    assert [rank[1][0] // KEPT for rank in found] == [1] * 4
    assert [rank[2][0] // KEPT for rank in found] == [6] * 4


class Token:
    pass


class Keeps(torch.autograd.Function):
    """An operation whose graph node lives as long as its micro-batch."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.alive, self.most = weakref.WeakSet(), 0

    def forward(self, x):
        token = Token()
        if torch.is_grad_enabled():
            self.alive.add(token)
        outputs = Keeps.apply(x * self.weight, token)
        del token
        self.most = max(self.most, len(self.alive))
        return outputs


def graphs(rank, tables, meter):
    found = []
    for table in tables:
        model = [Counted() for _ in range(4)]
        pipe = Pipeline(model, table, keeps_nothing, memory_meter=meter)
        step = pipe.step(batch(32), batch(32))
        found.append((model[rank].most, len(model[rank].alive)))
        del step
    return found


@pytest.mark.parametrize("meter", [True, False])
def test_live_graphs(meter):
    """Trap 100: counted by weak references, not by the meter: 4, 3, 2, 1 for 16 micro-batches."""
    tables = [schedule("1f1b", 4, 16), schedule("gpipe", 4, 5), schedule("1f1b+recompute", 4, 8)]
    found = on_ranks(graphs, tables, meter, ranks=4)
    assert found == [[(4 - rank, 0), (5, 0), (1, 0)] for rank in range(4)]


class Caches(nn.Linear):
    """A stage that holds on to its outputs, as a student's does."""

    def forward(self, x):
        self.outputs = [*getattr(self, "outputs", []), super().forward(x)]
        return self.outputs[-1]


def caching(stages):
    return [Caches(WIDTH, WIDTH, bias=False).double() for _ in range(stages)]


def test_a_stage_that_caches_its_outputs():
    """Trap kind 12: what the user keeps is his; the values saved for a backward pass still go."""
    found = on_ranks(peaks, [schedule("1f1b", 4, 8)], caching, ranks=4)
    assert found == [[((4 - rank) * KEPT, 0)] for rank in range(4)]


class Returned(nn.Module):
    """Saves its own output."""

    def forward(self, x):
        return x.exp()


def test_saved_outputs_are_no_cycle():
    """An output that its own operation saved is freed without a garbage collection."""
    make = lambda stages: [Returned() for _ in range(stages)]  # noqa: E731
    def fn(rank):
        import gc

        gc.disable()
        model = [nn.Sequential(nn.Linear(WIDTH, WIDTH, False).double(), *make(2)) for _ in "ab"]
        pipe = Pipeline(model, schedule("1f1b", 2, 4), keeps_nothing)
        step = pipe.step(batch(8, WIDTH), batch(8, WIDTH))
        return step.peak_activation_bytes, left(step, rank)

    two = 2 * WIDTH * ITEM
    assert on_ranks(fn, ranks=2) == [(2 * 3 * two, 0), (3 * two, 0)]


def test_meter_off():
    def fn(rank):
        pipe = Pipeline(linears(2), schedule("1f1b", 2, 2), keeps_nothing, memory_meter=False)
        return pipe.step(batch(4, 8), batch(4, 8)).peak_activation_bytes

    assert on_ranks(fn, ranks=2) == [0, 0]


# The prediction.

WIDTHS = [5, 16, 3, 12, 7, 9, 20, 2, 4]


def uneven(stages):
    """Stages that keep different sums: a linear layer its input, tanh its output."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, b), nn.Sigmoid()).double()
            for a, b in zip(WIDTHS[:stages], WIDTHS[1:], strict=False)]  # fmt: skip


def probe(stages, rows):
    """Bytes of each stage's input and of what its forward keeps, of one micro-batch alone."""
    inputs, kept, value = [], [], batch(rows, WIDTHS[0])
    for number, module in enumerate(uneven(stages)):
        meter = Meter(module.parameters())
        finish = None if number < stages - 1 else lambda outputs: outputs.sum()
        inputs.append(value.nbytes)
        outputs = Stage(nn.Sequential(module), number, meter)
        result = outputs.forward(0, (value,), True, (number > 0,), finish)
        kept.append(meter.level)
        value = result.detach()
    return inputs, kept


@pytest.mark.parametrize("ranks", [2, 4])
def test_predicted_peaks_are_the_measured_ones(ranks):
    """For uneven stages too, from the bytes of a probe."""
    names = ["naive", "gpipe", "1f1b", "gpipe+recompute", "1f1b+recompute", "interleaved",
             "breadth-first"]  # fmt: skip
    tables = [schedule(name, ranks, m) for name in names for m in (1, 3, 6)]
    found = on_ranks(peaks, tables, uneven, WIDTHS[0], ranks=ranks)
    for number, table in enumerate(tables):
        inputs, kept = probe(table.stages, ROWS)
        costs = mp.Costs(input_size=inputs, forward_size=kept)
        predicted = mp.simulate(table, costs).peak_activations
        assert [rank[number][0] for rank in found] == list(predicted), table.name


def test_every_rank_has_the_levels_of_all():
    def fn(rank):
        pipe = Pipeline(linears(4), schedule("1f1b", 4, 8), keeps_nothing)
        step = pipe.step(batch(24, 8), batch(24, 8))
        line = step.timeline
        assert line.memory_unit == "bytes"
        return [tuple(line.peak_activations), [levels[-1][1] for levels in line.levels]]

    assert on_ranks(fn, ranks=4) == [[(4 * KEPT, 3 * KEPT, 2 * KEPT, KEPT), [0] * 4]] * 4
