"""The same model and micro-batches by torch.distributed.pipelining, in the same ranks."""

import copy

import pytest
import torch
from ranks import batch, error, gradients, mean_mse, mlp, on_ranks, schedule
from torch import nn

from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)

# our name and arguments, torch's class, chunks
PAIRS = [
    ("gpipe", {}, "ScheduleGPipe", 1),
    ("1f1b", {}, "Schedule1F1B", 1),
    ("interleaved", {"chunks": 2}, "ScheduleInterleaved1F1B", 2),
    ("breadth-first", {"chunks": 2}, "ScheduleLoopedBFS", 2),
]


def by_torch(name, stages, own, m, x, y, rank):
    """Gradients by torch's class, under the model's names, and the micro-batches' losses."""
    from torch.distributed import pipelining

    parts = [pipelining.PipelineStage(stages[s], s, len(stages), torch.device("cpu")) for s in own]
    made = getattr(pipelining, name)(parts[0] if len(own) == 1 else parts, m, loss_fn=mean_mse)
    losses = []
    keywords = {"target": y, "losses": losses} if own[-1] == len(stages) - 1 else {}
    made.step(*([x] if rank == 0 else []), **keywords)
    return gradients(nn.ModuleDict({str(s): stages[s] for s in own})), losses


def compare(rank, name, more, theirs, chunks, ranks, sizes):
    wrong = []
    for m in sizes:
        rows = schedule(name, ranks, m, **more)
        start = [nn.Sequential(*mlp(2, seed=s)) for s in range(ranks * chunks)]
        x, y = batch(2 * m), batch(2 * m, seed=2)
        wanted, losses = by_torch(theirs, copy.deepcopy(start), rows.stages_of(rank), m, x, y, rank)
        pipe = Pipeline(copy.deepcopy(start), rows, mean_mse)
        loss = pipe.step(x, y).loss
        found = gradients(pipe)
        assert found.keys() == wanted.keys() and found
        wrong.append(error(found, wanted))
        if losses:
            wrong.append(abs(loss - sum(float(v) for v in losses) / m))
    return max(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name, more, theirs, chunks", PAIRS)
def test_gradients_equal_torchs(name, more, theirs, chunks, ranks):
    """torch wants at least as many micro-batches as ranks, and batches that divide evenly."""
    sizes = [ranks, 2 * ranks] if chunks > 1 else [ranks, ranks + 1, 2 * ranks + 1]
    found = on_ranks(compare, name, more, theirs, chunks, ranks, sizes, ranks=ranks)
    assert max(found) < 1e-10
