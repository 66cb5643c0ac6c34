"""Two equal blocks over an embedding, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Stacked(nn.Module):
    """[B, S] -> [B, S, width]. `block` makes one block."""

    def __init__(self, block: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x
