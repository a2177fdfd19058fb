"""A small vision transformer of equal blocks.

Source: Dosovitskiy and others, An Image Is Worth 16x16 Words, ICLR 2021, section 3.1; pre-norm
blocks. Unlike there, no class token: the head reads all tokens, which learns in fewer steps.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from minipipe.arguments import whole_number
from minipipe.models.seeding import seeded


class Embedding(nn.Module):
    """Images [rows, channels, size, size] → tokens [rows, (size / patch)², dim] with positions."""

    def __init__(self, image: int, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(channels * patch * patch, dim)
        self.position = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, dim))

    def forward(self, images: Tensor) -> Tensor:
        rows, channels, height, width = images.shape
        side = self.patch
        patches = images.reshape(rows, channels, height // side, side, width // side, side)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, channels * side * side)
        return self.project(patches) + self.position


class Block(nn.Module):
    """Attention and perceptron, each after a norm and around a shortcut: tokens → tokens."""

    def __init__(self, dim: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)
        for last in (self.project, self.down):  # so that the sum of all blocks stays about 1
            last.weight.data.div_(depth**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        rows, count, dim = tokens.shape
        qkv = self.qkv(self.norm1(tokens)).view(rows, count, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(rows, count, dim)
        tokens = tokens + self.dropout(self.project(mixed))
        inner = functional.gelu(self.up(self.norm2(tokens)))
        return tokens + self.dropout(self.down(inner))


def vit(
    image: int = 28,
    channels: int = 1,
    patch: int = 7,
    dim: int = 48,
    depth: int = 8,
    heads: int = 4,
    classes: int = 10,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """`embedding`, `depth` equal blocks and `head`; images → logits [rows, classes].

    ValueError where the patch doesn't divide the image or the heads don't divide dim, and for a
    size below 1.
    """
    whole_number(image=image, channels=channels, dim=dim, depth=depth, classes=classes)
    whole_number(patch=patch, heads=heads)
    if image % patch:
        raise ValueError(f"patch={patch}; legal are the divisors of image={image}")
    if dim % heads:
        raise ValueError(f"heads={heads}; legal are the divisors of dim={dim}")
    tokens = (image // patch) ** 2
    with seeded(seed):
        embedding = Embedding(image, channels, patch, dim)
        blocks = [(f"block{block}", Block(dim, heads, dropout, depth)) for block in range(depth)]
        head = nn.Sequential(nn.LayerNorm(dim), nn.Flatten(), nn.Linear(tokens * dim, classes))
    return nn.Sequential(OrderedDict([("embedding", embedding), *blocks, ("head", head)]))
