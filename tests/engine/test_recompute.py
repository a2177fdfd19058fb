"""Recompute, BatchNorm, dropout, autocast: a second forward pass must not show (traps kind 9)."""

import copy
from functools import partial

import pytest
import torch
from ranks import batch, error, gradients, keeps_nothing, mean_mse, on_ranks, schedule
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


def same(rank, make, tables, around=None, steps=2):
    """Train with each of the tables; gradients, losses and state after each step, as lists."""
    results = []
    for rows in tables:
        torch.manual_seed(7 + rank)
        pipe = Pipeline(make(), rows, mean_mse)
        found = []
        for step in range(steps):
            with around() if around else torch.enable_grad():
                loss = pipe.step(batch(9, seed=step), batch(9, seed=step + 5)).loss
            found.append((loss, gradients(pipe), copy.deepcopy(pipe.state_dict()),
                          torch.get_rng_state()))  # fmt: skip
        results.append(found)
    first, *others = results
    return [difference(first, other) for other in others]


def difference(one, other) -> str:
    for step, (a, b) in enumerate(zip(one, other, strict=True)):
        if a[0] != b[0]:
            return f"step {step}: losses {a[0]}, {b[0]}"
        for place, what in ((1, "gradient"), (2, "state")):
            for name, value in a[place].items():
                if (value is None) != (b[place][name] is None) or (
                    value is not None and not torch.equal(value, b[place][name])
                ):
                    return f"step {step}: {what} of {name} differs"
        if not torch.equal(a[3], b[3]):
            return f"step {step}: random numbers differ"
    return ""


def with_and_without(name, ranks=3, microbatches=4):
    return [schedule(name, ranks, microbatches), schedule(f"{name}+recompute", ranks, microbatches)]


def dropouts():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()).double() for _ in range(3)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_dropout_has_the_same_masks(name):
    """Trap 95: other forwards run between F and R, and draw random numbers."""
    assert on_ranks(same, dropouts, with_and_without(name), ranks=3) == [[""]] * 3


def dropouts_at_the_borders():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Dropout(0.3, inplace=True), nn.Linear(6, 6), nn.Dropout(0.5)).double()
            for _ in range(3)]  # fmt: skip


def test_dropout_at_both_borders():
    tables = with_and_without("1f1b")
    assert on_ranks(same, dropouts_at_the_borders, tables, ranks=3) == [[""]] * 3


def norms():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).double()
            for _ in range(3)]  # fmt: skip


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_running_statistics_see_each_microbatch_once(name):
    """Trap 94: both of torch's checkpoint modes count 2 instead of 1."""
    assert on_ranks(same, norms, with_and_without(name), ranks=3) == [[""]] * 3


def modes(rank, change):
    """A model that was in evaluation mode when it was cut, and trains afterwards."""
    found = []
    for rows in with_and_without("gpipe", 2):
        model = norms()[:2]
        for stage in model:
            stage.eval()
        pipe = Pipeline(model, rows, mean_mse)
        if change == "pipe":
            pipe.train()
        for stage in model if change == "model" else []:
            stage.train()
        pipe.step(batch(9), batch(9))
        found.append({name: value.clone() for name, value in pipe.state_dict().items()})
    tracked = next(v for k, v in found[0].items() if k.endswith("tracked"))
    return error(found[1], found[0]), int(tracked)


@pytest.mark.parametrize("change, tracked", [("pipe", 4), ("model", 4), ("", 0)])
def test_the_mode_may_change_after_the_cut(change, tracked):
    assert on_ranks(modes, change, ranks=2) == [(0.0, tracked)] * 2


def batchnorm(rank, microbatches):
    """What the first stage's BatchNorm counted, its mean, and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double()
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, schedule("1f1b", 2, microbatches), mean_mse)
    x, y = batch(12), batch(12, seed=2)
    pipe.step(x, y)
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (mean_mse(plain(a), b) / microbatches).backward()
    state = {k: v for k, v in plain.state_dict().items() if k in pipe.state_dict()}
    return (error(gradients(pipe), gradients(plain)), error(pipe.state_dict(), state),
            model[0].num_batches_tracked.item(), model[0].running_mean)  # fmt: skip


def test_batchnorm_sees_microbatches():
    """Trap 92, documented: with M micro-batches the running statistics take M small steps, and
    each micro-batch is normalised by itself; one process with the same micro-batches is equal,
    one with the whole batch is not."""
    four, one = (on_ranks(batchnorm, m, ranks=2)[0] for m in (4, 1))
    assert max(four[:2] + one[:2]) < 1e-12
    assert (four[2], one[2]) == (4, 1)
    assert not torch.allclose(four[3], one[3])


def in_place():
    torch.manual_seed(0)
    return [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)).double() for _ in range(4)]


HALVES = """
    0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1
    2F0 3F0 3R0 3B0 2R0 2B0 2F1 3F1 3R1 3B1 2R1 2B1
"""


def test_an_inplace_first_operation_leaves_the_kept_input_alone():
    without = " ".join(cell for cell in HALVES.split(" ") if "R" not in cell)
    tables = [mp.Schedule.parse(without), mp.Schedule.parse(HALVES)]
    assert on_ranks(same, in_place, tables, ranks=2) == [[""]] * 2
    three = partial(slice_of, in_place, 3)
    assert on_ranks(same, three, with_and_without("1f1b"), ranks=3) == [[""]] * 3


def slice_of(make, count):
    return make()[:count]


def test_r_may_come_long_before_b_and_for_some_microbatches_only():
    """R needs no gradient; a row may recompute what it likes."""
    tables = [mp.Schedule.parse(text) for text in (
        "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
        "0F0 0F1 0R1 0F2 0R0 0B0 0B1 0B2\n1F0 1R0 1F1 1F2 1R2 1B0 1B1 1B2",
    )]  # fmt: skip
    make = partial(slice_of, dropouts, 2)
    assert on_ranks(same, make, tables, ranks=2) == [[""]] * 2


def test_the_callers_random_numbers_go_on_as_without():
    """The state after a step is that of the forwards alone (checked in `same`): a second step
    draws other masks."""
    def fn(rank):
        pipe = Pipeline(dropouts()[:2], schedule("gpipe+recompute", 2, 2), mean_mse)
        return len({pipe.step(batch(4), batch(4)).loss for _ in range(3)})

    assert on_ranks(fn, ranks=2) == [3, 3]


# Autocast.


def bfloat():
    return torch.autocast("cpu", torch.bfloat16)


def three_linears():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]


def autocast(rank, rows):
    """Gradients under autocast against one process under it; what type crosses the border."""
    stages, seen = three_linears(), []
    other = nn.Sequential(*three_linears())
    for stage in stages:
        stage.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    pipe = Pipeline(stages, rows, lambda o, t: mean_mse(o.float(), t))
    x, y = batch(8).float(), batch(8, seed=2).float()
    with bfloat():
        loss = pipe.step(x, y).loss
        for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
            with bfloat():
                (mean_mse(other(a).float(), b) / 4).backward()
            torch.clear_autocast_cache()
    found, wanted = gradients(pipe), gradients(other)
    plain = Pipeline(three_linears(), rows, mean_mse).step(x, y).loss
    return error(found, wanted), abs(loss - plain) > 0, seen


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "gpipe+recompute", "1f1b+recompute"])
def test_autocast_holds_in_every_pass_and_for_what_is_sent(name):
    """Trap 32: no effect inside the pipeline, a clash of dtypes at the second stage, or weights
    without gradients as a forward without a graph has filled autocast's cache."""
    for rank, (off, other, seen) in enumerate(on_ranks(autocast, schedule(name, 3, 4), ranks=3)):
        assert off < 0.02 and other, f"rank {rank}: gradients differ by {off}"
        assert set(seen) == {torch.bfloat16 if rank else torch.float32}


def evaluated_within(rank):
    """evaluate and step within one autocast context."""
    stages = three_linears()[:2]
    pipe = Pipeline(stages, schedule("1f1b", 2, 4), lambda o, t: mean_mse(o.float(), t))
    x = batch(8).float()
    with bfloat():
        pipe.evaluate(x, x)
        pipe.step(x, x)
    return [p.grad is not None for p in pipe.parameters()]


def test_evaluate_before_a_step_within_autocast():
    assert on_ranks(evaluated_within, ranks=2) == [[True, True]] * 2


# torch.compile.


def compiled(rank, backend, meter):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
    plain = Pipeline(copy.deepcopy(parts), schedule("1f1b", 2, 4), mean_mse)
    fast = [torch.compile(part, backend=backend) for part in parts]
    pipe = Pipeline(fast, schedule("1f1b", 2, 4), mean_mse, memory_meter=meter)
    x, y = batch(8).float(), batch(8, seed=2).float()
    losses = [p.step(x, y).loss for p in (plain, pipe)]
    grads = zip(plain.parameters(), pipe.parameters(), strict=True)
    return abs(losses[0] - losses[1]), max(float((a.grad - b.grad).abs().max()) for a, b in grads)


@pytest.mark.parametrize("meter", [True, False])
def test_compiled_stages(meter):
    """Trap 145. "aot_eager" traces forward and backward as the default does, without the minute
    that a C++ compiler takes."""
    for found in on_ranks(compiled, "aot_eager", meter, ranks=2):
        assert max(found) < 1e-6


def memory_with_batchnorm(rank):
    """Peaks of several steps with recompute and BatchNorm, whose spare buffers come and go."""
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).double()
             for _ in range(2)]  # fmt: skip
    pipe = Pipeline(model, schedule("gpipe+recompute", 2, 2), keeps_nothing)
    x = batch(2, 64)
    return [pipe.step(batch(4, 64), x.repeat(2, 1)).peak_activation_bytes for _ in range(12)]


def test_memory_stays_exact_beside_spare_buffers():
    """An address that a spare buffer once had may be an activation's later."""
    for peaks in on_ranks(memory_with_batchnorm, ranks=2):
        assert len(set(peaks)) == 1, peaks


