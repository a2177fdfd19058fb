"""What a schedule gains over 1F1B on emulated devices, and what the split backward costs."""

from __future__ import annotations

import time
from fractions import Fraction

from minipipe.costs import Costs
from minipipe.measure import LIMIT, Case, case
from minipipe.ranks.launch import launch
from minipipe.schedule import Schedule
from minipipe.schedules import build


def _gain(name: str, what: str, baseline: Schedule, faster: Schedule, costs: Costs,
          exchanges: bool = False) -> Case:  # fmt: skip
    """The paced step of a baseline over that of a faster schedule, in turns in one launch."""
    theirs, ours = zip(*launch(_paced_pair, baseline, faster, costs, exchanges, 5, ranks=4,
                               timeout=LIMIT)[0], strict=True)  # fmt: skip
    return case(name, what, list(theirs), list(ours), "s", f"minipipe, {faster.name}")


def _paced_pair(rank: int, baseline: Schedule, faster: Schedule, costs: Costs, exchanges: bool,
                repeats: int):  # fmt: skip
    """Makespans (baseline, faster) of each repetition, on emulated devices."""
    import torch
    from torch import nn

    from minipipe.emulation import Pace
    from minipipe.models.moe import LAYERS, moe
    from minipipe.pipeline import Pipeline

    batch = torch.randn(64, 32), torch.randn(64, 32)
    pipes = []
    for schedule in (baseline, faster):
        blocks = 8 // schedule.stages
        layers, cuts = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)], blocks
        if exchanges:
            layers, cuts = list(moe(depth=8)), blocks * LAYERS
        pipes.append(Pipeline(nn.Sequential(*layers), schedule, nn.functional.mse_loss,
                              cuts=[cuts] * schedule.stages))  # fmt: skip
        pipes[-1].step(*batch)
    found = []
    for _ in range(repeats):
        found.append([])
        for pipe in pipes:
            pace = Pace(costs)
            found[-1].append(pipe.step(*batch, pace=pace).timeline.makespan)
            if pace.overruns > 0.01 * pace.actions:
                raise RuntimeError(f"{pace.overruns} of {pace.actions} actions overran their slots")
    return found


def _named(name: str, **arguments) -> Schedule:
    return build(name, ranks=4, microbatches=8, **arguments)


SLOT = 0.04  # seconds of F, I and W of a whole share each, where gains are measured


def interleaved_gain() -> list[Case]:
    """1F1B's paced step over interleaved's with 2 chunks: Megatron's 10 % and more; ideal 1.158."""
    return [_gain("interleaved-gain", "2 chunks, ideal 1.158", _named("1f1b"),
                  _named("interleaved"), Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def zero_bubble_gain() -> list[Case]:
    """1F1B's paced step over ZB-H1's, with the same largest peak of the ranks; ideal 1.222."""
    return [_gain("zero-bubble-gain", "zb-h1, ideal 1.222", _named("1f1b"), _named("zb-h1"),
                  Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def zb_v_gain() -> list[Case]:
    """1F1B's paced step over ZB-V's; ideal 1.294."""
    return [_gain("zb-v-gain", "zb-v, ideal 1.294", _named("1f1b"), _named("zb-v"),
                  Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def dualpipe_overlap() -> list[Case]:
    """A quarter of each action is exchange, which pairs hide: 1F1B's paced step over theirs."""
    costs = Costs(SLOT, SLOT, SLOT, exchange=Fraction(1, 4))
    return [_gain("dualpipe-overlap", f"{name}, ideal {ideal}", _named("1f1b"), _named(name), costs,
                  exchanges=True)
            for name, ideal in (("dualpipe", 1.435), ("dualpipev", 1.419))]  # fmt: skip


def _backward_times(rank: int, kind: str, repeats: int):
    """Seconds of the fused B, and of I and W together, for one stage and micro-batch."""
    import copy

    import torch
    from torch import nn

    from minipipe.engine.stage import Stage
    from minipipe.models import resnet, vit

    blocks = (vit(dim=128, depth=4, heads=4, patch=4) if kind == "transformer" else
              resnet(width=48, depth=4))  # fmt: skip
    inputs = torch.randn(8, 49, 128) if kind == "transformer" else torch.randn(8, 48, 14, 14)
    module = nn.Sequential(*list(blocks)[1:-1])
    stages = [Stage(copy.deepcopy(module), 1) for _ in range(2)]
    gradient = torch.randn_like(module(inputs))
    times: list[list[float]] = [[], []]
    for repetition in range(repeats + 3):
        for split, (stage, measured) in enumerate(zip(stages, times, strict=True)):
            stage.forward(0, (inputs,), True, (True,), split=bool(split))
            start = time.perf_counter()
            stage.backward(0, [gradient])
            if split:
                stage.backward_weight(0)
            if repetition >= 3:
                measured.append(time.perf_counter() - start)
    return times


def split_overhead() -> list[Case]:
    """Real compute, one rank: I then W over the fused backward."""
    cases = []
    for kind in ("transformer", "convolution"):
        fused, split = launch(_backward_times, kind, 40, ranks=1, threads=1, timeout=LIMIT)[0]
        cases.append(case("split-overhead", kind, split, fused, "s", "fused backward"))
    return cases
