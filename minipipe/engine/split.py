"""The backward pass cut in two: I computes the gradients for the input, W those for the weights.

While a micro-batch goes forward, Linear, Conv2d, LayerNorm and GroupNorm use their weights as
constants, so that autograd computes no gradient for them, and note down their input; the gradient
for their output is caught on its way back. Both together give the weights' gradients whenever W
comes (Zero Bubble, arXiv 2401.10241, section 2). Parameters of any other module, of a subclass of
these four, or that are not plain parameters (parametrized ones), get their gradients in I; so does
a bias whose weight is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    __slots__ = ("layer", "weight", "bias", "given", "version", "extra", "gradient", "meter",
                 "held")  # fmt: skip

    def __init__(self, layer: nn.Module, given: torch.Tensor, extra: tuple, meter: Meter | None):
        self.layer, self.given, self.extra, self.meter = layer, given, extra, meter
        self.weight, self.bias = layer.weight, layer.bias  # a module looks them up slowly
        self.version, self.gradient = given._version, None
        self.held = [meter.hold(tensor) for tensor in (given, *extra)] if meter else []

    def append(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Take the gradient for the output."""
        if gradients[0] is None:
            return
        if self.gradient is not None:
            raise RuntimeError(f"a second gradient for one output of {self.layer}: what computes "
                               "gradients in its forward can't be split into I and W")  # fmt: skip
        self.gradient = gradients[0]
        if self.meter is not None:
            self.held.append(self.meter.hold(self.gradient))

    def catch(self, shape: torch.Size, gradient: torch.Tensor | None) -> None:
        """Take the gradient for the output, as a hook."""
        self.append((None if gradient is None else gradient.reshape(shape),))

    def forget(self) -> None:
        """Let go of everything; who keeps the output keeps its hook, and so this use."""
        self.given = self.extra = self.gradient = self.held = None


class Deferred:
    """The weight gradients of one micro-batch in one stage that still have to be computed."""

    def __init__(self, module: nn.Module, meter: Meter | None):
        self._module, self._meter = module, meter
        self._uses: list[_Use] = []
        self._gate = torch.empty(0, requires_grad=True)
        self._hooks = None

    @contextmanager
    def noting(self):
        """Within this context the layers' weights are constants, and their uses are noted."""
        self._hooks = _hooks()
        layers = [m for m in dict.fromkeys(_traceable(self._module))
                  if type(m) in _FORWARD and "forward" not in m.__dict__]  # fmt: skip
        for layer in layers:
            layer.__dict__["forward"] = partial(self._forward, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]

    def _forward(self, layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
        if (torch.compiler.is_compiling() or not torch.is_grad_enabled() or not _can_wait(layer)
                or _hooks() != self._hooks):  # fmt: skip
            return type(layer).forward(layer, input)
        output, *extra = _FORWARD[type(layer)](layer, input, layer.weight.detach(),
                                               None if layer.bias is None else layer.bias.detach())
        use = _Use(layer, input.detach(), tuple(extra), self._meter)
        self._uses.append(use)
        if output.requires_grad:
            # An in-place operation on a view cuts it from its history, but not what it views.
            whole = output._base if output._is_view() else output
            whole.register_hook(partial(use.catch, output.shape))
            return output
        return Catch.apply(use, self._gate, output)[0]

    def compute(self) -> None:
        """Compute what is missing; `.grad` of the parameters grows, and their hooks run."""
        totals: dict[nn.Parameter, torch.Tensor] = {}
        # The first layer's gradient came last, so that it may be in the processor's cache still.
        self._uses.reverse()
        while self._uses:
            use = self._uses.pop()
            if use.gradient is None:
                use.forget()
                continue
            if use.given._version != use.version:
                raise RuntimeError(f"the input of {use.layer} was modified by an inplace operation")
            weight, bias = use.weight, use.bias
            wanted = [weight.requires_grad, bias is not None and bias.requires_grad]
            found = _WEIGHT[type(use.layer)](use.layer, use.given.to(use.gradient.dtype),
                                             use.gradient, use.extra, wanted)  # fmt: skip
            use.forget()
            for parameter, gradient, want in zip((weight, bias), found, wanted, strict=True):
                if want:
                    if gradient.dtype != parameter.dtype:
                        gradient = gradient.to(parameter.dtype)
                    known = totals.get(parameter)
                    totals[parameter] = gradient if known is None else known + gradient
        if totals:
            Variable._execution_engine.run_backward(
                tuple(totals), tuple(totals.values()), False, False, (), allow_unreachable=True,
                accumulate_grad=True)  # fmt: skip


def _traceable(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those within, but none that is compiled: its graph is made once for all."""
    if "_orig_mod" not in module._modules and module._compiled_call_impl is None:
        yield module
        for child in module.children():
            yield from _traceable(child)


def _can_wait(layer: nn.Module) -> bool:
    """Whether a layer's weight gradients can wait for W: asked at each use, as a hook or a
    functional call may have put something else in the place of its parameters."""
    weight, bias = layer.weight, layer.bias
    plain = all(isinstance(p, nn.Parameter) for p in (weight, bias) if p is not None)
    simple = type(layer) is not nn.Conv2d or (
        layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    return (plain and simple and weight is not None and weight.requires_grad
            and not weight.is_complex())  # fmt: skip


def _hooks():
    """Who handles what autograd saves: within a checkpoint's own hooks, nothing may wait."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top and top(False)


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
    return _aten.convolution_backward.default(
        batch[1], batch[0], layer.weight.detach().to(given.dtype), [layer.out_channels],
        layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups,
        [False, *wanted])[1:]  # fmt: skip


def _layer_norm(layer, given, weight, bias):
    return torch.native_layer_norm(given, layer.normalized_shape, weight, bias, layer.eps)


def _layer_norm_weight(layer, given, gradient, extra, wanted):
    return _aten.native_layer_norm_backward.default(
        gradient, given, layer.normalized_shape, *extra, layer.weight.detach(),
        None if layer.bias is None else layer.bias.detach(), [False, *wanted])[1:]  # fmt: skip


def _group_norm(layer, given, weight, bias):
    rows, channels = given.shape[:2]
    return torch.native_group_norm(given, weight, bias, rows, channels,
                                   given.shape[2:].numel(), layer.num_groups,
                                   layer.eps)  # fmt: skip


def _group_norm_weight(layer, given, gradient, extra, wanted):
    rows, channels = given.shape[:2]
    return _aten.native_group_norm_backward.default(
        gradient.contiguous(), given.contiguous(), *extra, layer.weight.detach(), rows, channels,
        given.shape[2:].numel(), layer.num_groups, [False, *wanted])[1:]  # fmt: skip


_FORWARD = {nn.Linear: _linear, nn.Conv2d: _conv, nn.LayerNorm: _layer_norm,
            nn.GroupNorm: _group_norm}  # fmt: skip
_WEIGHT = {nn.Linear: _linear_weight, nn.Conv2d: _conv_weight,
           nn.LayerNorm: _layer_norm_weight, nn.GroupNorm: _group_norm_weight}  # fmt: skip
