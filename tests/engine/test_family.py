"""The schedules with a split backward, V shapes, two ways and waves, in every size, on real ranks:
loss, each gradient, weights, outputs, and the memory that a simulation predicts."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from ranks import batch, error, gradients, mean_mse, on_ranks, one_process, schedule
from torch import nn

import minipipe as mp
from minipipe.partition import cut
from minipipe.pipeline import Pipeline
from minipipe.probe import probe

ROWS = 23  # a prime: where a step or evaluate has so many, the micro-batches are uneven
EACH = 3  # rows a micro-batch, where memory is measured
TOLERANCE = 1e-10
NAMES = {
    "zb-h1": [{}], "zb-h2": [{}], "zb-1p": [{"chunks": v} for v in (1, 2, 3)], "zb-auto": [{}],
    "zb-v": [{}], "v-half": [{}], "v-min": [{}], "dualpipe": [{}], "dualpipev": [{}],
    "chimera": [{}], "hanayo": [{"waves": w} for w in (1, 2)],
}  # fmt: skip
FEWER = ({"chunks": 1}, {"chunks": 3}, {"waves": 2})  # only some sizes, to save time
pytestmark = pytest.mark.timeout(120)


def cases(ranks: int, names=tuple(NAMES), sizes=None) -> dict[str, mp.Schedule]:
    """Every schedule and legal size, by what to call it where it fails."""
    found = {}
    for m in sizes or range(1, 2 * ranks + 3):
        for name in names:
            for more in NAMES[name]:
                try:
                    rows = schedule(name, ranks, m, **more)
                except mp.ScheduleError:
                    continue
                if more in FEWER and m not in (1, 3, ranks, ranks + 1, 2 * ranks, 2 * ranks + 2):
                    continue
                found[f"{name} P={ranks} M={m} {more or ''}"] = rows
    if ranks < 8:  # times that are not equal, and a limit
        costs = mp.Costs(forward=3, backward_input=4, backward_weight=2, latency=1)
        rows = schedule("zb-auto", ranks, 2 * ranks, costs=costs, memory_limit=ranks)
        found[f"zb-auto P={ranks} with costs"] = rows
    return found


WIDTHS = [5, 9, 4, 7, 12, 3, 6, 10, 5, 8, 3, 11, 4, 6, 9, 7, 3, 5]


def layers(stages: int) -> nn.Sequential:
    """A block more than stages, of uneven widths; each has two layers that wait for W and, every
    second one, a layer that does not."""
    torch.manual_seed(0)
    widths = enumerate(zip(WIDTHS[: stages + 1], WIDTHS[1:], strict=False))
    norms = (lambda b: nn.GroupNorm(1, b)), nn.LayerNorm, nn.LayerNorm
    blocks = [
        nn.Sequential(nn.Linear(a, b), norms[n % 3](b), nn.PReLU() if n % 2 else nn.Tanh())
        for n, (a, b) in widths
    ]
    return nn.Sequential(*blocks).double()


def data(seed: int, stages: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(rows, WIDTHS[0], seed=seed), batch(rows, WIDTHS[stages + 1], seed=seed + 50)


@functools.cache
def trained(stages: int, microbatches: int) -> list:
    """One process: of each SGD step the batch, the loss before, the gradients and the new weights;
    then all outputs. The last step's micro-batches are equal, for the memory. Every third number
    of micro-batches has 3 steps, the first with uneven ones; the others have 2, to save time."""
    model = layers(stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, equal = [], EACH * microbatches
    for seed, rows in enumerate((equal, equal) if microbatches % 3 else (ROWS, equal, equal)):
        optimizer.zero_grad()
        batches = data(seed, stages, rows)
        loss, grads = one_process(model, *batches)
        optimizer.step()
        steps.append((batches, loss, grads, copy.deepcopy(model.state_dict())))
    x, y = data(9, stages, equal)
    outputs = model(x).detach()
    return steps, outputs, float(mean_mse(outputs, y))


def compare_all(rank, tables) -> list[tuple]:
    """Of each table what is wrong, a line each, the numbers that all ranks must agree on, and
    the peak memory."""
    return [compare(rank, rows) for rows in tables.values()]


def compare(rank, rows: mp.Schedule) -> tuple:
    stages, wrong = rows.stages, []
    steps, outputs, last_loss = trained(stages, rows.microbatches)
    pipe = Pipeline(layers(stages), rows, mean_mse)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before, after = rows.microbatches % 4 == 1, rows.microbatches % 4 == 2
    losses, off = [pipe.evaluate(*steps[0][0]).loss] if before else [], 0.0
    for number, (batches, loss, grads, weights) in enumerate(steps):
        optimizer.zero_grad()
        step = pipe.step(*batches)
        losses.append(step.loss)
        if not abs(step.loss - loss) <= TOLERANCE:
            wrong.append(f"step {number}: loss {step.loss}, one process {loss}")
        if not (off := error(gradients(pipe), grads)) <= TOLERANCE:
            wrong.append(f"step {number}: gradients differ by {off}")
        optimizer.step()
        if not (off := error(pipe.state_dict(), weights)) <= TOLERANCE:
            wrong.append(f"step {number}: weights differ by {off}")
        if any(stage._kept or stage._deferred for stage in pipe._stages.values()):
            wrong.append(f"step {number}: something is left in a store")
        if pipe._meter.level:
            wrong.append(f"step {number}: {pipe._meter.level} bytes are left")
    if before:
        off = abs(losses[0] - losses[1])
    if after:
        seen = pipe.evaluate(*data(9, stages, EACH * rows.microbatches))
        losses.append(seen.loss)
        off = max(error({"": seen.outputs}, {"": outputs}), abs(seen.loss - last_loss))
    if not off <= TOLERANCE:
        wrong.append(f"evaluate: outputs or loss differ by {off}")
    return wrong, losses, step.peak_activation_bytes, step.timeline.levels[rank]


@functools.cache
def sizes_of(stages: int) -> mp.Costs:
    parts = cut(layers(stages), stages)
    return probe(parts, *data(1, stages, EACH), mean_mse, repeats=1).costs()


def check(tables: dict[str, mp.Schedule], ranks: int) -> None:
    everyone = on_ranks(compare_all, tables, ranks=ranks)
    wrong = []
    for number, (label, rows) in enumerate(tables.items()):
        found = [rank[number] for rank in everyone]
        wrong += [f"{label}, rank {r}, {line}" for r, one in enumerate(found) for line in one[0]]
        if any(one[1] != found[0][1] for one in found):
            wrong.append(f"{label}: the ranks see other losses: {[one[1] for one in found]}")
        predicted = mp.simulate(rows, sizes_of(rows.stages))
        measured = [one[2] for one in found]
        for r, (peak, wanted) in enumerate(zip(measured, predicted.peak_activations, strict=True)):
            if peak != pytest.approx(wanted, rel=0.02):
                wrong.append(f"{label}: rank {r} keeps {peak} bytes, predicted {wanted}")
            levels = [after for _, after in predicted.levels[r]]
            if [after for _, after in found[r][3]] != pytest.approx(levels, rel=0.02):
                wrong.append(f"{label}: rank {r}'s bytes after each action are not the predicted")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("ranks, count", [(2, 55), (3, 75), (4, 95)])
def test_every_schedule_and_size(ranks, count):
    tables = cases(ranks)
    assert len(tables) > count
    even = {"dualpipe", "chimera"} if ranks % 2 else set()
    assert {label.split()[0] for label in tables} == NAMES.keys() - even
    check(tables, ranks)


def test_one_rank():
    tables = cases(1, sizes=(1, 3))
    assert len(tables) > 20
    check(tables, 1)


def test_two_ways_on_eight_ranks():
    tables = (cases(8, ("dualpipe", "dualpipev"), (16,)) | cases(8, ("dualpipe",), (18,))
              | cases(8, ("chimera",), (2, 9, 16)))  # fmt: skip
    assert len(tables) == 6
    check(tables, 8)


# torch's own orders.


def order(name: str, ranks: int, microbatches: int, directory) -> mp.Schedule:
    """The rows of torch's class for two chunks, by way of its own file."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0,
                              stage_index=c * ranks, is_first=not c, is_last=False, submod=None)
              for c in range(2)]  # fmt: skip
    file = directory / f"{name}{ranks}{microbatches}.csv"
    getattr(schedules, name)(stages, microbatches)._dump_csv(file, format="compute_only")
    return mp.Schedule.parse(file.read_text())


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_orders_run(ranks, tmp_path):
    names = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    check({f"{name} P={ranks} M={m}": order(name, ranks, m, tmp_path)
           for name in names for m in (2 * ranks, 2 * ranks + 2)}, ranks)  # fmt: skip
