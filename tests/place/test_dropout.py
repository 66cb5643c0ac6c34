"""Dropout of attention's weights: what forward dropped, backward drops, on any number of ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import attend, tiles
from autosp_dtensor.placement import Replicate, Shard
from tests import reference_attention
from tests.pieces import glue
from tests.simulate import Lowered, Ranks, lowered

LENGTH, SIZE, RATE = 13, 2, 0.4
INF = float("inf")
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [0] * 1 + [1] * 11 + [2] * 1])
Attention = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def flash_and_small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "TILE", 4)
    with reference_attention.references_here():
        yield


def causal() -> Tensor:
    return torch.arange(LENGTH)[None, :] <= torch.arange(LENGTH)[:, None]


def by_kernel(v: Tensor, q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, v, is_causal=True, dropout_p=RATE)


def both_ways(v: Tensor, q: Tensor) -> Tensor:
    """With fewer heads than ranks, queries are split."""
    return F.scaled_dot_product_attention(q, q, v, dropout_p=RATE)


def documents(v: Tensor, q: Tensor) -> Tensor:
    allowed = (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None, :]) & causal()
    return F.scaled_dot_product_attention(q, q, v, attn_mask=allowed, dropout_p=RATE)


def by_hand(v: Tensor, q: Tensor) -> Tensor:
    return F.dropout((q @ q.mT).masked_fill(~causal(), -INF).softmax(-1), RATE) @ v


def capped(v: Tensor, q: Tensor) -> Tensor:
    scores = torch.tanh(q @ q.mT).masked_fill(~causal(), -INF)
    return F.dropout(scores.softmax(-1), RATE) @ v


def by_flash(v: Tensor, q: Tensor) -> Tensor:
    q, v = q.transpose(1, 2), v.transpose(1, 2)
    function = sys.modules["flash_attn"].flash_attn_func
    return function(q, q, v, dropout_p=RATE, causal=True).transpose(1, 2)


def multihead(heads: int) -> nn.MultiheadAttention:
    """Without bias, and v and the result go through the identity: heads stay apart."""
    width = heads * SIZE
    layer = nn.MultiheadAttention(width, heads, dropout=RATE, bias=False, batch_first=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.eye(width).repeat(len(weight) // width, 1))
    return layer.double()


MULTIHEAD = {heads: multihead(heads) for heads in (2, 3, 4)}


def by_multihead(v: Tensor, q: Tensor) -> Tensor:
    heads = v.shape[1]
    q, v = (x.transpose(1, 2).flatten(2) for x in (q, v))
    out, _ = MULTIHEAD[heads](q, q, v, attn_mask=~causal(), need_weights=False)
    return out.unflatten(-1, (heads, SIZE)).transpose(1, 2)


WAYS = [by_kernel, both_ways, documents, by_hand, capped, by_flash, by_multihead]
# Two heads on four ranks: queries are split, or every rank computes both heads.
RANKS = [(1, 4), (2, 4), (4, 4), (2, 3), (4, 2)]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split(way: Attention, n: int, v: Tensor, q: Tensor) -> tuple[Lowered, Tensor, list[Tensor]]:
    """The program of way(v, q), of [B, S, H, D]; its result, and each rank's v."""

    def call(v: Tensor, q: Tensor) -> Tensor:
        v, q = v * 1.0, q * 1.0  # computed, so that each rank has a part of them
        return way(v.transpose(1, 2), q.transpose(1, 2)).transpose(1, 2) * 1.0

    program = lowered(call, (v.clone().requires_grad_(), q), n)
    copies = [v.clone().requires_grad_() for _ in range(n)]
    (parts,) = Ranks(n, program.state, seed=5).run(program.root, [copies, [q] * n])
    output = next(node for node in program.flat.nodes if node.op == "output")
    (placement,) = facts(output).placements
    assert n == 1 or isinstance(placement, Shard)  # one result, each part of it from one rank
    return program, glue(parts, placement), copies


@pytest.mark.parametrize(("n", "heads"), RANKS)
@pytest.mark.parametrize(
    ("way", "strips"),
    [*((way, False) for way in WAYS), (documents, True), (capped, True)],
    ids=lambda given: getattr(given, "__name__", "strips of 1 or 2" if given else "tiles of 4"),
)
def test_backward_drops_what_forward_dropped(
    way: Attention, strips: bool, n: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """out = W v with one W drawn in forward: <out, g> = <v, W^T g>, with the gradient of v on each
    rank. Where all ranks compute all heads, each keeps its queries alone, and their draws."""
    if strips:
        monkeypatch.setattr(attend, "SCORE_BYTES", 2 * heads * LENGTH * 8 * 2)
    v, q, g = (drawn(seed, 2, LENGTH, heads, SIZE) for seed in range(3))
    _, out, copies = split(way, n, v, q)
    for grad in torch.autograd.grad((out * g).sum(), copies):
        torch.testing.assert_close((out * g).sum(), (grad * v).sum())


@pytest.mark.parametrize(("n", "heads"), RANKS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_rows_heads_and_queries_draw_differently(way: Attention, n: int, heads: int) -> None:
    """On one rank and on several. Queries and keys of zeros read all they may alike, so that a
    result of ones tells how many weights were kept."""
    zeros = torch.zeros(2, LENGTH, heads, SIZE, dtype=torch.float64)
    _, out, _ = split(way, n, torch.ones_like(zeros), zeros)
    kept = out[..., 0]
    assert 0.5 < kept.mean() < 1.5 and kept.std() > 0.1
    of_a_head = kept.movedim(1, 2).flatten(0, 1)  # of a row and a head
    for one, other in itertools.combinations(of_a_head, 2):
        assert not torch.allclose(one, other)
    if way is both_ways:  # all queries alike: parts of 4 or 3 of them, as ranks have them
        for one, other in itertools.combinations(kept[:, :12].unflatten(1, (4, 3)).unbind(1), 2):
            assert not torch.allclose(one, other)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_every_rank_computes_is_drawn_alike(way: Attention) -> None:
    """Attention over a table that no rank cuts, read by tokens that are split."""
    table = drawn(1, 2, 4, LENGTH, SIZE)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        fixed = way(table, table * 0.5)
        return x * fixed.mean(), fixed

    program = lowered(call, (drawn(2, 2, LENGTH, 8),), 4)
    x = drawn(2, 2, LENGTH, 8)
    _, parts = Ranks(4, program.state, seed=5).run(program.root, [[x] * 4])
    output = next(node for node in program.flat.nodes if node.op == "output")
    split, whole = facts(output).placements
    assert isinstance(split, Shard) and isinstance(whole, Replicate)
    assert all(torch.equal(part, parts[0]) for part in parts)
