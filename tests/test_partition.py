"""The cut: optimal, complete, honoured, refused with a reason."""

import sys
from fractions import Fraction
from itertools import combinations
from subprocess import run

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minipipe.costs import Costs
from minipipe.models import mlp, resnet
from minipipe.partition import balance, cut, measure_costs

integers = st.lists(st.integers(0, 9), min_size=1, max_size=8)
fractions = st.lists(st.fractions(0, 3, max_denominator=6), min_size=1, max_size=8)
floats = st.lists(st.floats(0, 1e9), min_size=1, max_size=8)


def all_cuts(layers: int, stages: int) -> list[list[int]]:
    ends = [(0, *middle, layers) for middle in combinations(range(1, layers), stages - 1)]
    return [[b - a for a, b in zip(e, e[1:], strict=False)] for e in ends]


def loads(costs: list, cuts: list[int]) -> list:
    """The stages' exact costs, largest first."""
    costs = [Fraction(cost) for cost in costs]
    ends = [sum(cuts[: stage + 1]) for stage in range(len(cuts))]
    sums = [sum(costs[end - n : end]) for end, n in zip(ends, cuts, strict=True)]
    return sorted(sums, reverse=True)


@given(costs=st.one_of(integers, fractions, floats), data=st.data())
@settings(max_examples=200, deadline=None)
def test_balance_is_the_best_of_all_cuts(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    found = balance(costs, stages)
    assert sum(found) == len(costs) and len(found) == stages and min(found) >= 1
    candidates = all_cuts(len(costs), stages)
    best = min(loads(costs, cuts) for cuts in candidates)
    assert loads(costs, found) == best
    assert found == max(cuts for cuts in candidates if loads(costs, cuts) == best)


def test_balance_by_hand():
    assert balance([1, 1, 1, 3], 2) == [3, 1]
    assert balance([1] * 10, 4) == [3, 3, 2, 2]
    assert balance([0, 0, 0], 3) == [1, 1, 1]
    assert balance([0.1, 0.2, 0.3, 0.6], 2) == [3, 1]
    assert balance(torch.ones(4), 2) == [2, 2]


@pytest.mark.parametrize("stages", [0, -1, 4, 2.0, None])
def test_balance_refuses_the_number_of_stages(stages):
    with pytest.raises(ValueError, match=r"stages=.* 3 layers.* 1 to 3"):
        balance([1, 1, 1], stages)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), "1", None])
def test_balance_refuses_a_cost(cost):
    with pytest.raises(ValueError, match=r"costs\[1\]"):
        balance([1, cost, 1], 2)


def test_without_torch():
    code = "import minipipe.partition, sys; sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("arguments", [{"stages": 4}, {"stages": 8}, {"cuts": [1, 3, 4, 2]}])
def test_parts_together_are_the_model(arguments):
    model = resnet(width=4)
    parts = cut(model, **arguments)
    assert [len(part) for part in parts] == arguments.get("cuts", [len(part) for part in parts])
    names = [name for part in parts for name in part.state_dict()]
    assert names == list(model.state_dict())
    assert [layer for part in parts for layer in part] == list(model)
    inputs = outputs = torch.randn(2, 1, 28, 28)
    for part in parts:
        outputs = part(outputs)
    assert torch.equal(outputs, model(inputs))


def test_default_and_costs():
    model = resnet()
    assert [len(part) for part in cut(model, 4)] == [3, 2, 2, 3]
    assert [len(part) for part in cut(model, 8)] == [2, 1, 1, 1, 1, 1, 1, 2]
    assert [len(part) for part in cut(model, 2, costs=[9] + [1] * 9)] == [1, 9]


def test_a_module_used_twice_is_not_lost():
    model = nn.Sequential(nn.Linear(2, 2), relu := nn.ReLU(), nn.Linear(2, 2), relu)
    parts = cut(model, cuts=[2, 2])
    assert [layer for part in parts for layer in part] == [model[0], relu, model[2], relu]


def test_list_of_stages():
    modules = [nn.Linear(2, 2), mlp(2, 2), nn.Linear(2, 2)]
    parts = cut(modules, 3)
    names = [name for part in parts for name in part.state_dict()]
    assert names == list(nn.Sequential(*modules).state_dict())
    for arguments in ({"stages": 2}, {"cuts": [1, 1, 1]}, {"costs": [1, 1, 1]}):
        with pytest.raises(ValueError, match="list"):
            cut(modules, **arguments)
    for wrong in ([], [nn.ReLU(), torch.relu]):
        with pytest.raises(TypeError, match="list"):
            cut(wrong)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cuts": [1, 1]}, "sums to 2; the model has 4 layers"),
        ({"cuts": [4, 0]}, "at least 1"),
        ({"cuts": [5, -1]}, "at least 1"),
        ({"cuts": [2.0, 2.0]}, "whole number"),
        ({"cuts": []}, "cuts"),
        ({"cuts": [2, 2], "stages": 3}, "one a stage, 3"),
        ({"cuts": [2, 2], "costs": [1] * 4}, "exclude each other"),
        ({"costs": [1] * 3, "stages": 2}, "costs has 3 numbers; legal is one a layer, 4"),
        ({"stages": 5}, "stages=5 with 4 layers"),
        ({}, "stages is missing"),
    ],
)
def test_refused_cuts(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        cut(mlp(2, 4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cuts": 4}, "cuts must be a list of one number of layers a stage.*, not 4"),
        ({"cuts": "22"}, "cuts must be a list.*, not '22'"),
        ({"costs": 4, "stages": 2}, "costs must be a list of one number a layer.*, not 4"),
        ({"costs": Costs, "stages": 2}, "costs must be a list.*, not the class Costs"),
        ({"costs": Costs(), "stages": 2}, r"costs must be a list.*, not Costs\("),
    ],
)
def test_what_is_no_list_is_refused(arguments, reason):
    with pytest.raises(TypeError, match=reason):
        cut(mlp(2, 4), **arguments)
    if "costs" in arguments:
        with pytest.raises(TypeError, match=reason):
            balance(arguments["costs"], 2)


def test_shared_parameters_are_refused_with_both_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' of stage 0 is also '2\.weight' of stage 1"):
        cut(model, cuts=[1, 2])
    assert len(cut(model, cuts=[3])) == 1
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'0\.weight' of stage 0 is also '1\.weight' of stage 1"):
        cut([layer, layer])
    norm = nn.BatchNorm1d(2, affine=False)
    with pytest.raises(ValueError, match="running_mean"):
        cut(nn.Sequential(norm, norm), 2)


def test_what_is_no_plain_sequence_is_refused():
    class Scaled(nn.Sequential):
        def forward(self, values):
            return 2 * super().forward(values)

    owner = mlp(2, 2)
    owner.register_parameter("scale", nn.Parameter(torch.ones(1)))
    for model in (nn.Linear(2, 2), Scaled(nn.ReLU(), nn.ReLU()), owner, torch.relu):
        with pytest.raises(TypeError, match=r"nn\.Sequential\(first, second"):
            cut(model, 2)


def test_measure_costs_sees_the_heavy_layer_and_changes_nothing():
    heavy = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(inplace=True), heavy, nn.BatchNorm1d(256))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, inputs = torch.get_rng_state(), torch.randn(256, 256)
    costs = measure_costs(nn.Sequential(*model, nn.Dropout(0.5)), inputs, repeats=3)
    assert len(costs) == 5 and min(costs) > 0 and max(costs) == costs[2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.set_rng_state(state)
    measure_costs(nn.Sequential(nn.Dropout(0.5)), inputs, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match="repeats=0"):
        measure_costs(model, inputs, repeats=0)
