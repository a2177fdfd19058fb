"""The cut and the parts' names: nothing lost, nothing shared, nothing renamed (kinds 11, 13)."""

import copy

import pytest
import torch
from ranks import batch, error, mean_mse, mlp, on_ranks, schedule
from torch import nn

from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


def model():
    torch.manual_seed(3)
    inner = nn.Sequential(nn.ReLU(), nn.Linear(6, 6))
    rest = [nn.Linear(6, 6) for _ in range(3)]
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), inner, nn.Linear(6, 6), nn.Tanh(),
                         nn.LayerNorm(6), *rest).double()  # fmt: skip


def states(rank, rows, steps):
    pipe = Pipeline(model(), rows, mean_mse, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for seed in range(steps):
        pipe.step(batch(9, seed=seed), batch(9))
    return pipe.state_dict(), [name for name, _ in pipe.named_parameters()]


@pytest.mark.parametrize("row", [("1f1b", 4, 3, {}), ("interleaved", 4, 4, {"chunks": 2})])
def test_the_parts_together_are_the_full_models_state(row):
    """Trap 128: every second layer is missing in the file, with several chunks a rank."""
    found = on_ranks(states, schedule(*row[:3], **row[3]), 2, ranks=4)
    union = {name: value for state, _ in found for name, value in state.items()}
    assert sum(len(state) for state, _ in found) == len(union)
    plain = model()
    assert union.keys() == plain.state_dict().keys()
    plain.load_state_dict(union, strict=True)
    names = sorted(name for _, own in found for name in own)
    assert names == sorted(name for name, _ in plain.named_parameters())


def resumed(rank, rows, state):
    pipe = Pipeline(model(), rows, mean_mse, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    pipe.load_state_dict(state)
    pipe.step(batch(9, seed=2), batch(9))
    return pipe.state_dict()


def test_a_state_loads_into_another_cut():
    """Trap 129: files follow the old layout."""
    def union(found):
        return {name: value for state in found for name, value in state.items()}

    # M = 1, as BatchNorm is in the model.
    two = union(state for state, _ in on_ranks(states, schedule("1f1b", 4, 1), 2, ranks=4))
    three = union(state for state, _ in on_ranks(states, schedule("1f1b", 4, 1), 3, ranks=4))
    for rows in (schedule("gpipe", 2, 1), schedule("interleaved", 2, 1, chunks=3)):
        assert error(union(on_ranks(resumed, rows, two, ranks=2)), three) < 1e-10


def incomplete(rank):
    pipe = Pipeline(mlp(4), schedule("1f1b", 2, 2), mean_mse)
    state = {k: v for k, v in mlp(4).state_dict().items() if "bias" not in k}
    with pytest.raises(ValueError, match=f"the state lacks {2 * rank}.bias"):
        pipe.load_state_dict(state)


def test_a_state_that_lacks_something():
    on_ranks(incomplete, ranks=2)


def no_state(rank):
    pipe = Pipeline(mlp(4), schedule("1f1b", 2, 2), mean_mse)
    before = copy.deepcopy(pipe.state_dict())
    for wrong in (None, 3, list(before)):
        with pytest.raises(TypeError, match=f"state must be a mapping.*{type(wrong).__name__}"):
            pipe.load_state_dict(wrong)
    return all(torch.equal(v, before[k]) for k, v in pipe.state_dict().items())


def test_what_is_no_state_is_refused():
    assert on_ranks(no_state, ranks=2) == [True, True]


def tied(rank, cuts):
    shared = mlp(4)
    shared[2].weight = shared[0].weight
    Pipeline(shared, schedule("1f1b", 2, 2), mean_mse, cuts=cuts)


def test_a_parameter_in_two_stages_is_refused_with_both_names(failures):
    """Trap 108: copied without a word, and the copies drift apart."""
    for failure in failures(tied, [2, 2], ranks=2):
        assert failure["type"] == "ValueError"
        assert "'0.weight' of stage 0" in failure["text"]
        assert "'2.weight' of stage 1" in failure["text"]


def test_a_parameter_twice_in_one_stage_is_fine():
    on_ranks(tied, [3, 1], ranks=2)


def cut_by(rank, arguments):
    pipe = Pipeline(mlp(8), schedule("1f1b", 3, 2), mean_mse, **arguments)
    return sorted({name.split(".")[0] for name in pipe.state_dict()})


@pytest.mark.parametrize("arguments, wanted", [
    ({"cuts": [1, 6, 1]}, [["0"], ["2", "4", "6"], []]),
    ({"costs": [1, 1, 1, 1, 1, 1, 1, 20]}, [["0", "2"], ["4", "6"], []]),
    ({}, [["0", "2"], ["4"], ["6"]]),
])  # fmt: skip
def test_where_the_model_is_cut(arguments, wanted):
    assert on_ranks(cut_by, arguments, ranks=3) == wanted


def weights(rank):
    torch.manual_seed(0)
    stages = [nn.Linear(3, 3) for _ in range(2)]
    pipe = Pipeline(copy.deepcopy(stages), schedule("1f1b", 2, 2), mean_mse)
    own = next(pipe.parameters())
    return torch.equal(own, stages[rank].weight), torch.equal(own, stages[1 - rank].weight)


def test_stages_of_one_shape_have_their_own_weights():
    """Trap 99: every rank builds its part from the same seed."""
    assert on_ranks(weights, ranks=2) == [(True, False)] * 2


def modes(rank):
    pipe = Pipeline(model(), schedule("1f1b", 2, 2), mean_mse)
    trained = [m.training for m in pipe.eval()._modules]
    return any(trained), all(m.training for m in pipe.train()._modules)


def test_train_and_eval():
    assert on_ranks(modes, ranks=2) == [(False, True)] * 2
