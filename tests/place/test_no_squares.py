"""No tensor of all pairs of positions, in forward or backward: inner ones of kernels included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosp_dtensor.place.masks import attend, tiles
from tests.simulate import Ranks, lowered

LENGTH, HEADS, SIZE = 512, 4, 4
INF = float("inf")
PADDING = torch.ones(2, LENGTH, dtype=torch.bool)
PADDING[0, :40] = False
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625]).double()
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
Attention = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many to the sequence as there are of the library's own to 4,096 tokens."""
    monkeypatch.setattr(tiles, "TILE", 64)
    monkeypatch.setattr(attend, "SCORE_BYTES", 2 * 2 * 64 * LENGTH * 8 // 2)


def away() -> Tensor:
    return torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)


def kernel(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, mask)


def soft_cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 5 * torch.tanh(score / 5)


def by_flex(x: Tensor, p: Tensor) -> Tensor:
    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = create_block_mask(mod, None, None, LENGTH, LENGTH, device="cpu")
    return flex.flex_attention(x, x * 2, x * 3, soft_cap, mask)  # type: ignore[return-value]


def sinks(x: Tensor, p: Tensor) -> Tensor:
    scores = (x @ (x * 2).mT).masked_fill(away() < 0, -INF)
    column = SINKS.reshape(1, -1, 1, 1).expand(len(x), -1, LENGTH, -1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ (x * 3)


WAYS: dict[str, Attention] = {
    "window": lambda x, p: kernel(x, (away() >= 0) & (away() < 100)),
    "prefix": lambda x, p: kernel(
        x, (away() >= 0) | (torch.arange(LENGTH) < p.sum(1)[:, None, None, None] - 400)
    ),
    "padding": lambda x, p: kernel(x, ((away() >= 0) & p[:, None, None, :]) | (away() == 0)),
    "slopes": lambda x, p: kernel(
        x, (-SLOPES[:, None, None] * away()).masked_fill(away() < 0, -INF)[None]
    ),
    "soft cap by flex": by_flex,
    "sinks by hand": sinks,
}


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):  # an expanded one takes the memory of what it looks at
                self.count = max(self.count, each.untyped_storage().nbytes() // each.itemsize)
        return out


@pytest.mark.parametrize("name", WAYS)
def test_largest_tensor_is_far_from_all_pairs(name: str) -> None:
    """Two rows and two heads of each of two ranks: half of the pairs of one head would show."""
    table = torch.randn(16, HEADS * SIZE, dtype=torch.float64).requires_grad_()

    def call(ids: Tensor, p: Tensor) -> Tensor:
        x = F.embedding(ids, table).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return WAYS[name](x, p).transpose(1, 2).flatten(2)

    ids = torch.randint(16, (2, LENGTH))
    program = lowered(call, (ids, PADDING), 2)
    with Largest() as seen:
        (parts,) = Ranks(2, program.state).run(program.root, [[ids] * 2, [PADDING] * 2])
        torch.autograd.grad(torch.stack([part.square().sum() for part in parts]).sum(), table)
    assert LENGTH * 2 * HEADS * SIZE <= 2 * seen.count < LENGTH * LENGTH
