"""Attention whose scores no kernel knows: made strip by strip, exact, with every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place.masks import attend, tiles
from tests.simulate import Lowered, assert_program_equals_whole, lowered

LENGTH, HEADS, SIZE = 13, 6, 2
INF = float("inf")
LEAST = torch.finfo(torch.float32).min
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 11 + [2] * 1])
PADDING = torch.tensor([[1] * 9 + [0] * 4, [0] * 5 + [1] * 8])
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True, params=["tiles of 4", "strips of 1 or 2"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)
    if request.param != "tiles of 4":
        monkeypatch.setattr(attend, "SCORE_BYTES", 2 * HEADS * LENGTH * 8 * 2)


def trained(*shape: int) -> Tensor:
    table = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return table.requires_grad_()


BY_DISTANCE, BY_BUCKET = trained(HEADS, 2 * LENGTH - 1), trained(5, HEADS)
BY_PLACE, SHARPNESS = trained(LENGTH, LENGTH), trained(HEADS)
Q, K = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None, :]
CAUSAL = K <= Q


def causal() -> Tensor:
    return torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None]


def distance() -> Tensor:
    return torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]


def padded(p: Tensor) -> Tensor:
    """As transformers' eager attention: a finite number, and rows that may read nothing."""
    return torch.where(causal() & p[:, None, None, :].bool(), 0.0, LEAST).double()


def buckets() -> Tensor:
    """A position bias looked up for each pair of positions, as T5's: [1, H, S, S]."""
    each = F.embedding(distance().abs().clamp(max=4), BY_BUCKET)
    return each.permute(2, 0, 1).unsqueeze(0)


def alibi(q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor) -> Tensor:
    """As BLOOM writes it."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.7, 0.3]).double()
    bias = (slopes[:, None] * torch.arange(LENGTH)).unsqueeze(1).repeat(2, 1, 1)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = bias.baddbmm(q, k.mT, beta=1.0, alpha=0.5)
    scores = scores.masked_fill(~causal(), LEAST)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (2, HEADS))


def sinks(scores: Tensor, p: Tensor) -> Tensor:
    """As gpt-oss in transformers has them: a learned score of each head, its weight dropped."""
    sink = SHARPNESS.reshape(1, -1, 1, 1).expand(2, -1, LENGTH, -1)
    both = torch.cat([scores + padded(p), sink], dim=-1)
    both = both - both.max(dim=-1, keepdim=True).values
    return F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]


def in_place_on_a_view(q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor) -> Tensor:
    """What einsum gives is a view of a product: autograd does more around the write."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
    scores.sin_()
    scores.masked_fill_(~causal(), -INF)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def in_place(q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor) -> Tensor:
    scores = torch.sin(q @ k.mT)
    scores *= 3
    scores.masked_fill_(~causal(), -INF)
    return scores.softmax(-1) @ v


def by_letters(q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) + padded(p)).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


STRIPS: dict[str, Attention] = {
    "capped": lambda q, k, v, d, p: (torch.tanh(q @ k.mT / 2) * 2).softmax(-1) @ v,
    "capped, then padded with a finite number": lambda q, k, v, d, p: (
        (torch.tanh(q @ k.mT / 2) * 2 + padded(p)).softmax(-1) @ v
    ),
    "padded with a finite number": lambda q, k, v, d, p: (
        ((q @ k.mT) * 0.7 + padded(p)).softmax(-1) @ v
    ),
    "padded by filling": lambda q, k, v, d, p: (
        (q @ k.mT).masked_fill(~(causal() & p[:, None, None, :].bool()), -1e9).softmax(-1) @ v
    ),
    "documents, each head its sharpness": lambda q, k, v, d, p: (
        torch.where(
            (d[:, None, :, None] == d[:, None, None, :]) & causal(),
            (q @ k.mT) * SHARPNESS[:, None, None].exp(),
            -INF,
        ).softmax(-1)
        @ v
    ),
    "buckets": lambda q, k, v, d, p: (
        (q @ k.mT + buckets() + padded(p)).softmax(-1) @ v
    ),
    "a table by head and distance": lambda q, k, v, d, p: (
        (q @ k.mT + BY_DISTANCE[torch.arange(HEADS)[:, None, None], distance() + LENGTH - 1])
        .masked_fill(~causal(), -INF)
        .softmax(-1)
        @ v
    ),
    "a trained bias of each place": lambda q, k, v, d, p: (q @ k.mT + BY_PLACE).softmax(-1) @ v,
    "a causal mask and a trained bias": lambda q, k, v, d, p: (
        (q @ k.mT + BY_PLACE).masked_fill(~causal(), -INF).softmax(-1) @ v
    ),
    "a bias of whole rows": lambda q, k, v, d, p: (
        (q @ k.mT + torch.linspace(0, 1, LENGTH).double()).softmax(-1) @ v
    ),
    "a multiplied mask": lambda q, k, v, d, p: ((q @ k.mT) * causal().double()).softmax(-1) @ v,
    "alibi": alibi,
    "in place": in_place,
    "in place, on a view": in_place_on_a_view,
    "by letters": by_letters,
    "one key head": lambda q, k, v, d, p: (
        (q @ k[:, :1].mT + padded(p)).softmax(-1) @ v[:, :1]
    ),
    "shared key heads": lambda q, k, v, d, p: (
        (q @ k[:, :2].repeat_interleave(HEADS // 2, 1).transpose(2, 3) + padded(p)).softmax(-1)
        @ v[:, :2].repeat_interleave(HEADS // 2, 1)
    ),
    "sinks": lambda q, k, v, d, p: sinks(q @ k.mT, p) @ v,
    "sinks, plainly": lambda q, k, v, d, p: (
        torch.cat([(q @ k.mT).masked_fill(~causal(), -INF), q[..., :1]], -1).softmax(-1)[..., :-1]
        @ v
    ),
    "a kernel with buckets": lambda q, k, v, d, p: F.scaled_dot_product_attention(
        q, k, v, attn_mask=buckets() + padded(p)
    ),
    "a kernel in three dims": lambda q, k, v, d, p: F.scaled_dot_product_attention(
        *(x.flatten(0, 1) for x in (q, k, v)),
        attn_mask=(d[:, None, :, None] == d[:, None, None, :])[1] & causal(),
    ).unflatten(0, (2, HEADS)),
    "a mask with a dim of heads put in": lambda q, k, v, d, p: F.scaled_dot_product_attention(
        q, k, v, attn_mask=((d[:, :, None] == d[:, None, :]) & causal()).unsqueeze(1)
    ),
    "a part of a larger mask": lambda q, k, v, d, p: F.scaled_dot_product_attention(
        q, k, v, attn_mask=_larger()[None, None, 2 : 2 + LENGTH, 3 : 3 + LENGTH]
    ),
}  # fmt: skip


def _larger() -> Tensor:
    a = torch.arange(2 * LENGTH)
    return (a[:, None] - a[None, :]).remainder(3) != 1


def model(attention: Attention) -> Callable[..., Tensor]:
    table = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(0)).double()
    table.requires_grad_()

    def call(ids: Tensor, d: Tensor, p: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        q, k, v = (
            (x * factor).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for factor in (1.3, 0.7, -0.9)
        )
        return attention(q, k, v, d, p).transpose(1, 2).flatten(2)

    return call


def run(attention: Attention, n: int, **close: float) -> Lowered:
    inputs = (IDS, DOCUMENTS, PADDING)
    return assert_program_equals_whole(model(attention), inputs, n, close=close)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", STRIPS)
def test_strips_are_those_of_one_device(name: str, n: int) -> None:
    program = run(STRIPS[name], n)
    assert len(program.named("tiled_attention")) == 1
    assert not program.named("softmax")


@pytest.mark.parametrize("n", [1, 2, 4])
def test_softmax_in_fp32_stays_so(n: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor) -> Tensor:
        scores = q @ k.mT + padded(p)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    # Rows of strips are summed in another order, in fp32; how far apart that is depends on the CPU.
    (node,) = run(attention, n, rtol=2e-6, atol=2e-6).named("tiled_attention")
    assert node.kwargs["softmax"] == attend.Softmax(torch.float32, torch.float64)


def test_equal_layers_share_one_expression() -> None:
    attention = model(STRIPS["capped, then padded with a finite number"])

    def call(ids: Tensor, d: Tensor, p: Tensor) -> Tensor:
        return attention(ids, d, p) + attention(ids, d, p)

    first, second = lowered(call, (IDS, DOCUMENTS, PADDING), 2).named("tiled_attention")
    assert first.kwargs["mask"] is second.kwargs["mask"]


def test_no_rank_holds_scores() -> None:
    for name in ("capped, then padded with a finite number", "buckets", "by letters"):
        program = lowered(model(STRIPS[name]), (IDS, DOCUMENTS, PADDING), 2)
        assert program.largest() < LENGTH * LENGTH * 2, name


def test_finite_numbers_skip_what_they_outweigh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for rows that have nothing else: those read all keys alike."""
    found: dict[str, list[tiles.Band]] = {}
    real = tiles.TileMask.bands

    def seen(mask: tiles.TileMask, leaves: list[Tensor]) -> list[tiles.Band]:
        found["bands"] = real(mask, leaves)
        return found["bands"]

    monkeypatch.setattr(tiles.TileMask, "bands", seen)
    run(STRIPS["padded with a finite number"], 1)
    spans = {(band.batch, band.rows[0]): band.columns for band in found["bands"]}
    assert spans[0, 0] == (0, 4) and spans[0, 4] == (0, 8)  # causal: nothing after the tile
    assert spans[1, 4] == (0, LENGTH)  # its first query is padding: it weighs all keys alike
