"""Blocks like those of a mixture of experts, with the exchanges that such blocks have.

Each block is five layers, so that it can be overlapped at its exchanges: gate, exchange (tokens go
to their experts' devices), experts, exchange (and back), combine. Here all experts are on one
device and every token takes all of them, weighted by the gate, so that gradients are those of an
ordinary model. Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1 (dispatch and combine).
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from minipipe.arguments import whole_number
from minipipe.engine.overlap import Exchange
from minipipe.models.seeding import seeded

LAYERS = 5  # of one block


class Gate(nn.Module):
    """Tokens [rows, width] → (tokens, normed tokens, weights of the experts [rows, experts])."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, experts)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.norm(tokens)
        return tokens, normed, torch.softmax(self.score(normed), -1)


class Experts(nn.Module):
    """(tokens, normed, weights) → (tokens, outputs [rows, experts, width], weights)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(experts)
        )

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, normed, weights = values
        return tokens, torch.stack([expert(normed) for expert in self.experts], 1), weights


class Combine(nn.Module):
    """(tokens, outputs, weights) → tokens, around the shortcut."""

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, outputs, weights = values
        return tokens + (outputs * weights.unsqueeze(-1)).sum(1)


def moe(width: int = 32, experts: int = 2, depth: int = 8, seed: int = 0) -> nn.Sequential:
    """`depth` blocks of five layers each; tokens [rows, width] in and out. Cut it at multiples of
    five layers: `cuts=[5 * depth // stages] * stages`. ValueError for a size below 1."""
    whole_number(width=width, experts=experts, depth=depth)
    layers: list[tuple[str, nn.Module]] = []
    with seeded(seed):
        for block in range(depth):
            parts = {"gate": Gate(width, experts), "dispatch": Exchange(),
                     "experts": Experts(width, experts), "collect": Exchange(),
                     "combine": Combine()}  # fmt: skip
            layers += [(f"block{block}_{name}", layer) for name, layer in parts.items()]
    return nn.Sequential(OrderedDict(layers))
