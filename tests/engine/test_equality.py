"""Every schedule against one process, in every size: loss, each gradient, weights after 3 steps."""

import copy

import pytest
import torch
from ranks import batch, error, gradients, mean_mse, on_ranks, one_process, schedule, sum_mse
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

ROWS = 23  # a prime: no number of micro-batches but 1 divides it, so they are uneven
TOLERANCE = 1e-10
pytestmark = pytest.mark.timeout(120)


def cases(ranks: int) -> list[tuple[str, mp.Schedule]]:
    """Every schedule and size, with what to call it where it fails."""
    found = []
    for m in range(1, 2 * ranks + 2):
        for name in ("naive", "gpipe", "gpipe+recompute", "1f1b", "1f1b+recompute"):
            found.append((f"{name} P={ranks} M={m}", schedule(name, ranks, m)))
        for v in (1, 2, 3):
            low = min(ranks, m)
            for group in sorted({low, (low + m) // 2, m}):
                label = f"interleaved P={ranks} M={m} V={v} group={group}"
                found.append((label, schedule("interleaved", ranks, m, chunks=v, group=group)))
            label = f"breadth-first P={ranks} M={m} V={v}"
            found.append((label, schedule("breadth-first", ranks, m, chunks=v)))
    return list({rows: (label, rows) for label, rows in found}.values())


def layers() -> nn.Sequential:
    """Enough layers for 4 ranks of 3 chunks; some stages have no parameters."""
    torch.manual_seed(0)
    block = lambda: [nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)]  # noqa: E731
    return nn.Sequential(*block(), *block(), *block(), *block(), nn.Linear(5, 3)).double()


def trained(model, targets_of, loss_fn, mean) -> list:
    """One process: after each of 3 SGD steps the loss, the gradients and the new weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for seed in range(3):
        optimizer.zero_grad()
        loss, grads = one_process(model, batch(ROWS, 5, seed=seed), targets_of(seed), loss_fn,
                                  mean=mean)  # fmt: skip
        optimizer.step()
        steps.append((loss, grads, copy.deepcopy(model.state_dict())))
    return steps


def targets_of(seed: int) -> torch.Tensor:
    return batch(ROWS, 3, seed=seed + 50)


def compare_all(rank, tables, loss_fn=mean_mse, reduction="mean") -> list[str]:
    """What is wrong, a line each; nothing if all is well."""
    start, wrong = layers(), []
    wanted = trained(copy.deepcopy(start), targets_of, loss_fn, reduction == "mean")
    for label, rows in tables:
        pipe = Pipeline(copy.deepcopy(start), rows, loss_fn, reduction)
        optimizer = None
        if parameters := list(pipe.parameters()):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
        for seed, (loss, grads, weights) in enumerate(wanted):
            pipe.zero_grad()
            found = pipe.step(batch(ROWS, 5, seed=seed), targets_of(seed)).loss
            if not abs(found - loss) <= TOLERANCE * max(1, abs(loss)):
                wrong.append(f"{label}, step {seed}: loss {found}, one process {loss}")
            if not (off := error(gradients(pipe), grads)) <= TOLERANCE:
                wrong.append(f"{label}, step {seed}: gradients differ by {off}")
            if optimizer:
                optimizer.step()
            if not (off := error(pipe.state_dict(), weights)) <= TOLERANCE:
                wrong.append(f"{label}, step {seed}: weights differ by {off}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_schedule_and_size_equals_one_process(ranks):
    tables = cases(ranks)
    assert len(tables) > 15 * ranks
    for rank, wrong in enumerate(on_ranks(compare_all, tables, ranks=ranks)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


SOME = [("gpipe", 3, {}), ("1f1b+recompute", 5, {}), ("interleaved", 5, {"chunks": 2}),
        ("breadth-first", 3, {"chunks": 3}), ("naive", 2, {})]  # fmt: skip


def test_a_loss_that_sums_over_the_rows():
    tables = [(f"{name} M={m}", schedule(name, 3, m, **more)) for name, m, more in SOME]
    for wrong in on_ranks(compare_all, tables, sum_mse, "sum", ranks=3):
        assert not wrong, "\n".join(wrong)


def accumulate(rank, tables, reduction) -> float:
    """Two steps without zeroing: the largest error against one process, over the tables."""
    loss_fn, worst = {"mean": mean_mse, "sum": sum_mse}[reduction], 0.0
    sizes = (ROWS, 11)
    for rows in tables:
        model = layers()
        pipe = Pipeline(copy.deepcopy(model), rows, loss_fn, reduction)
        for seed, size in enumerate(sizes):
            x, y = batch(size, 5, seed=seed), batch(size, 3, seed=seed + 50)
            loss = pipe.step(x, y).loss
            other, wanted = one_process(model, x, y, loss_fn, mean=reduction == "mean")
            worst = max(worst, error(gradients(pipe), wanted), abs(loss - other))
    return worst


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_steps_accumulate(reduction):
    """Not scaled again: what the first step left stays as it was (trap: accumulated gradients
    divided by M a second time)."""
    tables = [schedule(name, 3, m, **more) for name, m, more in SOME]
    assert max(on_ranks(accumulate, tables, reduction, ranks=3)) < TOLERANCE


def same_loss(rank, tables) -> list[float]:
    return [Pipeline(layers(), rows, mean_mse).step(batch(ROWS, 5), targets_of(1)).loss
            for rows in tables]  # fmt: skip


def test_every_rank_has_the_same_loss_to_the_last_bit():
    tables = [schedule(name, 4, m, **more) for name, m, more in SOME]
    first, *others = on_ranks(same_loss, tables, ranks=4)
    assert all(other == first for other in others)


def bit_equal(rank) -> bool:
    """With one rank and one micro-batch nothing is added in another order."""
    model = layers()
    pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 1, 1), mean_mse)
    x, y = batch(ROWS, 5), targets_of(1)
    loss = pipe.step(x, y).loss
    other, wanted = one_process(model, x, y)
    found = gradients(pipe)
    return loss == other and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_one_rank_is_the_plain_loop_bit_for_bit():
    assert on_ranks(bit_equal, ranks=1) == [True]
