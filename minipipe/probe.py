"""One micro-batch through all stages in one process: what each stage keeps, sends and takes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from minipipe.arguments import whole_number
from minipipe.costs import Costs, checked
from minipipe.engine.overlap import ChainedStage, make_stage
from minipipe.engine.stage import Stage, as_values
from minipipe.memory import Meter


@dataclass(frozen=True)
class Probe:
    """Measured for each stage and one micro-batch.

    input_size: bytes of the stage's input. forward_size: bytes that autograd keeps from F to B.
    weight_size: bytes kept from I to W, where the backward pass is split. message_size: bytes of
    the output. forward, backward: seconds of F and B, the least seen.
    """

    input_size: list[int]
    forward_size: list[int]
    weight_size: list[int]
    message_size: list[int]
    forward: list[float]
    backward: list[float]

    def costs(self, costs: Costs | None = None) -> Costs:
        """Costs with the measured sizes, so that a simulation predicts bytes."""
        costs = Costs() if costs is None else checked(costs)
        return replace(costs, input_size=self.input_size,
                       forward_size=self.forward_size, weight_size=self.weight_size,
                       message_size=self.message_size)  # fmt: skip


def probe(parts: list[nn.Sequential], inputs, targets, loss_fn: Callable,
          repeats: int = 5) -> Probe:  # fmt: skip
    """Run copies of all stages on one micro-batch; the model and the random numbers stay as they
    are. parts: what `partition.cut` gives. inputs, targets: one micro-batch [rows, …]. repeats: how
    often each stage is timed; ValueError for less than once."""
    whole_number(repeats=repeats)
    columns: list[list] = [[] for _ in range(6)]
    with torch.random.fork_rng():
        values, single = as_values(inputs)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            finish = (lambda outputs: loss_fn(outputs, targets)) if last else None
            part = copy.deepcopy(part)
            meter = Meter([*part.parameters(), *part.buffers()])
            stage = make_stage(part, number)
            stage.meter = meter
            meter.batch([*as_values(inputs)[0], *as_values(targets)[0]])
            row, values, single = _one_stage(stage, values, single, finish, repeats)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return Probe(*columns)


def _one_stage(stage: Stage | ChainedStage, values: tuple, single: bool, finish, repeats: int):
    """The figures of one stage, and what it hands to the next one."""
    needs = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
    times: list[list[float]] = [[], []]
    kept = waiting = 0
    for repeat in range(repeats + 1):
        split = repeat == 0
        fresh = tuple(v.detach().clone() if needed else v for v, needed in
                      zip(values, needs, strict=True))  # fmt: skip
        start = time.perf_counter()
        outputs = _whole(stage.forward_parts(0, fresh, single, needs, finish, split=split))
        middle = time.perf_counter()
        kept = stage.meter.level
        given, alone = as_values(outputs)
        gradients = [torch.ones_like(v) for v in given
                     if isinstance(v, torch.Tensor) and v.requires_grad]  # fmt: skip
        again = time.perf_counter()
        _whole(stage.backward_parts(0, gradients))
        if split:
            waiting = stage.meter.level
            stage.backward_weight(0)
            continue
        times[0].append(middle - start)
        times[1].append(time.perf_counter() - again)
    handed = tuple(
        v.detach().contiguous().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor)
        else v for v in given
    )  # fmt: skip
    row = (_bytes(values), kept, waiting, _bytes(given), min(times[0]), min(times[1]))
    return row, handed, alone


def _whole(parts: Iterator):
    """Do all parts of an action; what it returns."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


def _bytes(values: tuple) -> int:
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
