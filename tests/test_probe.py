"""The probe's arguments; what it measures is held by the tests of the engine."""

import pytest
import torch
from torch import nn

from minipipe.costs import Costs
from minipipe.partition import cut
from minipipe.probe import probe

X = torch.ones(2, 3)


@pytest.mark.parametrize("repeats", [0, -1, None, 1.5])
def test_no_repeats_are_refused(repeats):
    with pytest.raises(ValueError, match=f"repeats={repeats}; legal is a whole number of at least"):
        probe(cut(nn.Sequential(nn.Linear(3, 3)), 1), X, X, nn.functional.mse_loss, repeats)


def test_one_repeat_is_enough_and_its_costs_take_costs_only():
    found = probe(cut(nn.Sequential(nn.Linear(3, 3)), 1), X, X, nn.functional.mse_loss, 1)
    assert found.message_size == [4] and found.input_size == [X.nbytes]
    assert found.costs(Costs(latency=2)).latency == 2 and found.costs().forward == 1
    with pytest.raises(TypeError, match="costs must be Costs.*, not the class itself"):
        found.costs(Costs)
