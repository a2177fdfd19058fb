"""evaluate: before, between and after steps, any number of rows, nothing left changed (kind 14)."""

import copy

import pytest
import torch
from ranks import batch, gradients, mean_mse, mlp, on_ranks, schedule, sum_mse
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)
TABLES = [("gpipe", {}), ("1f1b+recompute", {}), ("interleaved", {"chunks": 2})]


def model(width=6):
    torch.manual_seed(0)
    block = lambda: [nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.5)]  # noqa: E731
    return nn.Sequential(*block(), *block(), *block(), *block()).double()


def between(rank, rows):
    """evaluate, train, evaluate, …; and the same training without it."""
    torch.manual_seed(rank)
    start = model()
    one, other = (Pipeline(copy.deepcopy(start), rows, mean_mse) for _ in "ab")
    losses, numbers = [], torch.get_rng_state()
    for step, size in enumerate((1, 3, 7, 30)):
        one.evaluate(batch(size), batch(size))
        losses.append(one.step(batch(9, seed=step), batch(9)).loss)
    torch.set_rng_state(numbers)
    wanted = [other.step(batch(9, seed=step), batch(9)).loss for step in range(4)]
    values = [[*p.state_dict().values(), *gradients(p).values()] for p in (one, other)]
    return losses == wanted and all(map(torch.equal, *values))


@pytest.mark.parametrize("name, more", TABLES)
def test_training_is_as_without_evaluation(name, more):
    """Trap 123: eval before the first train step breaks the train step; other micro-batches."""
    assert on_ranks(between, schedule(name, 3, 4, **more), ranks=3) == [True] * 3


def outputs(rank, rows, sizes):
    start = model()
    pipe = Pipeline(copy.deepcopy(start), rows, mean_mse)
    start.eval()
    wrong = []
    for size in sizes:
        x, y = batch(size, seed=size), batch(size, seed=size + 1)
        found = pipe.evaluate(x if rank == 0 else None, y if rank == rows.ranks - 1 else None)
        with torch.no_grad():
            wanted = start(x)
        if not torch.allclose(found.outputs, wanted, rtol=1e-12, atol=1e-12):
            wrong.append(f"{size} rows: outputs")
        if abs(found.loss - mean_mse(wanted, y).item()) > 1e-12:
            wrong.append(f"{size} rows: loss {found.loss}")
        if pipe.evaluate(x).loss is not None:
            wrong.append(f"{size} rows: a loss without targets")
        if found.outputs.requires_grad:
            wrong.append("a graph")
    return wrong


@pytest.mark.parametrize("name, more", [
    *TABLES, ("breadth-first", {"chunks": 2}), ("naive", {}),
    ("inference", {}), ("inference", {"chunks": 2}),
])  # fmt: skip
def test_outputs_in_row_order_on_every_rank(name, more):
    """Traps 39, 125: every sample of an incomplete last batch, the mean over all rows."""
    assert on_ranks(outputs, schedule(name, 3, 4, **more), [1, 2, 3, 4, 5, 10, 23], ranks=3) \
        == [[]] * 3  # fmt: skip


def untouched(rank):
    """Modes (some layers on purpose not in training), gradients, statistics."""
    start = model()
    start[1].eval()
    start[5].eval()
    pipe = Pipeline(start, schedule("1f1b", 2, 2), mean_mse)
    pipe.step(batch(6), batch(6))
    modes = [m.training for m in start.modules()][1:]
    state = copy.deepcopy(pipe.state_dict())
    grads = gradients(pipe)
    pipe.evaluate(batch(5), batch(5))
    return (modes == [m.training for m in start.modules()][1:] and not start[1].training
            and all(torch.equal(state[k], v) for k, v in pipe.state_dict().items())
            and all(torch.equal(grads[k], v) for k, v in gradients(pipe).items()))  # fmt: skip


def test_modes_statistics_and_gradients_stay():
    assert on_ranks(untouched, ranks=2) == [True, True]


def summed(rank):
    pipe = Pipeline(mlp(4), schedule("1f1b", 2, 3), sum_mse, "sum")
    x, y = batch(7), batch(7, seed=2)
    return pipe.evaluate(x, y).loss, pipe.step(x, y).loss


def test_a_sum_is_a_sum():
    for evaluated, trained in on_ranks(summed, ranks=2):
        assert evaluated == pytest.approx(trained, rel=1e-12)


class Several(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def tuples(rank, make):
    pipe = Pipeline([nn.Tanh(), Several(make)], schedule("gpipe", 2, 2), mean_mse)
    return pipe.evaluate(batch(5)).outputs


def test_outputs_that_are_tuples():
    one, two = on_ranks(tuples, lambda x: (x, (x * 2)[:, :2], None, 3), ranks=2)
    assert torch.equal(one[0], batch(5).tanh()) and torch.equal(two[1], one[0][:, :2] * 2)
    assert one[2] is None and one[3] == [3, 3]


def test_outputs_that_are_dicts():
    """Nothing to join by rows: the micro-batches' values as they are, and no endless recursion."""
    one, two = on_ranks(tuples, lambda x: {"x": x}, ranks=2)
    assert [len(part["x"]) for part in one] == [3, 2]


def shuffled(rank):
    """Images and labels stay together, whatever the shuffling: the label is in the image."""
    pipe = Pipeline([nn.Identity(), nn.Flatten()], schedule("1f1b", 2, 4),
                    lambda o, t: (o[:, 0] - t).abs().max())  # fmt: skip
    losses = []
    for seed in range(5):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).double()
        losses += [pipe.step(order[:, None], order).loss, pipe.evaluate(order[:, None], order).loss]
    return losses


def test_rows_and_targets_belong_together():
    assert on_ranks(shuffled, ranks=2) == [[0.0] * 10] * 2


def evaluating_a_table(rank):
    rows = mp.Schedule.parse("0F1 0F0 2F1 2F0\n1F1 1F0 3F1 3F0")
    pipe = Pipeline(mlp(4), rows, mean_mse)
    with torch.no_grad():
        return [torch.allclose(pipe.evaluate(batch(n)).outputs, mlp(4)(batch(n)))
                for n in (1, 2, 5)]  # fmt: skip


def test_a_table_of_ones_own_without_backward():
    assert on_ranks(evaluating_a_table, ranks=2) == [[True] * 3] * 2
