"""Models: sizes, seeds, equal blocks, and rows that don't depend on each other."""

import pytest
import torch
import torchvision
from torch import nn

from minipipe.datasets import Dataset, batches, load
from minipipe.models import DEFAULT, NAMES, build, mlp, resnet, resnet18, vit
from minipipe.models.moe import moe

SMALL = {
    "vit": lambda **more: vit(image=8, patch=4, dim=8, depth=3, heads=2, **more),
    "resnet": lambda **more: resnet(image=8, width=8, depth=3, **more),
    "mlp": lambda **more: mlp(8, 3, inputs=64, outputs=10, **more),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SMALL)
def make(request):
    return SMALL[request.param]


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_seed_alone_decides_and_the_global_generator_is_left_alone(make):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    model = make(seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same(model, make(seed=5))
    assert not same(model, make(seed=6))


def test_blocks_are_equal_in_shape_and_different_in_weights(make):
    model = make()
    blocks = [model.get_submodule(f"block{place}") for place in range(3)]
    assert list(model._modules) == ["embedding", "block0", "block1", "block2", "head"]
    shapes = [[p.shape for p in block.parameters()] for block in blocks]
    assert shapes[0] == shapes[1] == shapes[2]
    assert not same(blocks[0], blocks[1]) and not same(blocks[1], blocks[2])


def gradients(model: nn.Module, inputs: torch.Tensor, parts: int) -> list[torch.Tensor]:
    model.zero_grad()
    for rows in inputs.tensor_split(parts):
        model(rows).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_repeat_and_sum_over_micro_batches_in_float64(make):
    model = make().double()
    inputs = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    whole = gradients(model, inputs, 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, gradients(model, inputs, 1), strict=True))
    for a, b in zip(whole, gradients(model, inputs, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_borders_can_be_sent_and_no_batch_norm(make):
    values = torch.randn(2, 1, 8, 8)
    model = make()
    for layer in model:
        values = layer(values)
        assert values.is_contiguous() and values.dtype == torch.float32
    assert values.shape == (2, 10)
    assert not list(model.buffers())


def test_vit_drops_out_only_in_training():
    model = SMALL["vit"](dropout=0.5)
    inputs = torch.randn(2, 1, 8, 8)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_mlp_without_ends_is_all_alike():
    model = mlp(4, 6)
    assert len(model) == 6 and model(torch.ones(3, 4)).shape == (3, 4)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (vit, {"patch": 5}, "patch=5"),
        (vit, {"image": 8, "patch": 16}, "patch=16"),
        (vit, {"dim": 10}, "heads=4"),
        (resnet, {"width": 6}, "width=6"),
    ],
)
def test_refused_sizes(function, arguments, reason):
    with pytest.raises(ValueError, match=f"{reason}; legal are"):
        function(**arguments)


@pytest.mark.parametrize("wrong", [0, -4, None, 2.0, "8", True])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (mlp, ["width", "depth"]),
        (moe, ["width", "experts", "depth"]),
        (resnet, ["image", "channels", "width", "depth", "classes"]),
        (vit, ["image", "channels", "patch", "dim", "depth", "heads", "classes"]),
        (resnet18, ["classes"]),
    ],
)
def test_sizes_that_are_no_positive_whole_numbers(function, arguments, wrong):
    for argument in arguments:
        with pytest.raises(ValueError) as raised:
            function(**{argument: wrong})
        assert str(raised.value) == f"{argument}={wrong!r}; legal is a whole number of at least 1"


def test_the_ends_of_an_mlp_have_sizes_too():
    for argument in ("inputs", "outputs"):
        with pytest.raises(ValueError, match=f"{argument}=0; legal is a whole number"):
            mlp(4, 2, **{argument: 0})


def test_resnet18_is_torchvisions():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        original = torchvision.models.resnet18().double().eval()
    model = resnet18(seed=3).double().eval()
    names = {name.replace("_", "."): value for name, value in model.state_dict().items()}
    expected = {name.replace("_", "."): value for name, value in original.state_dict().items()}
    assert list(names) == list(expected)
    assert all(torch.equal(names[name], value) for name, value in expected.items())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), original(images), rtol=0, atol=1e-12)
    assert len(model) == 15
    assert any(isinstance(layer, nn.Flatten) for layer in model)
    assert resnet18(classes=7).fc.out_features == 7


def random_set(channels: int, side: int, classes: int) -> Dataset:
    images, labels = torch.randn(4, channels, side, side), torch.arange(4) % classes
    return Dataset("random", images, labels, images, labels, classes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("channels", "side"), [(1, 28), (1, 8), (3, 32)])
def test_build_fits_the_data_set(name, channels, side):
    data = random_set(channels, side, 6)
    if name == "resnet18" and channels != 3:
        with pytest.raises(ValueError, match="3 channels; random has 1"):
            build(name, data)
        return
    model = build(name, data, seed=2)
    assert model(data.train_inputs).shape == (4, 6)
    assert same(model, build(name, data, seed=2))


def test_build_names_the_legal_models():
    with pytest.raises(ValueError, match="'lenet'.*resnet, vit, mlp, resnet18"):
        build("lenet", random_set(1, 8, 2))


def train(parts: int, steps: int = DEFAULT.steps) -> tuple[list[float], float]:
    """The race's default with whole batches (parts 1) or micro-batches: losses and accuracy."""
    data = load(DEFAULT.dataset)
    model = build(DEFAULT.model, data, seed=0)
    optimizer = DEFAULT.optimizer(model.parameters())
    losses = []
    for inputs, targets in batches(data, DEFAULT.batch, steps, seed=0):
        optimizer.zero_grad()
        losses.append(0.0)
        pieces = zip(inputs.tensor_split(parts), targets.tensor_split(parts), strict=True)
        for rows, labels in pieces:
            loss = nn.functional.cross_entropy(model(rows), labels, reduction="sum")
            (loss / len(targets)).backward()
            losses[-1] += loss.item() / len(targets)
        optimizer.step()
    with torch.no_grad():
        right = model(data.test_inputs).argmax(1) == data.test_targets
    return losses, right.float().mean().item()


def test_the_default_learns_and_micro_batches_follow_the_same_path():
    whole, accuracy = train(1)
    pieces, _ = train(8, steps=40)
    assert accuracy > 0.93
    assert max(abs(a - b) for a, b in zip(whole, pieces, strict=False)) < 2e-5
