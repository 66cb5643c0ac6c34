"""Masks and scores in spellings that views and bounds got wrong once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place.masks import attend, tiles
from tests.simulate import assert_program_equals_whole

LENGTH, HEADS, SIZE = 13, 6, 2
INF = float("inf")
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 11 + [2] * 1])
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
TABLE = torch.randn(LENGTH, HEADS, generator=torch.Generator().manual_seed(3)).double()
AT = torch.arange(LENGTH)
DIAGONAL = torch.eye(LENGTH, dtype=torch.bool)
BY_HEAD = (torch.rand(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7) | (
    DIAGONAL
)
kernel = F.scaled_dot_product_attention
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, params=["tiles of 4", "strips of 1 or 2"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    if request.param != "tiles of 4":
        monkeypatch.setattr(attend, "SCORE_BYTES", 2 * HEADS * LENGTH * 8 * 2)


def causal() -> Tensor:
    return torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None]


def same(d: Tensor) -> Tensor:
    return d[:, None, :, None] == d[:, None, None, :]


def stripes(a: int, b: int, c: int) -> Tensor:
    """[H, S, S], another in each head."""
    h, q, k = torch.arange(HEADS), torch.arange(LENGTH), torch.arange(LENGTH)
    return (h[:, None, None] * a + q[None, :, None] * b - k[None, None, :]) % c != 0


def wide(x: Tensor) -> Tensor:
    """So many terms that a product of another shape adds them in another order."""
    return torch.sin(x.repeat(1, 1, 1, 32) * torch.linspace(1, 9, 32 * SIZE, dtype=x.dtype))


def largest(scores: Tensor) -> Tensor:
    """Weights of the four largest alone. A score that is made twice may differ from itself."""
    least = scores.topk(4, -1).values[..., -1:]
    return scores.masked_fill(scores < least, -1e30).softmax(-1)


def symmetric(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT)
    return (scores + scores.mT * 0.5).softmax(-1) @ v


def one_head_for_all(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT)
    return (scores + scores[:, 1:2]).softmax(-1) @ v


def of_two_kinds(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
    """A mask and scores that are the same expression, of a bias here and of the product there."""
    near = torch.arange(LENGTH).double()[:, None] * 0.1
    bias = torch.tanh(q.detach() @ k.mT)
    return kernel(q, k, v, attn_mask=near + bias) + (near + q @ k.mT).softmax(-1) @ v


CASES: dict[str, Attention] = {
    # views
    "one head of a mask, for all": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=(stripes(1, 1, 3)[0:1] & stripes(2, 5, 4)) | DIAGONAL
    ),
    "another head of a mask, for all": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=(stripes(1, 1, 3)[2:3] & stripes(2, 5, 4)) | DIAGONAL
    ),
    "one row of a mask, for all": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=same(d)[:1] & (d[:, None, None, :] + d[:, None, :, None] < 4) | DIAGONAL
    ),
    "dims by keyword": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=(AT[:, None] <= AT[None]).transpose(dim0=0, dim1=1) & same(d)
    ),
    "bytes": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=(same(d).view(torch.uint8) + causal().view(torch.uint8)) == 2
    ),
    "a table from its end": lambda q, k, v, d: (
        (q @ k.mT + TABLE[AT[None] - AT[:, None]].permute(2, 0, 1))
        .masked_fill(~causal(), -INF)
        .softmax(-1)
        @ v
    ),
    "symmetric scores": symmetric,
    "softmax over queries": lambda q, k, v, d: torch.tanh(q @ k.mT).mT.softmax(-1) @ v,
    "one head's scores for all": one_head_for_all,
    "a mask and scores alike": of_two_kinds,
    # shapes
    "a flat mask for flat scores": lambda q, k, v, d: (
        (q.flatten(0, 1) @ k.flatten(0, 1).mT)
        .masked_fill(~same(d).expand(-1, HEADS, -1, -1).flatten(0, 1), -1e9)
        .softmax(-1)
        @ v.flatten(0, 1)
    ).unflatten(0, (2, HEADS)),
    "keys of one row": lambda q, k, v, d: kernel(
        q, k[:1], v[:1], attn_mask=same(d) & causal()
    ),
    "one query head": lambda q, k, v, d: kernel(
        q[:, :1], k, v, attn_mask=same(d) & causal()
    ),
    "one head, a mask for each": lambda q, k, v, d: (
        (q[:, :1] @ k[:, :1].mT).masked_fill(~(BY_HEAD & causal()), -INF).softmax(-1) @ v[:, :1]
    ),
    "one row, a mask for each": lambda q, k, v, d: (
        (q[:1] @ k[:1].mT).masked_fill(~(same(d) & causal()), -INF).softmax(-1) @ v[:1]
    ),
    "one row, a causal mask for each": lambda q, k, v, d: (
        (q[:1] @ k[:1].mT)
        .masked_fill(~causal().expand(2, 1, LENGTH, LENGTH), -INF)
        .softmax(-1)
        @ v[:1]
    ),
    "a scale of 0": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=same(d) & causal(), scale=0.0
    ),
    # one result of several
    "a grid of positions": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=same(d) & torch.ge(*torch.meshgrid(AT, AT, indexing="ij"))
    ),
    "two halves of a mask": lambda q, k, v, d: kernel(
        q, k, v,
        attn_mask=torch.bitwise_or(
            *torch.cat([same(d), causal().expand(2, 1, -1, -1)], 1).chunk(2, 1)
        ),
    ),
    "one of two scores": lambda q, k, v, d: (
        torch.tanh(torch.stack([q @ k.mT, v @ k.mT]))
        .unbind(0)[1]
        .masked_fill(~causal(), -INF)
        .softmax(-1)
        @ v
    ),
    "the largest scores of each query": lambda q, k, v, d: largest(wide(q) @ wide(k).mT) @ v,
    # values
    "sum of flags": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=((same(d) + causal()) == 1) & causal()
    ),
    "integers that wrap": lambda q, k, v, d: kernel(
        q, k, v,
        attn_mask=(
            ((AT * 9).to(torch.int8)[:, None] + (AT * 3).to(torch.int8)[None])
            + d[:, None, :, None].to(torch.int8) * 0 < 100
        ) | causal(),
    ),
    "integers beyond floats": lambda q, k, v, d: kernel(
        q, k, v, attn_mask=same(d + 2**60)
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_corner_is_that_of_one_device(name: str, n: int) -> None:
    table = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(0)).double()
    table.requires_grad_()

    def call(ids: Tensor, d: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        q, k, v = (
            (x * factor).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for factor in (1.3, 0.7, -0.9)
        )
        return CASES[name](q, k, v, d).transpose(1, 2).flatten(2)

    assert_program_equals_whole(call, (IDS, DOCUMENTS), n)
