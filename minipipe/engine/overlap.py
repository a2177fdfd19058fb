"""Stages with exchanges inside, and pairs that hide them behind the other micro-batch's compute.

An exchange is communication with other devices within a stage: a mixture of experts sends tokens
to the experts' devices and back. A lone action has to wait for it; in an overlapped pair one
micro-batch computes while the other one exchanges (DeepSeek-V3, arXiv 2412.19437, section 3.2.1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import torch
from torch import nn

from minipipe.engine.stage import Stage, as_values
from minipipe.memory import Meter


class Exchange(nn.Module):
    """Marks, as a layer of an nn.Sequential, where a stage exchanges its values with other devices.
    Here it passes them on; on an emulated device it takes `Costs.exchange` of an action's time."""

    def forward(self, values):
        return values


class ChainedStage(Stage):
    """A stage that is cut at its exchanges: a chain of stages on one rank, run part by part.

    Its `forward_parts` and `backward_parts` stop there, so that something else can be computed.
    """

    def __init__(self, module: nn.Sequential, number: int, parts: list[list[nn.Module]]):
        self._chain = [Stage(nn.Sequential(*layers), number) for layers in parts]
        super().__init__(module, number)
        self.segments = len(self._chain)

    @property
    def meter(self) -> Meter | None:
        """Counts what all parts keep."""
        return self._chain[0].meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        for stage in self._chain:
            stage.meter = meter

    def forward_parts(self, microbatch: int, values: tuple, single: bool, needs, finish=None, *,
                      drop: bool = False, **options) -> Generator[None, None, object]:  # fmt: skip
        """As `Stage.forward`, but stops (yields) at each exchange."""
        if not drop:
            options.pop("paired", None)
            return (yield from self._forward(microbatch, values, single, needs, finish, **options))
        outputs = self.forward(microbatch, values, single, needs, finish, True, options["split"])
        for _ in self._chain[1:]:
            yield
        return outputs

    def _forward(self, microbatch: int, values: tuple, single: bool, needs, finish, **options):
        *chain, last = self._chain
        for stage in chain:
            outputs = stage.forward(microbatch, values, single, needs, split=options["split"])
            values, single = as_values(outputs)
            needs = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
            # An exchange gives new tensors; the next part may change them in place.
            values = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)
            yield
        return last.forward(microbatch, values, single, needs, finish, **options)

    def backward_parts(self, microbatch: int, gradients,
                       paired: bool = False) -> Generator[None, None, list]:  # fmt: skip
        """As `Stage.backward`, but stops (yields) at each exchange."""
        first, *chain = self._chain
        for stage in reversed(chain):
            gradients = stage.backward(microbatch, gradients)
            yield
        return first.backward(microbatch, gradients)

    def infer(self, values: tuple, single: bool, finish=None):
        """Run the layers without keeping anything."""
        for stage in self._chain[:-1]:
            values, single = as_values(stage.infer(values, single))
        return self._chain[-1].infer(values, single, finish)

    def recompute(self, microbatch: int) -> None:
        """Run the forward pass again, part by part."""
        with self._again(microbatch) as (kept, inputs):
            for _ in self._forward(microbatch, *inputs, split=kept.deferred is not None,
                                   flags=kept.flags):  # fmt: skip
                pass
        del self._kept[microbatch]

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that are left."""
        for stage in reversed(self._chain):
            stage.backward_weight(microbatch)

    def begin(self, new: bool) -> None:
        """As `Stage.begin`."""
        for stage in self._chain:
            stage.begin(new)

    def wants(self, microbatch: int) -> int:
        """How many gradients the backward pass takes for this micro-batch."""
        return self._chain[-1].wants(microbatch)

    def clear(self) -> None:
        """Let go of everything, after a step that failed."""
        for stage in self._chain:
            stage.clear()
        super().clear()


def make_stage(module: nn.Sequential, number: int) -> Stage:
    """The stage of these layers, cut at its exchanges where they part it."""
    layers = list(module)
    if len(layers) == 1 and type(layers[0]) is nn.Sequential:
        layers = list(layers[0])
    parts: list[list[nn.Module]] = [[]]
    for layer in layers:
        if not isinstance(layer, Exchange):
            parts[-1].append(layer)
        elif parts[-1]:
            parts.append([])
    parts = [part for part in parts if part]
    return ChainedStage(module, number, parts) if len(parts) > 1 else Stage(module, number)


def offered(forward: Stage, backward: Stage) -> bool:
    """Whether two stages run their pairs by a method of their own, as DeepSeek's code has it:
    both are one module each, of one class with a class method `overlapped_forward_backward`."""
    kinds = {type(stage.module[0]) if len(stage.module) == 1 else None
             for stage in (forward, backward)}  # fmt: skip
    return len(kinds) == 1 and hasattr(kinds.pop(), "overlapped_forward_backward")


def run_offered(forward: Generator, backward: Generator) -> Iterator[None]:
    """Run a pair by its stages' own method, called as in DeepSeek's code:

    `overlapped_forward_backward(module0, inputs0, criterion0, labels0, module1, loss1, outputs1,
    output_grads1)` returns `outputs0, loss0`; it runs module0 forward on inputs0 (and criterion0,
    where that isn't None, on outputs0 and labels0), and backward from loss1, or from outputs1 with
    output_grads1 where loss1 is None.
    """
    ahead, back = next(forward), next(backward)
    given = type(ahead[0]).overlapped_forward_backward(*ahead, *back)
    for work, result in ((forward, given), (backward, None)):
        with contextlib.suppress(StopIteration):
            work.send(result)
    return
    yield
