"""The backward pass cut in two: I computes the gradients for the input, W those for the weights.

While a micro-batch goes forward, Linear, Conv2d, LayerNorm and GroupNorm use their weights as
constants, so that autograd computes no gradient for them, and note down their input; the gradient
for their output is caught on its way back. Both together give the weights' gradients whenever W
comes (Zero Bubble, arXiv 2401.10241, section 2). Parameters of any other module, of a subclass of
these four, or that are not plain parameters (parametrized ones), get their gradients in I.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable

from minipipe.memory import Meter

_aten = torch.ops.aten


class Catch(torch.autograd.Function):
    """Where a graph begins: hands the gradients that arrive there to `caught.append`.

    Given tensors could be leaves, but a leaf refuses an in-place operation, and one may follow.
    """

    @staticmethod
    def forward(ctx, caught, gate, *given):
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in given)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.caught.append(gradients)
        return (None, None, *(None for _ in gradients))


class _Use:
    """One use of a layer: its input, what the forward computed besides, and the gradient for its
    output as soon as it is there."""

    __slots__ = ("layer", "given", "version", "extra", "gradient", "meter", "held")

    def __init__(self, layer: nn.Module, given: torch.Tensor, extra: tuple, meter: Meter | None):
        self.layer, self.given, self.extra, self.meter = layer, given, extra, meter
        self.version, self.gradient = given._version, None
        self.held = [meter.hold(tensor) for tensor in (given, *extra)] if meter else []

    def append(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Take the gradient for the output."""
        self.gradient = gradients[0]
        if self.meter is not None:
            self.held.append(self.meter.hold(self.gradient))


class Deferred:
    """The weight gradients of one micro-batch in one stage that still have to be computed."""

    def __init__(self, module: nn.Module, meter: Meter | None):
        self._module, self._meter = module, meter
        self._uses: list[_Use] = []
        self._gate = torch.empty(0, requires_grad=True)

    @contextmanager
    def noting(self):
        """Within this context the layers' weights are constants, and their uses are noted."""
        layers = [m for m in self._module.modules() if _can_wait(m)]
        for layer in layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Module, given: torch.Tensor) -> torch.Tensor:
        output, *extra = _FORWARD[type(layer)](layer, given, layer.weight.detach(),
                                               None if layer.bias is None else layer.bias.detach())
        use = _Use(layer, given.detach(), tuple(extra), self._meter)
        self._uses.append(use)
        if output.requires_grad:
            output.register_hook(lambda gradient: use.append((gradient,)))
            return output
        return Catch.apply(use, self._gate, output)[0]

    def compute(self) -> None:
        """Compute what is missing; `.grad` of the parameters grows, and their hooks run."""
        totals: dict[nn.Parameter, torch.Tensor] = {}
        while self._uses:
            use = self._uses.pop()
            if use.gradient is None:
                continue
            if use.given._version != use.version:
                raise RuntimeError(f"the input of {use.layer} was modified by an inplace operation")
            layer = use.layer
            wanted = [layer.weight.requires_grad, layer.bias is not None
                      and layer.bias.requires_grad]  # fmt: skip
            found = _WEIGHT[type(layer)](layer, use.given.to(use.gradient.dtype), use.gradient,
                                         use.extra, wanted)  # fmt: skip
            for parameter, gradient, want in zip((layer.weight, layer.bias), found, wanted,
                                                 strict=True):  # fmt: skip
                if want:
                    gradient = gradient.to(parameter.dtype)
                    known = totals.get(parameter)
                    totals[parameter] = gradient if known is None else known + gradient
        if totals:
            Variable._execution_engine.run_backward(
                tuple(totals), tuple(totals.values()), False, False, (), allow_unreachable=True,
                accumulate_grad=True)  # fmt: skip


def _can_wait(layer: nn.Module) -> bool:
    """Whether a layer's weight gradients can wait for W."""
    if type(layer) not in _FORWARD or "forward" in layer.__dict__:
        return False
    weight, bias = layer.weight, layer.bias
    trained = [p for p in (weight, bias) if p is not None and p.requires_grad]
    plain = all(isinstance(p, nn.Parameter) and p.is_leaf for p in trained)
    simple = type(layer) is not nn.Conv2d or (
        layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    return weight is not None and bool(trained) and plain and simple


def _linear(layer, given, weight, bias):
    return (nn.functional.linear(given, weight, bias),)


def _linear_weight(layer, given, gradient, extra, wanted):
    rows = gradient.reshape(-1, gradient.shape[-1])
    return (rows.T @ given.reshape(-1, given.shape[-1]) if wanted[0] else None,
            rows.sum(0) if wanted[1] else None)  # fmt: skip


def _conv(layer, given, weight, bias):
    return (nn.functional.conv2d(given, weight, bias, layer.stride, layer.padding, layer.dilation,
                                 layer.groups),)  # fmt: skip


def _conv_weight(layer, given, gradient, extra, wanted):
    batch = (given, gradient) if given.dim() == 4 else (given[None], gradient[None])
    return _aten.convolution_backward(
        batch[1], batch[0], layer.weight.detach().to(given.dtype), [layer.out_channels],
        layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups,
        [False, *wanted])[1:]  # fmt: skip


def _layer_norm(layer, given, weight, bias):
    return torch.native_layer_norm(given, layer.normalized_shape, weight, bias, layer.eps)


def _layer_norm_weight(layer, given, gradient, extra, wanted):
    return _aten.native_layer_norm_backward(
        gradient, given, layer.normalized_shape, *extra, layer.weight.detach(),
        None if layer.bias is None else layer.bias.detach(), [False, *wanted])[1:]  # fmt: skip


def _group_norm(layer, given, weight, bias):
    rows, channels = given.shape[:2]
    return torch.native_group_norm(given, weight, bias, rows, channels,
                                   given[0, 0].numel(), layer.num_groups, layer.eps)  # fmt: skip


def _group_norm_weight(layer, given, gradient, extra, wanted):
    rows, channels = given.shape[:2]
    return _aten.native_group_norm_backward(
        gradient.contiguous(), given.contiguous(), *extra, layer.weight.detach(), rows, channels,
        given[0, 0].numel(), layer.num_groups, [False, *wanted])[1:]  # fmt: skip


_FORWARD = {nn.Linear: _linear, nn.Conv2d: _conv, nn.LayerNorm: _layer_norm,
            nn.GroupNorm: _group_norm}  # fmt: skip
_WEIGHT = {nn.Linear: _linear_weight, nn.Conv2d: _conv_weight,
           nn.LayerNorm: _layer_norm_weight, nn.GroupNorm: _group_norm_weight}  # fmt: skip
