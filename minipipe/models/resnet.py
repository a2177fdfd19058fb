"""Residual convolutional networks: a small one of equal blocks, and torchvision's resnet18.

Source: He and others, Deep Residual Learning for Image Recognition, CVPR 2016; order inside a block
after Identity Mappings in Deep Residual Networks, ECCV 2016; group norm after Wu and He, ECCV 2018.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional

from minipipe.arguments import whole_number
from minipipe.models.seeding import seeded

GROUPS = 4


class Block(nn.Module):
    """Norm, convolution, GELU, convolution around a shortcut: [rows, width, h, w] → the same.

    Group norm, not batch norm: a row's outputs don't depend on the micro-batch that it is in.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        for convolution in (self.first, self.second):
            nn.init.kaiming_normal_(convolution.weight)
            nn.init.zeros_(convolution.bias)
        self.second.weight.data.div_(depth**0.5)  # so that the sum of all blocks stays about 1

    def forward(self, images: Tensor) -> Tensor:
        return images + self.second(functional.gelu(self.first(self.norm(images))))


def resnet(
    image: int = 28,
    channels: int = 1,
    width: int = 16,
    depth: int = 8,
    classes: int = 10,
    seed: int = 0,
) -> nn.Sequential:
    """Residual net: `embedding`, `depth` equal blocks, `head`; images → logits [rows, classes].

    The embedding is a strided convolution to about 7×7 pixels; the head averages to 4×4 before its
    linear layer. ValueError where width is no multiple of the 4 groups of its norms, and for a
    size below 1.
    """
    whole_number(image=image, channels=channels, width=width, depth=depth, classes=classes)
    if width % GROUPS:
        raise ValueError(f"width={width}; legal are the multiples of {GROUPS}")
    side = max(1, image // 7)
    with seeded(seed):
        embedding = nn.Conv2d(channels, width, side, stride=side)
        blocks = [(f"block{block}", Block(width, depth)) for block in range(depth)]
        head = nn.Sequential(
            nn.GroupNorm(GROUPS, width),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * width, classes),
        )
    return nn.Sequential(OrderedDict([("embedding", embedding), *blocks, ("head", head)]))


def resnet18(classes: int = 1000, weights=None, seed: int = 0) -> nn.Sequential:
    """torchvision's resnet18 as a sequence of 15 layers: the same outputs, the same parameters.

    Images [rows, 3, height, width] → logits [rows, classes]. Names are torchvision's with `_`
    inside a layer's name (`layer1.0.conv1.weight` → `layer1_0.conv1.weight`). weights as in
    torchvision, with `classes` ≠ 1000 under a new last layer. It has BatchNorm: under
    micro-batches its statistics are those of each micro-batch.
    """
    whole_number(classes=classes)
    from torchvision.models import resnet18 as original

    with seeded(seed):
        model = original(weights=weights)
        if classes != 1000:
            model.fc = nn.Linear(model.fc.in_features, classes)
    layers: list[tuple[str, nn.Module]] = []
    for name, module in model.named_children():
        if name == "fc":
            layers += [("flatten", nn.Flatten(1))]  # a function call in torchvision's forward
        if isinstance(module, nn.Sequential):
            layers += [(f"{name}_{block}", child) for block, child in module.named_children()]
        else:
            layers += [(name, module)]
    return nn.Sequential(OrderedDict(layers))
