"""Order and identity of messages: nothing crossed, lost, or left over (traps kinds 2, 5, 6)."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import (
    batch,
    compare,
    error,
    gradients,
    keeps_nothing,
    mean_mse,
    mlp,
    on_ranks,
    one_process,
    schedule,
)
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


class _Marks(torch.autograd.Function):
    """Checks that the number of the micro-batch comes forward, and its negative comes back."""

    @staticmethod
    def forward(ctx, x, weight, seen):
        ctx.number, ctx.seen = float(x[0, 0]), seen
        seen.append(("F", ctx.number, bool((x == ctx.number).all())))
        return x + 0 * weight

    @staticmethod
    def backward(ctx, gradient):
        same = bool((gradient == -ctx.number).all())
        ctx.seen.append(("B", float(gradient[0, 0]), same))
        return gradient, gradient.sum() * 0, None


class Marks(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen = []

    def forward(self, x):
        return _Marks.apply(x, self.weight, self.seen)


class _Minus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.saved_tensors[0]


def marked(rank, tables, costs=None, width=3):
    """What each stage of this rank received, in order; the loss sends back minus the number."""
    pace = mp.Pace(costs) if costs else None
    found = []
    for rows in tables:
        model = [Marks() for _ in range(rows.stages)]
        pipe = Pipeline(model, rows, lambda outputs, _: _Minus.apply(outputs), "sum")
        x = torch.arange(1, rows.microbatches + 1).double()[:, None].repeat(1, width)
        pipe.step(x, x, pace=pace)
        pipe.step(x, x, pace=pace)
        found.append([model[s].seen for s in rows.stages_of(rank)])
    return found


CROSSING = [("interleaved", 2, m, {"chunks": v}) for m in (2, 3, 4, 5, 7) for v in (2, 3)] + [
    ("breadth-first", 2, 4, {"chunks": 2}), ("1f1b", 2, 5, {}), ("gpipe", 2, 4, {})]  # fmt: skip
# Stages in a V: the last rank hands over to itself, and its neighbour is neighbour twice.
V_SHAPE = mp.Schedule.parse("""
    0F0 0F1 3F0 0F2 3B0 0B0 3F1 3B1 0B1 3F2 3B2 0B2
    1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2
""")
ORDER = mp.Schedule.parse("0F2 0F0 0F1 0B1 0B2 0B0\n1F2 1F0 1B0 1F1 1B1 1B2")


def check_marks(tables, ranks, costs=None):
    for rank, found in enumerate(on_ranks(marked, tables, costs, ranks=ranks)):
        for rows, stages in zip(tables, found, strict=True):
            for number, seen in zip(rows.stages_of(rank), stages, strict=True):
                wanted = [(a.kind, a.microbatch + 1) for a in rows.rows[rank] if a.stage == number]
                wanted = [(k, float(m if k == "F" else -m), True) for k, m in wanted] * 2
                assert seen == wanted, f"{rows!r}, stage {number}"


def test_nothing_crosses_between_two_ranks():
    """Traps 8, 9: the rank before and the rank behind are the same; activations and gradients of
    two chunks are swapped without any error."""
    check_marks([*(schedule(n, p, m, **more) for n, p, m, more in CROSSING), V_SHAPE, ORDER], 2)


def test_nothing_crosses_between_three_ranks():
    check_marks([schedule("interleaved", 3, m, chunks=v) for m in (1, 3, 4, 7) for v in (1, 2, 3)],
                3)  # fmt: skip


def test_nothing_crosses_on_slow_links():
    """Trap 35: sends that leave late, from a thread of their own."""
    costs = mp.Costs(0.001, 0.001, 0, latency={(0, 1): 0.01, (1, 0): 0.001}, bandwidth=1e5)
    check_marks([schedule("interleaved", 2, 3, chunks=2), V_SHAPE, ORDER], 2, costs)


class Large(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 1.0 + seed))

    def forward(self, x):
        return x * self.weight


def large(rank, rows):
    """32 MB a message."""
    model = [Large(s) for s in range(rows.stages)]
    pipe = Pipeline(model, rows, lambda o, t: o[:, 0].sum(), "sum", memory_meter=False)
    x = torch.ones(rows.microbatches, 8 << 20)
    step = pipe.step(x, x)
    return step.loss, [float(p.grad) for p in pipe.parameters()], step.bytes_sent


@pytest.mark.parametrize("rows", [schedule("interleaved", 2, 2, chunks=2), V_SHAPE],
                         ids=["interleaved", "V"])  # fmt: skip
def test_large_messages_between_two_ranks(rows):
    """Trap 3: both ranks sit in a send. 32 MB, which no socket buffers."""
    product, m = 1.0 * 2 * 3 * 4, rows.microbatches
    for rank, (loss, grads, sent) in enumerate(on_ranks(large, rows, ranks=2)):
        assert loss == product * m
        assert grads == [product / (1 + s) * m for s in rows.stages_of(rank)]
        assert sent % (32 << 20) == 0 and sent > 0


def uneven_ranks(rank, rows):
    """Ranks that start late and stop now and then."""
    class Naps(nn.Linear):
        def forward(self, x):
            time.sleep(0.02 * ((rank + len(x)) % 3))
            return super().forward(x)

    time.sleep(1.0 * (rank == 1))
    torch.manual_seed(0)
    model = [Naps(6, 6).double() for _ in range(rows.stages)]
    pipe = Pipeline(model, rows, mean_mse)
    time.sleep(0.5 * (rank == 0))
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(batch(11), batch(11, seed=2))
    return gradients(pipe)


def test_ranks_that_come_late():
    """Traps 6, 23: uneven arrival at the first use of a connection."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6).double() for _ in range(6)))
    _, wanted = one_process(model, batch(11), batch(11, seed=2))
    for found in on_ranks(uneven_ranks, schedule("interleaved", 3, 5, chunks=2), ranks=3):
        assert error(found, wanted) < 1e-10


def several(rank):
    """Pipelines one after the other and side by side, with other sizes, in the same processes."""
    found, wanted = [], []
    rows = [schedule("gpipe", 2, 3), schedule("1f1b", 2, 5), schedule("breadth-first", 2, 4)]
    pipes = [Pipeline(mlp(8), table, mean_mse) for table in rows]
    for seed, place in enumerate([0, 1, 0, 2, 1, 2, 0]):
        x = batch(11, seed=seed)
        pipes[place].zero_grad()
        pipes[place].step(x, x)
        found.append(gradients(pipes[place]))
        wanted.append(one_process(mlp(8), x, x)[1])
    del pipes
    pipe = Pipeline(mlp(8), schedule("1f1b", 2, 1), mean_mse)
    pipe.step(batch(5), batch(5))
    found.append(gradients(pipe))
    wanted.append(one_process(mlp(8), batch(5), batch(5))[1])
    return max(map(error, found, wanted))


def test_several_pipelines_in_one_process():
    """Trap 21: a hang, or a message left over from the first is read by the second."""
    assert max(on_ranks(several, ranks=2)) < 1e-10


def bytes_and_messages(rank, rows):
    pipe = Pipeline(mlp(8), rows, keeps_nothing)
    step = pipe.step(batch(2 * rows.microbatches), batch(2 * rows.microbatches))
    return step.timeline.bytes_sent, step.timeline.messages, step.bytes_sent


@pytest.mark.parametrize("row", [("gpipe", 4, 3, {}), ("interleaved", 2, 4, {"chunks": 2})])
def test_bytes_are_those_that_are_predicted(row):
    rows = schedule(*row[:3], **row[3])
    predicted = mp.simulate(rows, mp.Costs(message_size=2 * 6 * 8))
    for rank, (sent, messages, own) in enumerate(on_ranks(bytes_and_messages, rows, ranks=row[1])):
        assert sent == predicted.bytes_sent and messages == predicted.messages
        assert own == sent[rank]


# Any legal table.


@st.composite
def tables(draw, ranks=3):
    """A random legal table: stages on random ranks, actions in a random order that respects what
    each waits for, some of them recomputed."""
    stages, count = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    holder = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    again = {(s, m) for s in range(stages) for m in range(count) if draw(st.integers(0, 3)) == 0}
    needs = {}
    for s in range(stages):
        for m in range(count):
            needs["F", s, m] = {("F", s - 1, m)} if s else set()
            needs["B", s, m] = {("F", s, m)} | ({("B", s + 1, m)} if s + 1 < stages else set())
            if (s, m) in again:
                needs["R", s, m] = {("F", s, m)}
                needs["B", s, m].add(("R", s, m))
    rows, done = [[] for _ in range(ranks)], set()
    while len(done) < len(needs):
        ready = sorted(a for a, before in needs.items() if a not in done and before <= done)
        kind, s, m = action = draw(st.sampled_from(ready))
        rows[holder[s]].append(f"{s}{kind}{m}")
        done.add(action)
    return mp.Schedule.parse("\n".join(" ".join(row) or "-" for row in rows))


@given(st.lists(tables(), min_size=4, max_size=4))
@settings(max_examples=8)
def test_any_legal_table_gives_the_right_gradients(found):
    """The engine knows no schedule: V shapes, loops, and orders that nobody would choose."""
    for table in found:
        mp.check(table)
    wrong = on_ranks(each, found, ranks=3)
    assert max(map(max, wrong)) < 1e-10


def each(rank, found):
    return [compare(rank, lambda: mlp(7), rows, batch(7), batch(7, seed=2)) for rows in found]
