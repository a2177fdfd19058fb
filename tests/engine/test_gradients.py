"""Scale, norm, clipping and updates: what all ranks have to agree on (traps kinds 1, 3, 10)."""

import copy

import pytest
import torch
from ranks import batch, error, gradients, mean_mse, mlp, on_ranks, one_process, schedule
from torch import nn

from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


def linear(seed=0, width=6):
    torch.manual_seed(seed)
    return nn.Linear(width, width).double()


def ratios(rank, rows):
    """gradient / one process's, of each of this rank's parameters."""
    model = nn.Sequential(linear(0), linear(1), linear(2))
    pipe = Pipeline(copy.deepcopy(model), rows, mean_mse)
    pipe.step(batch(12), batch(12, seed=2))
    _, wanted = one_process(model, batch(12), batch(12, seed=2))
    return [float((g / wanted[name]).mean()) for name, g in gradients(pipe).items()]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b+recompute"])
def test_the_scale_is_the_same_in_every_stage(name):
    """Trap 60: stage k from the end gets an extra 1/M^k (1/16, 1/4, 1)."""
    for found in on_ranks(ratios, schedule(name, 3, 4), ranks=3):
        assert found == pytest.approx([1.0, 1.0], abs=1e-9)


def norms(rank, sizes):
    found = []
    for m in sizes:
        pipe = Pipeline(mlp(6), schedule("1f1b", 3, m), mean_mse)
        pipe.step(batch(13), batch(13, seed=2))
        found.append(pipe.clip_grad_norm_(1e9))
    return found


def test_the_norm_does_not_depend_on_the_number_of_microbatches():
    """Trap 61, 118: M times too large; or one stage's norm only."""
    found = on_ranks(norms, [1, 2, 4, 8], ranks=3)
    _, wanted = one_process(mlp(6), batch(13), batch(13, seed=2))
    norm = float(torch.stack([g.norm() for g in wanted.values()]).norm())
    assert found[0] == pytest.approx([norm] * 4, rel=1e-12)
    assert found[1] == found[2] == found[0]


# Clipping.


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x):
        return x + self.weight


def clip(rank, norms, rows, max_norm=1.0, norm_type=2.0):
    """Stages whose gradients are the given numbers; None: a stage without parameters. Returns
    the norm and what the gradients have become."""
    pipe = Pipeline([nn.Identity() if n is None else Weight() for n in norms], rows, mean_mse)
    named = dict(pipe.named_parameters())
    for name, parameter in named.items():
        parameter.grad = torch.full_like(parameter, norms[int(name.split(".")[0])])
    norm = pipe.clip_grad_norm_(max_norm, norm_type)
    return norm, [p.grad.item() for p in named.values()]


def test_one_norm_over_all_stages():
    """Trap 116: clipping per stage leaves 1 and 1 instead of 0.6 and 0.8."""
    (a, one), (b, two) = on_ranks(clip, [3.0, 4.0], schedule("1f1b", 2, 2), ranks=2)
    assert a == b == 5.0
    assert one + two == pytest.approx([0.6, 0.8], rel=1e-6)


def test_one_norm_over_all_chunks():
    rows = schedule("interleaved", 2, 2, chunks=2)
    (a, one), (b, two) = on_ranks(clip, [1.0, 4.0, 2.0, 2.0], rows, ranks=2)
    assert a == b == 5.0
    assert one + two == pytest.approx([0.2, 0.4, 0.8, 0.4], rel=1e-6)


def test_small_gradients_stay_as_they_are():
    found = on_ranks(clip, [3.0, 4.0], schedule("1f1b", 2, 2), 5.0, ranks=2)
    assert found == [(5.0, [3.0]), (5.0, [4.0])]


def test_a_rank_without_parameters_takes_part():
    """Trap 111: it never calls the collective operation."""
    found = on_ranks(clip, [3.0, None, 4.0], schedule("1f1b", 3, 2), ranks=3)
    assert [norm for norm, _ in found] == [5.0] * 3
    assert found[1][1] == [] and found[0][1] == pytest.approx([0.6], rel=1e-6)


@pytest.mark.parametrize("kind, norm", [(1.0, 7.0), (float("inf"), 4.0), (3, 91 ** (1 / 3))])
def test_other_norms(kind, norm):
    found = on_ranks(clip, [3.0, 4.0], schedule("1f1b", 2, 2), 1.0, kind, ranks=2)
    assert [n for n, _ in found] == pytest.approx([norm] * 2)
    assert found[0][1] + found[1][1] == pytest.approx([3 / norm, 4 / norm], rel=1e-5)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_an_infinity_on_one_rank_is_found_on_all(bad, kind):
    """Trap kind 10: one rank skips its update and the others don't."""
    found = on_ranks(clip, [3.0, bad, 4.0], schedule("1f1b", 3, 2), 1.0, kind, ranks=3)
    assert len({str(norm) for norm, _ in found}) == 1 and str(found[0][0]) == str(abs(bad))
    # As torch has it: after a clip by infinity the others are 0, by nan they are nan.
    wanted = "0.0" if bad == float("inf") else "nan"
    assert str(found[0][1][0]) == str(found[2][1][0]) == wanted


def clipped_training(rank):
    """Three clipped steps equal torch's own clipping in one process."""
    model = mlp(6)
    pipe = Pipeline(copy.deepcopy(model), schedule("interleaved", 3, 4, chunks=2), mean_mse)
    own = torch.optim.SGD(parameters, lr=0.5) if (parameters := [*pipe.parameters()]) else None
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        x, y = batch(9, seed=seed), 9 * batch(9, seed=seed + 9)
        pipe.zero_grad()
        plain.zero_grad()
        pipe.step(x, y)
        mean_mse(model(x), y).backward()
        norms = pipe.clip_grad_norm_(0.3), nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert abs(norms[0] - norms[1]) < 1e-10 and norms[0] > 0.3
        if own:
            own.step()
        plain.step()
    return error(pipe.state_dict(), model.state_dict())


def test_clipped_training_equals_one_process():
    assert max(on_ranks(clipped_training, ranks=3)) < 1e-10


# Loss scale, optimizers, learning rates.


def scaled(rank):
    found = []
    for scale in (1.0, 8.0):
        pipe = Pipeline(mlp(6), schedule("1f1b", 3, 4), mean_mse)
        loss = pipe.step(batch(9), batch(9, seed=2), loss_scale=scale).loss
        found.append((loss, gradients(pipe)))
    (one, small), (two, large) = found
    return one == two and all(torch.equal(8 * small[n], large[n]) for n in small)


def test_loss_scale_multiplies_the_gradients_exactly():
    """Trap 120: and not the loss that is reported."""
    assert on_ranks(scaled, ranks=3) == [True] * 3


def with_optimizer(rank, kind):
    """optimizer= takes each rank's step at the end; equals one process."""
    make = {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}[kind]  # fmt: skip
    model = nn.Sequential(linear(0), nn.Tanh(), linear(1))
    pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 3, 4), mean_mse, optimizer=make)
    plain = make(model.parameters())
    for seed in range(3):
        x, y = batch(9, seed=seed), batch(9, seed=seed + 9)
        pipe.step(x, y)
        plain.zero_grad()
        mean_mse(model(x), y).backward()
        plain.step()
    return error(pipe.state_dict(), model.state_dict()), pipe.optimizer is None


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_pipeline_steps_a_given_optimizer(kind):
    """The rank in the middle has no parameters, for which torch's optimizers refuse to be made."""
    found = on_ranks(with_optimizer, kind, ranks=3)
    assert max(off for off, _ in found) < 1e-10
    assert [none for _, none in found] == [False, True, False]


def schedules_rate(rank):
    pipe = Pipeline(mlp(6), schedule("1f1b", 3, 4), mean_mse,
                    optimizer=lambda p: torch.optim.SGD(p, lr=1.0))  # fmt: skip
    rate = torch.optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.5) if pipe.optimizer else None
    seen = []
    for _ in range(3):
        pipe.step(batch(8), batch(8))
        if rate:
            rate.step()
            seen.append(rate.get_last_lr()[0])
    return seen


def test_a_learning_rate_goes_by_batches():
    """Not by micro-batches."""
    assert on_ranks(schedules_rate, ranks=3) == [[0.5, 0.25, 0.125]] * 3
