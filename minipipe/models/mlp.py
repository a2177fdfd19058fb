"""A perceptron of equal blocks: the smallest model that a pipeline can be tested with."""

from collections import OrderedDict

from torch import nn

from minipipe.arguments import whole_number
from minipipe.models.seeding import seeded


def mlp(
    width: int = 16,
    depth: int = 8,
    inputs: int | None = None,
    outputs: int | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """`depth` equal blocks Linear–Tanh, [rows, width] → [rows, width].

    inputs: adds a first layer that flattens its input and maps that many features to `width`.
    outputs: adds a last layer to that many. Without them all layers are alike. ValueError for a
    size that is no whole number of at least 1.
    """
    ends = {"inputs": inputs, "outputs": outputs}
    whole_number(width=width, depth=depth, **{k: v for k, v in ends.items() if v is not None})
    layers: list[tuple[str, nn.Module]] = []
    with seeded(seed):
        if inputs is not None:
            layers += [("embedding", nn.Sequential(nn.Flatten(), nn.Linear(inputs, width)))]
        for block in range(depth):
            layers += [(f"block{block}", nn.Sequential(nn.Linear(width, width), nn.Tanh()))]
        if outputs is not None:
            layers += [("head", nn.Linear(width, outputs))]
    return nn.Sequential(OrderedDict(layers))
