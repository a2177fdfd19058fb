"""Frozen stages, in-place starts, views at the end, tensors in flight (traps kinds 6 and 7)."""

from functools import partial

import pytest
import torch
from ranks import (
    ROWS,
    TOLERANCE,
    Apply,
    Start,
    batch,
    check_edges,
    keeps_nothing,
    linear,
    mean_mse,
    on_ranks,
    schedule,
    three_stages,
)
from torch import nn

from minipipe import Pipeline

pytestmark = pytest.mark.timeout(60)


# Frozen parts.


def frozen(which):
    stages = three_stages()
    for stage in which:
        stages[stage].requires_grad_(False)
    return stages


@pytest.mark.parametrize("which", [[0], [0, 1], [1], [2], [1, 2], [0, 2]])
def test_frozen_stages(which):
    """Trap 51: no gradient goes to a stage that needs none, nothing hangs."""
    check_edges(partial(frozen, which), batch(7), batch(7))


def test_partly_frozen_stages():
    def make():
        stages = frozen([])
        for stage in stages:
            next(stage.parameters()).requires_grad_(False)
        return stages

    check_edges(make, batch(7), batch(7))


def all_frozen(rank, tables):
    found = []
    for rows in tables:
        pipe = Pipeline(frozen([0, 1, 2]), rows, mean_mse)
        losses = {pipe.step(batch(7), batch(7)).loss for _ in range(2)}
        found.append((len(losses), [p.grad for p in pipe.parameters()]))
    return found


def test_everything_frozen():
    tables = [schedule(*row) for row in ROWS]
    for found in on_ranks(all_frozen, tables, ranks=3):
        assert found == [(1, [None, None])] * 3


def thaw(rank):
    """Frozen and thawed between steps: what comes back changes its form."""
    stages, sizes = frozen([0]), []
    pipe = Pipeline(stages, schedule("1f1b", 3, 3), mean_mse)
    for flag in (False, True, False, True):
        stages[0].requires_grad_(flag)
        pipe.zero_grad()
        pipe.step(batch(7), batch(7))
        sizes.append(sum(p.grad is not None for p in pipe.parameters()))
    return sizes


def test_a_stage_is_frozen_and_thawed_between_steps():
    assert on_ranks(thaw, ranks=3) == [[0, 2, 0, 2], [2] * 4, [2] * 4]


# In-place starts and views at the end.


def in_place(start):
    return [nn.Sequential(start(), linear()), nn.Sequential(start(), linear(seed=1)),
            nn.Sequential(start(), linear(seed=2))]  # fmt: skip


@pytest.mark.parametrize("start", [
    partial(nn.ReLU, inplace=True), partial(nn.Hardtanh, inplace=True),
    partial(nn.LeakyReLU, inplace=True), partial(nn.Dropout, 0.0, inplace=True),
])  # fmt: skip
def test_a_stage_starts_in_place(start):
    """Trap 58: a received tensor is a leaf, or a view, and refuses in-place operations; handed
    over on one rank, it must not change under the stage that gave it."""
    check_edges(partial(in_place, start), batch(7), batch(7))


class Adds(nn.Module):
    def __init__(self, in_place=True):
        super().__init__()
        self.layer, self.in_place = linear(seed=1), in_place

    def forward(self, x):
        if self.in_place:
            x += 1
        else:
            x = x + 1
        return self.layer(x)


def test_a_stage_changes_what_the_stage_before_saved():
    """exp saves its output: on one rank, the next stage's += 1 must not reach it."""
    check_edges(lambda: [Apply(torch.exp), Adds(), Adds()], batch(7), batch(7),
          plain=lambda: [Apply(torch.exp), Adds(False), Adds(False)])  # fmt: skip


def test_both_of_a_pair_in_place():
    class Both(nn.Module):
        def forward(self, x, y):
            x.relu_()
            y.mul_(2)
            return x * y

    check_edges(lambda: [Start(lambda x: [x * 3]), Both(), linear()], batch(7), batch(7))


@pytest.mark.parametrize("last", [nn.Flatten, lambda: nn.Unflatten(1, (2, 3)),
                                  partial(Apply, lambda x: x.view(-1, 3, 2)),
                                  partial(Apply, lambda x: x[:, :4]),
                                  partial(Apply, lambda x: x.t().t())])  # fmt: skip
def test_the_last_stage_ends_in_a_view(last):
    """Trap 56: detach_ is not allowed on views."""
    with torch.no_grad():
        shape = last().double()(batch(1)).shape[1:]
    make = lambda: [linear(), linear(seed=1), last()]  # noqa: E731
    check_edges(make, batch(7), batch(7, *shape))


def refused_by_torch(rank):
    """An operation whose saved output is changed: torch refuses to go back."""
    class Spoils(nn.Module):
        def forward(self, x):
            y = x.exp()
            y += 1
            return y

    pipe = Pipeline([linear(), Spoils()], schedule("1f1b", 2, 2), mean_mse)
    pipe.step(batch(4), batch(4))


def test_saved_values_that_were_changed_are_noticed(failures):
    """The memory meter's hooks must not hide what torch would have refused."""
    found = failures(refused_by_torch, ranks=2)
    assert all(failure and "inplace" in failure["text"] for failure in found), found


class Counts(nn.Module):
    """Gives away a buffer of its own, which its next forward changes."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return self.layer(x), self.count


class Slow(nn.Module):
    def forward(self, x, count):
        import time

        time.sleep(0.05)
        return x * count


def counted(rank):
    """Loss when micro-batch m is multiplied by m + 1, and by what came."""
    pipe = Pipeline([Counts(), Slow()], schedule("gpipe", 2, 4), keeps_nothing)
    x = batch(8)
    found = []
    for step in range(2):
        loss = pipe.step(x, x).loss
        with torch.no_grad():
            outputs = linear()(x).split(2)
            wanted = sum(float(o.sum()) * (4 * step + m + 1) / 4 for m, o in enumerate(outputs))
        found.append(abs(loss - wanted))
    return found


def test_a_tensor_in_flight_does_not_change():
    """Trap 36: the receiver sees what was written after the send."""
    assert max(map(max, on_ranks(counted, ranks=2))) < TOLERANCE


# torchvision's models.


def resnet_blocks():
    """A cut resnet: stages that start with ReLU(inplace=True), and a functional flatten."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).double(),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)).double(),
        nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 6)).double(),
    ]


def test_a_convolutional_classifier():
    check_edges(resnet_blocks, batch(7, 3, 8, 8), batch(7))
