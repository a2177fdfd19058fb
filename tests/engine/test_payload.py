"""What crosses a stage's border: shapes, layouts, dtypes, tuples (traps kinds 4 and 7)."""

from functools import partial

import pytest
import torch
from ranks import (
    ROWS,
    TOLERANCE,
    Start,
    batch,
    chain,
    check_edges,
    compare,
    compare_each,
    gradients,
    linear,
    mean_mse,
    on_ranks,
    schedule,
    three_stages,
)
from torch import nn

from minipipe import Pipeline

pytestmark = pytest.mark.timeout(60)


# Layouts and shapes (kind 4).


def image_model(middle):
    torch.manual_seed(0)
    return [nn.Conv2d(3, 4, 3, padding=1).double(), middle,
            nn.Sequential(nn.Conv2d(4, 2, 1).double(), nn.Flatten())]  # fmt: skip


@pytest.mark.parametrize("fn", [
    lambda x: x.transpose(2, 3), lambda x: x.permute(0, 1, 3, 2),
    lambda x: x[:, :, ::2].repeat(1, 1, 2, 1),
    lambda x: x.to(memory_format=torch.channels_last), lambda x: x.flip(1), lambda x: x * 1,
    lambda x: x.chunk(2, 3)[1].repeat(1, 1, 1, 3)[..., :4],
    lambda x: x[:, :, :1].expand(-1, -1, 4, -1), lambda x: x.view(-1, 2, 2, 4, 4).flatten(1, 2),
])  # fmt: skip
def test_views_and_strides(fn):
    """Trap 24: raw storage is sent and strides are lost, or gloo refuses."""
    check_edges(lambda: image_model(Apply2d(fn)), batch(7, 3, 4, 4), batch(7, 32))


class Apply2d(nn.Module):
    def __init__(self, fn):
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.fn = nn.Conv2d(4, 4, 1).double(), fn

    def forward(self, x):
        return self.fn(self.layer(x))


def test_a_channels_last_batch():
    x = batch(7, 3, 4, 4).to(memory_format=torch.channels_last)
    check_edges(lambda: image_model(Apply2d(lambda x: x)), x, batch(7, 32))


def test_a_batch_that_is_a_transposed_view():
    check_edges(three_stages, batch(6, 7).t(), batch(6, 7).t())


class Mean(nn.Module):
    """Any image size, any number of positions."""

    def forward(self, x):
        return x.flatten(2).mean(2)


def shapes_change(rank, tables):
    """Image size, rows and both change between steps, there and back."""
    worst = 0.0
    shapes = [(7, 3, 4, 4), (7, 3, 6, 5), (9, 3, 4, 4), (4, 3, 8, 8), (7, 3, 4, 4), (5, 3, 2, 2)]
    for rows in tables:
        torch.manual_seed(0)
        stages = [nn.Conv2d(3, 4, 1).double(), nn.Conv2d(4, 4, 1).double(), Mean()]
        other = [nn.Conv2d(3, 4, 1).double(), nn.Conv2d(4, 4, 1).double(), Mean()]
        for mine, theirs in zip(stages, other, strict=True):
            theirs.load_state_dict(mine.state_dict())
        pipe = Pipeline(stages, rows, mean_mse)
        for shape in shapes:
            x, y = batch(*shape), batch(shape[0], 4)
            pipe.step(x, y)
            mean_mse(chain(other, x), y).backward()
            wanted = gradients(nn.ModuleList(other))
            worst = max(worst, *[float((g - wanted[n]).abs().max())
                                 for n, g in gradients(pipe).items()], 0.0)  # fmt: skip
    return worst


def test_the_shape_changes_from_step_to_step():
    """Traps 26, 28, 29: buffers of the first batch are kept for the next one."""
    tables = [schedule(name, 3, 4) for name in ("gpipe", "1f1b", "gpipe+recompute")]
    assert max(on_ranks(shapes_change, tables, ranks=3)) < 1e-12


@pytest.mark.parametrize("rows", [4, 5, 9, 10, 11])
def test_a_short_last_microbatch(rows):
    """Traps 26, 37: torch.chunk gives 3 parts of 9 rows in 4, or 3, 3, 3, 1."""
    x = batch(rows)
    wrong = on_ranks(compare, three_stages, schedule("1f1b", 3, 4), x, x, ranks=3)
    assert max(wrong) < TOLERANCE


def short_epoch(rank):
    """An epoch of 10 rows in batches of 4, twice, with one pipeline: 4, 4, 2."""
    pipe = Pipeline([linear(), linear(seed=1)], schedule("1f1b", 2, 2), mean_mse)
    other = nn.Sequential(linear(), linear(seed=1))
    x, y, worst = batch(10), batch(10, seed=2), 0.0
    for _ in range(2):
        for a, b in zip(x.split(4), y.split(4), strict=True):
            loss = mean_mse(other(a), b)
            worst = max(worst, abs(pipe.step(a, b).loss - loss.item()))
    return worst


def test_a_short_last_batch():
    """Trap 28, 38: drop_last=False."""
    assert max(on_ranks(short_epoch, ranks=2)) < 1e-12


# Dtypes and what else a tuple may hold (kind 7).


class Middle(nn.Module):
    """Hands everything on, x changed."""

    def __init__(self, check=None):
        super().__init__()
        self.layer, self.check = linear(seed=1), check

    def forward(self, x, *extra):
        if self.check is not None:
            self.check(*extra)
        return (torch.tanh(self.layer(x)), *extra)


class End(nn.Module):
    """One tensor from x and what came along."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.use = linear(seed=2), use

    def forward(self, x, *extra):
        return self.layer(self.use(x, *extra))


def with_extra(extra, use, check=None):
    return [Start(extra), Middle(check), End(use)]


def is_a(dtype):
    def check(value):
        assert value.dtype == dtype and not value.requires_grad

    return check


@pytest.mark.parametrize("extra, use, dtype", [
    (lambda x: [(x > 0).long().sum(1)], lambda x, n: x * n[:, None], torch.int64),
    (lambda x: [x > 0], lambda x, mask: x.masked_fill(mask, 0.5), torch.bool),
    (lambda x: [x.detach().to(torch.uint8)], lambda x, n: x + n, torch.uint8),
    (lambda x: [x.detach().to(torch.bfloat16)], lambda x, n: x + n.double(), torch.bfloat16),
    (lambda x: [x.detach().half()], lambda x, n: x + n.double(), torch.float16),
    (lambda x: [x.detach().float()], lambda x, n: x + n, torch.float32),
    (lambda x: [torch.complex(x.detach(), x.detach())], lambda x, z: x * z.abs(), torch.complex128),
    (lambda x: [torch.complex(x.detach(), x.detach()).to(torch.complex64)],
     lambda x, z: x * z.real, torch.complex64),
    (lambda x: [torch.tensor(3.0)], lambda x, n: x * n, torch.float32),
    (lambda x: [x.new_empty(0, 4)], lambda x, n: x + n.shape[1], torch.float64),
])  # fmt: skip
def test_tensors_that_need_no_gradient_travel_with_their_dtype(extra, use, dtype):
    """Traps 31, 46: requires_grad set on integers crashes; a mask becomes half precision."""
    make = partial(with_extra, extra, use)
    threes = [schedule(*row) for row in ROWS if "recompute" not in row[0]]
    checked = partial(with_extra, extra, use, is_a(dtype))
    wrong = on_ranks(compare_each, checked, threes, batch(7), batch(7), {}, ranks=3)
    assert max(map(max, wrong)) < TOLERANCE
    check_edges(make, batch(7), batch(7))


@pytest.mark.parametrize("extra, use", [
    (lambda x: [None], lambda x, nothing: x if nothing is None else 1 / 0),
    (lambda x: [None, x * 2, None], lambda x, a, b, c: x + b),
    (lambda x: [3, True, 0.25], lambda x, n, flag, f: x * n * f if flag is True and type(n) is int
     and type(f) is float else 1 / 0),
    (lambda x: [len(x)], lambda x, n: x * n),
    (lambda x: [x, x], lambda x, a, b: x + a * b),
    (lambda x: [x * 2, x.sin(), x.cos(), x ** 2], lambda x, *all: x + sum(all)),
    (lambda x: [x * 2], lambda x, unused: x),
    (lambda x: [x * 2, x.detach()], lambda x, unused, constant: x * constant),
    (lambda x: [torch.complex(x, x.sin())], lambda x, z: x + (z * z.conj()).real),
], ids=["None", "Nones", "numbers", "rows", "same", "five", "unused", "constant", "complex"],
)  # fmt: skip
def test_tuples_with_all_sorts(extra, use):
    """Traps 49, 52: None, numbers, unused and repeated members."""
    check_edges(partial(with_extra, extra, use), batch(7), batch(7), split=True)


class ReadsNothing(nn.Module):
    """A stage that ignores what it receives."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return self.weight.expand(len(x), 6) * 2


def unused_stage(rank, rows):
    pipe = Pipeline([linear(), ReadsNothing(), linear(seed=2)], rows, mean_mse)
    pipe.step(batch(7), batch(7))
    return {n: None if g is None else float(g.abs().max()) for n, g in gradients(pipe).items()}


@pytest.mark.parametrize("row", ROWS)
def test_a_stage_that_ignores_its_input_gives_zeros(row):
    """Trap 49: no gradient for a border's input; the rank before waits for ever."""
    first, second, third = on_ranks(unused_stage, schedule(*row), ranks=3)
    assert all(value in (0.0, None) for value in first.values())
    assert all(value > 0 for value in {**second, **third}.values())


class Sends(nn.Module):
    """Gives a parameter itself away, and its input as it is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return x, self.weight


class Scales(nn.Module):
    def forward(self, x, weight):
        return x * weight


def test_a_stage_that_passes_on_its_input_and_a_parameter():
    make = lambda: [linear(), Sends(), Scales()]  # noqa: E731
    check_edges(make, batch(7), batch(7))


def test_inputs_that_are_a_tuple():
    """Stage 0 whose forward takes several arguments."""
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, y):
            return self.layer(x) * y

    make = lambda: [Two(), linear(seed=1), linear(seed=2)]  # noqa: E731
    check_edges(make, (batch(7), batch(7, seed=9)), batch(7))


def test_targets_that_are_a_tuple():
    def loss(outputs, targets):
        return mean_mse(outputs, targets[0]) + mean_mse(outputs, targets[1])

    def fn(rank):
        pipe = Pipeline([linear(), linear(seed=1)], schedule("1f1b", 2, 3), loss)
        x, pair = batch(7), (batch(7, seed=2), batch(7, seed=3))
        with torch.no_grad():
            wanted = loss(nn.Sequential(linear(), linear(seed=1))(x), pair)
        return abs(pipe.step(x, pair).loss - wanted.item())

    assert max(on_ranks(fn, ranks=2)) < 1e-12


class TakesTuple(nn.Module):
    """One argument, a tuple, as nn.Sequential hands it on."""

    def forward(self, pair):
        x, y = pair
        return x + y


def test_a_tuple_as_one_argument():
    def fn(rank):
        first = Start(lambda x: [x * 2])
        pipe = Pipeline([first, TakesTuple()], schedule("1f1b", 2, 3), mean_mse)
        other = Start(lambda x: [x * 2])
        mean_mse(TakesTuple()(other(batch(7))), batch(7)).backward()
        pipe.step(batch(7), batch(7))
        return [float((p.grad - q.grad).abs().max())
                for p, q in zip(pipe.parameters(), other.parameters(), strict=False)]  # fmt: skip

    assert max(on_ranks(fn, ranks=2)[0]) < 1e-12


def test_constants_keep_requires_grad_false():
    """Trap 47: every output of a stage is made to need a gradient."""
    def fn(rank):
        seen = []

        class Looks(nn.Module):
            def forward(self, x, constant):
                seen.append((x.requires_grad, constant.requires_grad))
                return x * constant

        pipe = Pipeline([Start(lambda x: [x.detach()]), Looks()], schedule("1f1b", 2, 2), mean_mse)
        pipe.step(batch(4), batch(4))
        return seen

    assert on_ranks(fn, ranks=2)[1] == [(True, False)] * 2
