"""Cut a model into stages: which layers go to which rank, chosen by costs or given by hand.

    balance([1, 1, 1, 3], stages=2)        → [3, 1]
    cut(model, stages=4)                   → four nn.Sequential, in the model's order

Importing this module does not import torch.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from fractions import Fraction
from itertools import accumulate, chain, islice
from math import lcm
from numbers import Rational
from operator import index
from statistics import median
from typing import TYPE_CHECKING

from minipipe.arguments import whole_number

if TYPE_CHECKING:
    from torch import Tensor, nn


def balance(costs: Sequence, stages: int) -> list[int]:
    """Number of layers of each stage, so that the costliest stage costs as little as possible.

    costs: one number a layer, ≥ 0, in any unit; ints, Fractions and floats are added exactly. Of
    several such cuts the one is taken whose second costliest stage costs least, and so on; then the
    one with the most layers in its early stages. No stage is empty. Work: layers² × stages.
    ValueError for more stages than layers and for a bad cost.
    Source: ordered partition (Skiena, The Algorithm Design Manual, third edition, section 10.7).
    """
    costs = _listed("costs", costs, "number a layer, such as [1, 1, 3]")
    exact = [_exact(layer, cost) for layer, cost in enumerate(costs)]
    layers = len(exact)
    stages = _stages(stages, layers)
    unit = lcm(*(cost.denominator for cost in exact))
    before = [0, *accumulate(int(cost * unit) for cost in exact)]

    # best[first]: for the layers from `first` on in `left` stages, the stages' costs, largest
    # first, and their numbers of layers, negative so that `min` prefers long early stages. What is
    # best for the rest stays best when a stage is added in front.
    best: dict[int, tuple[tuple, tuple]] = {layers: ((), ())}
    for left in range(1, stages + 1):
        best = {
            first: min(
                (
                    tuple(sorted((*best[end][0], before[end] - before[first]), reverse=True)),
                    (first - end, *best[end][1]),
                )
                for end in range(first + 1, layers + 1)
                if end in best
            )
            for first in range(layers - left + 1)
        }
    return [-count for count in best[0][1]]


def _exact(layer: int, cost) -> Fraction:
    """`cost` without rounding, so that no sum of floats decides between two cuts."""
    if not hasattr(cost, "__float__") or not 0 <= cost < float("inf"):
        raise ValueError(f"costs[{layer}]={cost!r}; legal are finite numbers of at least 0")
    return Fraction(cost) if isinstance(cost, Rational) else Fraction(float(cost))


def _listed(name: str, values, what: str) -> list:
    """An argument as a list; TypeError where it is none."""
    if isinstance(values, (str, bytes, type)) or not hasattr(values, "__iter__"):
        shown = f"the class {values.__name__}" if isinstance(values, type) else repr(values)
        raise TypeError(f"{name} must be a list of one {what}, not {shown}")
    return list(values)


def _stages(stages: int, layers: int) -> int:
    """`stages` as a checked int."""
    if not hasattr(stages, "__index__") or not 1 <= stages <= layers:
        raise ValueError(
            f"stages={stages!r} with {layers} layers: each stage needs a layer of its own, "
            f"so stages must be a whole number from 1 to {layers}"
        )
    return index(stages)


def cut(
    model: nn.Module | Sequence[nn.Module],
    stages: int | None = None,
    cuts: Sequence[int] | None = None,
    costs: Sequence | None = None,
) -> list[nn.Sequential]:
    """The model's layers as one nn.Sequential a stage; the modules are the model's own, not copies.

    model: an nn.Sequential, cut between its children, or a list of one module a stage. The parts'
    state_dict() has the names of the full model's (for a list, of nn.Sequential(*list)).
    cuts: the number of layers of each stage, honoured as given. Otherwise `costs`, one number a
    layer, are balanced, and without either each layer's number of parameters + 1 is its cost, so
    that all ranks agree. ValueError for illegal cuts and for a parameter or buffer that stands in
    two stages; TypeError for a model that can't be cut.
    """
    from torch import nn

    if isinstance(model, (list, tuple)):
        if cuts is not None or costs is not None:
            raise ValueError("cuts and costs are for an nn.Sequential; a list is already cut")
        if not model or not all(isinstance(stage, nn.Module) for stage in model):
            raise TypeError("model: a list needs one nn.Module a stage, at least one")
        if stages is not None and stages != len(model):
            raise ValueError(f"stages={stages}, but the list has {len(model)} modules, one a stage")
        layers = [(str(stage), module) for stage, module in enumerate(model)]
        cuts = [1] * len(layers)
    else:
        layers = _layers(model)
        cuts = _cuts(layers, stages, cuts, costs)
    parts, rest = [], iter(layers)
    for count in cuts:
        parts.append(nn.Sequential(OrderedDict(islice(rest, count))))
    _refuse_shared(parts)
    for part in parts:
        part.training = any(layer.training for layer in part)
    return parts


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The named children of an nn.Sequential; TypeError with a hint for any other module."""
    from torch import nn

    kind, reason = type(model).__name__, None
    if not isinstance(model, nn.Sequential):
        reason = f"model is a {kind}; only an nn.Sequential can be cut"
    elif type(model).forward is not nn.Sequential.forward:
        reason = f"model is a {kind} with a forward of its own, which a cut would lose"
    elif own := [*model._parameters, *model._buffers]:
        reason = f"model itself owns {own[0]!r}, which no stage would get"
    if reason:
        raise TypeError(
            f"{reason}. Write it as nn.Sequential(first, second, …) with functions as modules "
            "(nn.Flatten for torch.flatten), or pass a list of one module a stage"
        )
    return list(model._modules.items())  # named_children() would skip a module that comes twice


def _cuts(layers: list, stages: int | None, cuts, costs) -> list[int]:
    """Checked number of layers of each stage."""
    if cuts is None:
        if stages is None:
            raise ValueError("stages is missing: how many stages, or cuts, the layers of each")
        if costs is None:
            costs = [1 + sum(p.numel() for p in module.parameters()) for _, module in layers]
        costs = _listed("costs", costs, "number a layer, such as [1, 1, 3]")
        if len(costs) != len(layers):
            raise ValueError(f"costs has {len(costs)} numbers; legal is one a layer, {len(layers)}")
        return balance(costs, stages)
    if costs is not None:
        raise ValueError("cuts and costs exclude each other: cuts are taken as they are")
    cuts = _listed("cuts", cuts, "number of layers a stage, such as [2, 2]")
    if not cuts or not all(hasattr(count, "__index__") and count >= 1 for count in cuts):
        raise ValueError(f"cuts={cuts}: each stage needs a whole number of layers, at least 1")
    if stages is not None and len(cuts) != stages:
        raise ValueError(f"cuts={cuts} has {len(cuts)} numbers; legal is one a stage, {stages}")
    if sum(cuts) != len(layers):
        raise ValueError(f"cuts={cuts} sums to {sum(cuts)}; the model has {len(layers)} layers")
    return [index(count) for count in cuts]


def _refuse_shared(parts: list[nn.Sequential]) -> None:
    """ValueError, with both names, if a parameter or buffer stands in two stages."""
    seen: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        named = (part.named_parameters, part.named_buffers)
        for name, tensor in chain(*(tensors(remove_duplicate=False) for tensors in named)):
            other, first = seen.setdefault(id(tensor), (stage, name))
            if other != stage:
                raise ValueError(
                    f"parameter {first!r} of stage {other} is also {name!r} of stage {stage}; it "
                    "may stand in one stage only: choose cuts that keep both in one stage, or "
                    "give each layer its own copy"
                )


def measure_costs(model: nn.Sequential, inputs: Tensor, repeats: int = 5) -> list[float]:
    """Seconds that each layer takes for forward and backward: medians over `repeats` runs.

    inputs: one micro-batch as in training; each layer takes and gives one tensor. A copy is run, so
    gradients and buffers stay. Ranks measure different times: let one rank measure and send its
    cuts to the others. A first run is not counted. TypeError for a model that can't be cut,
    ValueError for less than one repeat.
    """
    import torch

    whole_number(repeats=repeats)
    layers = [layer for _, layer in deepcopy(_layers(model))]
    seconds = [[] for _ in layers]
    with torch.random.fork_rng(devices=[]):  # dropout draws nothing from the caller's numbers
        for _ in range(repeats + 1):
            values = inputs.clone()
            for place, layer in enumerate(layers):
                if place and values.is_floating_point():  # a clone, for layers that begin in place
                    values = values.requires_grad_().clone()
                start = time.perf_counter()
                outputs = layer(values)
                if outputs.requires_grad:
                    outputs.backward(torch.ones_like(outputs))
                if outputs.is_cuda:
                    torch.cuda.synchronize(outputs.device)
                seconds[place].append(time.perf_counter() - start)
                values = outputs.detach()
    return [median(taken[1:]) for taken in seconds]
