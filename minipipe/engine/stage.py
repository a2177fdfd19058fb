"""One stage on one rank: forward, backward, and forward again, for any micro-batch."""

from __future__ import annotations

import inspect
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minipipe.engine.split import Catch, Deferred
from minipipe.memory import Meter

_run_backward = Variable._execution_engine.run_backward


class _MicroBatch:
    """What a stage keeps of one micro-batch between its forward and its backward pass."""

    __slots__ = ("caught", "received", "roots", "entry", "inputs", "held", "random", "flags",
                 "deferred", "outputs")  # fmt: skip

    def __init__(self):
        self.caught = []  # one tuple of gradients, once the backward pass has reached the entry
        self.entry = ()  # the received tensors that need a gradient, as the graph's beginning
        self.received = []  # shape, dtype and device of those, where the entry isn't kept
        self.roots = []  # where the backward pass starts: at each output that was sent as
        # needing a gradient, or None where it turned out not to have one
        self.inputs = self.held = self.random = self.flags = None  # for a recompute only
        self.outputs = None  # only where the module runs pairs by itself
        self.deferred = None  # the weight gradients that wait for W, where the backward is split


def as_values(outputs) -> tuple[tuple, bool]:
    """A stage's outputs as a tuple, and whether it was a single value."""
    single = not isinstance(outputs, (tuple, list))
    return ((outputs,) if single else tuple(outputs)), single


class Stage:
    """The layers of one stage, and what is kept of the micro-batches on their way.

    Between stages goes one tensor or a tuple of tensors, None, integers, floats and booleans. A
    tuple reaches the first layer as one argument, as in nn.Sequential, or as several where that
    layer's `forward` takes several.
    """

    segments = 1  # parts between exchanges inside the stage

    def __init__(self, module: nn.Sequential, number: int, meter: Meter | None = None):
        self.module = module
        self.number = number
        self.meter = meter
        self._kept: dict[int, _MicroBatch] = {}
        self._deferred: dict[int, Deferred] = {}
        self._gate = torch.empty(0, requires_grad=True)
        self._leaves = self._untouched = False
        self._spread = _takes_several(module[0])
        self._offers = hasattr(module[0], "overlapped_forward_backward")
        tensors = (*module.parameters(), *module.buffers())
        self._own = {t.untyped_storage().data_ptr() for t in tensors}

    def _call(self, values: tuple, single: bool):
        if single or not self._spread:
            return self.module(values[0] if single else values)
        first, *others = self.module
        outputs = first(*values)
        for layer in others:
            outputs = layer(outputs)
        return outputs

    def forward(self, microbatch: int, values: tuple, single: bool, needs: tuple[bool, ...],
                finish=None, drop: bool = False, split: bool = False, flags=None):  # fmt: skip
        """Run the layers on one micro-batch; returns what they give.

        needs: which of the values want a gradient. finish: a function of the outputs, the loss
        on the last stage; its result is returned instead. drop: keep only the inputs, a
        `recompute` will follow. split: weight gradients wait for `backward_weight`. flags: which
        outputs were sent as needing a gradient, where this is a recompute.
        """
        kept = self._kept[microbatch] = _MicroBatch()
        kept.deferred = Deferred(self.module, self.meter) if split else None
        kept.flags = flags
        if not drop:
            return self._attach(kept, values, single, needs, finish)
        kept.inputs = values, single, needs, finish
        kept.random = _random_state()
        if self.meter is not None:
            kept.held = [self.meter.hold(v) for v in values if isinstance(v, torch.Tensor)]
        # An in-place operation must not change the kept inputs.
        copies = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)
        outputs = self.infer(copies, single, finish)
        # Whether an output needs a gradient shows only with a graph: take what may need one.
        trained = any(needs) or any(p.requires_grad for p in self.module.parameters())
        parts, alone = as_values(outputs)
        kept.flags = [trained and _differentiable(v) for v in parts]
        marked = (v.detach().requires_grad_() if flag else v
                  for v, flag in zip(parts, kept.flags, strict=True))  # fmt: skip
        return next(marked) if alone else tuple(marked)

    def forward_parts(self, microbatch: int, values: tuple, single: bool, needs, finish=None, *,
                      paired: bool = False, **options):  # fmt: skip
        """`forward` as a generator, which stops at each exchange inside the stage: here none.

        paired: let somebody else run the module: stop once with module, inputs, criterion and
        labels, and take outputs and loss.
        """
        if not paired:
            return self.forward(microbatch, values, single, needs, finish, **options)
        kept = self._kept[microbatch] = _MicroBatch()
        kept.deferred = Deferred(self.module, self.meter) if options["split"] else None
        values = self._enter(kept, values, needs)
        criterion = finish and (lambda *given: finish(given[0] if len(given) == 1 else given))
        with self._noting(kept):
            outputs, loss = yield self.module[0], list(values), criterion, []
        single = isinstance(outputs, torch.Tensor) or len(outputs) == 1
        outputs = outputs[0] if single and not isinstance(outputs, torch.Tensor) else outputs
        return self._leave(kept, outputs if finish is None else loss)

    def backward_parts(self, microbatch: int, gradients, paired: bool = False):
        """`backward` as a generator, like `forward_parts`; paired: stop once with module, loss,
        outputs and their gradients, of which somebody else runs the backward pass."""
        if not paired:
            return self.backward(microbatch, gradients)
        kept = self._kept.pop(microbatch)
        loss = kept.outputs[0] * gradients[0] if kept.outputs[0].dim() == 0 else None
        yield self.module[0], loss, kept.outputs, list(gradients)
        return self._received(kept)

    def infer(self, values: tuple, single: bool, finish=None):
        """Run the layers without keeping anything."""
        with torch.no_grad():
            outputs = self._call(values, single)
            return outputs if finish is None else finish(outputs)

    def recompute(self, microbatch: int) -> None:
        """Run the forward pass again, with the same dropout masks, and keep it this time."""
        with self._again(microbatch) as (kept, inputs):
            self._attach(kept, *inputs)

    @contextmanager
    def _again(self, microbatch: int):
        """A micro-batch and its inputs, with random numbers and buffers as in its forward pass."""
        kept = self._kept[microbatch]
        inputs, kept.inputs, kept.held = kept.inputs, None, None
        with _restored(kept.random), self._spare_buffers():
            yield kept, inputs

    def _attach(self, kept: _MicroBatch, values: tuple, single: bool, needs, finish):
        values = self._enter(kept, values, needs)
        if self.meter is None and kept.deferred is None:
            outputs = self._call(values, single)
            return self._leave(kept, outputs if finish is None else finish(outputs))
        with self._noting(kept):
            outputs = self._call(values, single)
            outputs = outputs if finish is None else finish(outputs)
        return self._leave(kept, outputs)

    @contextmanager
    def _noting(self, kept: _MicroBatch):
        """Count what autograd saves, and let weight gradients wait where the backward is split."""
        with (self.meter.watch() if self.meter is not None else nullcontext(),
              kept.deferred.noting() if kept.deferred is not None else nullcontext()):  # fmt: skip
            yield

    def _enter(self, kept: _MicroBatch, values: tuple, needs) -> tuple:
        """The values as the graph's beginning, where gradients are caught."""
        if self.number == 0:
            # Micro-batches are views of the user's batch and share its version; where the stage
            # begins in place, each may only change its own.
            values = tuple(v.data if isinstance(v, torch.Tensor) and not v.requires_grad else v
                           for v in values)  # fmt: skip
        if True not in needs:
            return values
        wanted = [v for v, needed in zip(values, needs, strict=True) if needed]
        if self._leaves:
            kept.entry = [v.detach().requires_grad_() for v in wanted]
        else:
            kept.received = [(v.shape, v.dtype, v.device) for v in wanted]
            kept.entry = Catch.apply(kept.caught, self._gate, *wanted)
        if len(wanted) == len(values):
            return tuple(kept.entry)
        fresh = iter(kept.entry)
        return tuple(next(fresh) if n else v for v, n in zip(values, needs, strict=True))

    def _leave(self, kept: _MicroBatch, outputs):
        """Remember where the backward pass will start."""
        if not self._leaves:
            self._untouched &= all(v._version == 0 for v in kept.entry)
            kept.entry = ()
        parts, _ = as_values(outputs)
        flags = [isinstance(v, torch.Tensor) and v.requires_grad for v in parts]
        # Edges instead of outputs: an output that no operation saved can go once it is sent.
        kept.roots = [
            _edge(v) if has_graph else None
            for v, has_graph, sent in zip(parts, flags, kept.flags or flags, strict=True)
            if sent
        ]
        if self._offers:
            kept.outputs = [v for v, has_graph in zip(parts, flags, strict=True) if has_graph]
        return outputs

    def backward(self, microbatch: int, gradients) -> list[torch.Tensor]:
        """Run the backward pass, or its first half where it is split; `.grad` of the parameters
        grows.

        gradients: one for each output that needs one. Returns one for each received value that
        needs one, zeros where the stage doesn't use it.
        """
        kept = self._kept.pop(microbatch)
        roots, gradients = tuple(kept.roots), tuple(gradients)
        if None in roots:
            gradients = tuple(g for r, g in zip(roots, gradients, strict=True) if r is not None)
            roots = tuple(r for r in roots if r is not None)
        if roots:
            _run_backward(roots, gradients, False, False, (), allow_unreachable=True,
                          accumulate_grad=True)  # fmt: skip
        if kept.deferred is not None:
            self._deferred[microbatch] = kept.deferred
        return self._received(kept)

    def _received(self, kept: _MicroBatch) -> list[torch.Tensor]:
        """The gradients that have arrived at the graph's beginning."""
        if kept.entry:
            return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    for leaf in kept.entry]  # fmt: skip
        caught = kept.caught[0] if kept.caught else (None,) * len(kept.received)
        return [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(caught, kept.received, strict=True)
        ]

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward` has left; `.grad` grows."""
        self._deferred.pop(microbatch).compute()

    def apart(self, value):
        """A copy of what is the module's own, which a later forward may change; else the value."""
        if not isinstance(value, torch.Tensor):
            return value
        own = value.untyped_storage().data_ptr() in self._own
        return value.clone() if own else value

    def begin(self, new: bool) -> None:
        """A training step begins. In one with a `new` form of batch it shows whether the stage
        changes in place what it receives. Where it doesn't, received tensors can be leaves: that
        costs less time, but keeps them until the backward pass even where no operation needs them,
        so not while memory is measured."""
        self._leaves = self._untouched and not new and self.meter is None
        self._untouched = self._untouched or new

    def wants(self, microbatch: int) -> int:
        """How many gradients `backward` takes for this micro-batch."""
        return len(self._kept[microbatch].roots)

    def clear(self) -> None:
        """Let go of everything, after a step that failed."""
        self._kept.clear()
        self._deferred.clear()

    @contextmanager
    def _spare_buffers(self):
        """Let a second forward pass change copies of the buffers: BatchNorm's running statistics
        have seen this micro-batch already."""
        own = [(m, name, b) for m in self.module.modules() for name, b in m._buffers.items()
               if b is not None]  # fmt: skip
        spare = [buffer.clone() for _, _, buffer in own]
        for (module, name, _), buffer in zip(own, spare, strict=True):
            module._buffers[name] = buffer
        try:
            with self.meter.exempt(spare) if self.meter is not None else nullcontext():
                yield
        finally:
            for module, name, buffer in own:
                module._buffers[name] = buffer


def _edge(output: torch.Tensor) -> GradientEdge:
    """Where an output's backward pass begins."""
    node = output.grad_fn
    return get_gradient_edge(output) if node is None else GradientEdge(node, output.output_nr)


def _takes_several(layer: nn.Module) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(layer.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return sum(p.kind in kinds and p.default is p.empty for p in parameters) > 1 or any(
        p.kind is p.VAR_POSITIONAL for p in parameters
    )


def _differentiable(value) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _random_state() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


@contextmanager
def _restored(states: list[torch.Tensor]):
    """The random numbers as they were, and afterwards as they are now."""
    now = _random_state()
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
    try:
        yield
    finally:
        torch.set_rng_state(now[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(now[1])
