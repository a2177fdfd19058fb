"""Side-by-side benchmarks: `minipipe bench`. Both sides are measured in one run, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

from minipipe.engine.launch import launch
from minipipe.schedules import build

REPEATS = 21


@dataclass(frozen=True)
class Case:
    """Medians of one benchmark's two sides in `unit`, and the median of the paired ratios."""

    name: str
    case: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    peer: str

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line of text."""
        return (f"{self.name:<18}{self.case:<34}{self.ours:>12.4g} {self.unit:<10}"
                f"{self.peer} {self.theirs:.4g}: ratio {self.ratio:.3f}")  # fmt: skip


def _case(name: str, case: str, ours: list[float], theirs: list[float], unit: str,
          peer: str) -> Case:  # fmt: skip
    """Pair the repetitions of both sides."""
    return Case(name, case, median(ours), median(theirs), unit,
                median(ours) / median(theirs), peer)  # fmt: skip


def in_turns(repeats: int, *sides: Callable[[], object]) -> list[list[float]]:
    """Seconds of each side in each repetition, one after the other; the first is not counted."""
    import torch.distributed as dist

    times: list[list[float]] = [[] for _ in sides]
    for repetition in range(repeats + 1):
        for side, measured in zip(sides, times, strict=True):
            dist.barrier()
            start = time.perf_counter()
            side()
            if repetition:
                measured.append(time.perf_counter() - start)
    return times


def slowest(results: list[list[list[float]]]) -> list[list[float]]:
    """A step lasts until its slowest rank is done: from [rank][side][repetition]."""
    return [[max(ranks) for ranks in zip(*side, strict=True)] for side in zip(*results, strict=True)]


def _torch_schedule(name: str, modules, rank: int, ranks: int, microbatches: int, loss_fn):
    """torch's own schedule of this name over the stages that this rank holds there."""
    from torch.distributed import pipelining

    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved": pipelining.ScheduleInterleaved1F1B}  # fmt: skip
    import torch

    stages = [
        pipelining.PipelineStage(module, number, len(modules), torch.device("cpu"))
        for number, module in enumerate(modules)
        if number % ranks == rank
    ]
    held = stages if name == "interleaved" else stages[0]
    return kinds[name](held, microbatches, loss_fn=loss_fn)


def _step_sides(rank: int, ranks: int, name: str, layers, inputs, targets, microbatches: int,
                repeats: int):  # fmt: skip
    """Time our step and torch's on the same modules."""
    import copy

    from torch import nn

    from minipipe.engine.pipeline import Pipeline

    schedule = build(name, ranks=ranks, microbatches=microbatches)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(layers, schedule, loss_fn, memory_meter=False)
    theirs = _torch_schedule(name, copy.deepcopy(layers), rank, ranks, microbatches, loss_fn)
    theirs_inputs = [inputs] if rank == 0 else []
    last = {"target": targets, "losses": []} if rank == ranks - 1 else {}
    return in_turns(repeats, lambda: pipe.step(inputs, targets),
                    lambda: theirs.step(*theirs_inputs, **last))  # fmt: skip


def _tiny_step(rank: int, name: str, repeats: int):
    import torch
    from torch import nn

    torch.manual_seed(0)
    stages = 8 if name == "interleaved" else 4
    layers = [nn.Linear(16, 16) for _ in range(stages)]
    inputs, targets = torch.randn(64, 16), torch.randn(64, 16)
    return _step_sides(rank, 4, name, layers, inputs, targets, 32, repeats)


def step_overhead() -> list[Case]:
    """A step with next to no compute, 4 ranks, 32 micro-batches: what the engine itself costs."""
    cases = []
    for name in ("1f1b", "gpipe", "interleaved"):
        ours, theirs = slowest(launch(_tiny_step, name, REPEATS, ranks=4, timeout=120))
        cases.append(_case("step-overhead", name, ours, theirs, "s",
                           "torch.distributed.pipelining"))  # fmt: skip
    return cases


def _transformer_stage_rank(rank: int, repeats: int):
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True,
                                         norm_first=True) for _ in range(4)]  # fmt: skip
    layers = [nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])]
    inputs, targets = torch.randn(64, 49, 128), torch.randn(64, 49, 128)
    return _step_sides(rank, 2, "1f1b", layers, inputs, targets, 8, repeats)


def real_step() -> list[Case]:
    """Real compute, 2 ranks, 1F1B, 8 micro-batches: transformer blocks of 49 tokens, dim 128."""
    ours, theirs = slowest(launch(_transformer_stage_rank, REPEATS, ranks=2, timeout=240))
    return [_case("real-step", "1f1b", ours, theirs, "s", "torch.distributed.pipelining")]


BENCHMARKS: dict[str, Callable[[], list[Case]]] = {
    "step-overhead": step_overhead,
    "real-step": real_step,
}
