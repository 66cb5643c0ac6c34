"""A layer of an 8B model's sizes, without data, as a region of one rank of eight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.lower import Region
from tests.simulate import lowered

WIDTH, HEADS, KEY_HEADS, SIZE, INNER = 4096, 32, 8, 128, 14336


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.q = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
            self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False) for _ in range(2))
            self.o = nn.Linear(HEADS * SIZE, WIDTH, bias=False)
            self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
            self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.to(torch.bfloat16).to_empty(device="cpu")  # never written to: no memory is taken

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def layer_region(length: int) -> Region:
    x = torch.empty(1, length, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    program = lowered(Stack(), (x,), 8)
    return program.root.calls[0].region
