"""FIELD-CASES.md, classes mask-pattern and length: padding, windows, prefixes, layouts, any S."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import tiles
from autosp_dtensor.placement import Shard
from tests import reference_attention
from tests.model_t import Attention, ModelT, TConfig, TOutput, ids_of_t, rms_norm
from tests.place.field_cases import ALL, batch_with, checked, loss_of, t_with
from tests.simulate import assert_program_equals_whole

RANKS = [2, 3, 4]
UNEVEN = [ALL, (2, 9, 11)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("kind", ["sdpa", "matmul", "einsum"])
def test_fc_011_left_padding_is_kept(kind: str, n: int) -> None:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    config = TConfig(attention=(kind,))
    one_row = batch_with(range(3, 15), attention_mask=mask[:1], position_ids=positions[:1])
    assert loss_of(config, n, one_row) == checked(5.135)
    both = batch_with(UNEVEN, 2, attention_mask=mask, position_ids=positions)
    loss_of(config, n, both)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("kind", ["sdpa", "matmul"])
def test_fc_012_window_is_counted_over_the_cuts(kind: str, n: int) -> None:
    config = TConfig(window=4, attention=(kind,))
    assert loss_of(config, n, batch_with()) == checked(4.607)
    loss_of(config, n, batch_with(UNEVEN, 2))


class InHalves(Attention):
    """The last 8 queries read all 16 keys."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        first = F.scaled_dot_product_attention(
            q[:, :, :8], k[:, :, :8], v[:, :, :8], is_causal=True, enable_gqa=True
        )
        allowed = torch.arange(16) <= torch.arange(8, 16)[:, None]
        last = F.scaled_dot_product_attention(q[:, :, 8:], k, v, allowed, enable_gqa=True)
        return torch.cat([first, last], 2)


class TopLeft(InHalves):
    """With is_causal, torch counts from the top left: query 8 sees key 0. So be it on any sp."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        first, last = (
            F.scaled_dot_product_attention(part, k, v, is_causal=True, enable_gqa=True)
            for part in q.split(8, 2)
        )
        return torch.cat([first, last], 2)


@pytest.mark.parametrize("n", RANKS)
def test_fc_032_fewer_queries_than_keys(n: int) -> None:
    assert loss_of(t_with(InHalves), n, batch_with()) == checked(4.253)
    assert loss_of(t_with(TopLeft), n, batch_with()) == checked(4.561)


class GivenMask(ModelT):
    """Its mask comes in whole, or is made of a mark for each token."""

    def keep(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        assert mask is not None
        if mask.ndim == 4:
            return mask
        causal = torch.arange(length) <= torch.arange(length)[:, None]
        return causal | (mask[:, None, :, None] & mask[:, None, None, :])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("how", ["whole", "made of marks"])
def test_fc_033_block_that_looks_both_ways_over_the_cut(how: str, n: int) -> None:
    marks = torch.zeros(1, 16, dtype=torch.bool)
    marks[:, 4:12] = True
    whole = torch.ones(16, 16, dtype=torch.bool).tril() | (marks[:, None, :, None] & marks)
    mask = marks if how == "made of marks" else whole
    assert loss_of(GivenMask(), n, batch_with(attention_mask=mask)) == checked(4.301)
    rows = torch.cat([mask, mask.roll(-3, -1).roll(-3, -2) if how == "whole" else marks.roll(3, 1)])
    loss_of(GivenMask(), n, batch_with(UNEVEN, 2, attention_mask=rows))


class Alternating(ModelT):
    """A mask for each layer: a window of 4 where `windowed` says so."""

    windowed: tuple[bool, ...] = (True, False)

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        at = torch.arange(x.shape[1])
        angles = self.angles(at[None], x.shape[1]).unsqueeze(-3)
        away = at[:, None] - at
        for block, windowed in zip(self.blocks, self.windowed, strict=True):
            x = block(x, angles, (away >= 0) & (away < 4) if windowed else away >= 0)
        return rms_norm(x)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize(
    ("windowed", "loss"),
    [
        ((True, False), 4.568),
        ((True, True), 4.607),
        ((False, False), 4.253),
        ((False, True), 4.213),
    ],
)
def test_fc_058_each_layer_keeps_its_window(
    windowed: tuple[bool, ...], loss: float, n: int
) -> None:
    model = Alternating()
    model.windowed = windowed
    assert loss_of(model, n, batch_with()) == checked(loss)
    loss_of(model, n, batch_with(UNEVEN, 2))


class HeadsInPlace(Attention):
    """[B, S, H, D] into attention: with 8 heads and 8 tokens, heads read each other."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("n", RANKS)
def test_fc_063_layout_is_that_of_the_program(n: int) -> None:
    config = TConfig(heads=8, kv_heads=8, head_size=4)
    batch = batch_with(UNEVEN, 2, length=8)
    right, mixed = (loss_of(t_with(k, config), n, batch) for k in (Attention, HeadsInPlace))
    assert abs(right - mixed) > 1e-3


class Flex(nn.Module):
    """flex_attention with documents, in blocks of a size of its own."""

    def __init__(self, attend: Callable[..., Tensor], block: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(64, 8, generator=generator, dtype=torch.float64)
        self.table, self.attend, self.block = nn.Parameter(table), attend, block

    def forward(self, ids: Tensor, documents: Tensor) -> Tensor:
        def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (documents[b, q] == documents[b, k]) & (q >= k)

        rows, length = ids.shape
        mask = create_block_mask(
            mod, rows, None, length, length, device="cpu", BLOCK_SIZE=self.block
        )
        x = F.embedding(ids, self.table).unflatten(-1, (4, 2)).transpose(1, 2)
        return self.attend(x, x, x * 0.5, block_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("length", "block"), [(256, 64), (16, 128), (16, 16), (100, 32)])
def test_fc_102_blocks_of_any_size_and_short_sequences(length: int, block: int, n: int) -> None:
    ids = ids_of_t(2, length)
    starts = (ids + torch.arange(length)).remainder(7) == 0
    model = Flex(flex.flex_attention, block)
    reference = Flex(reference_attention.flex_attention, block)
    assert_program_equals_whole(model, (ids, starts.cumsum(1)), n, reference=reference)


class Encoder(ModelT):
    """Looks both ways, and no further than the 13 tokens there are."""

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        at = torch.arange(x.shape[1])
        angles = self.angles(at[None], x.shape[1]).unsqueeze(-3)
        for block in self.blocks:
            x = block(x, angles, torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool))
        return rms_norm(x)


class NoMask(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("n", RANKS)
def test_fc_060_no_padding_is_seen_that_the_split_brings(n: int) -> None:
    """There is none: ranks hold 4, 3, 3 and 3 tokens."""
    encoder = Encoder()
    batch = batch_with(range(12), 2, 13)
    program = assert_program_equals_whole(encoder, (), n, **batch)
    output = next(node for node in program.flat.nodes if node.op == "output")
    split = [p for p in facts(output).placements if isinstance(p, Shard)]
    assert [sum(p.sizes) for p in split] == [13]
    assert loss_of(t_with(NoMask), n, batch) == pytest.approx(loss_of(encoder, n, batch))


@pytest.mark.parametrize("n", RANKS)
def test_fc_082_any_length_on_any_number_of_ranks(n: int) -> None:
    """Down to one token a rank; fewer are refused (tests/ranks/test_refusals.py)."""
    for length in (13, 16, 9, 5, n):
        batch = batch_with(range(length - 1), 2, length)
        loss_of(TConfig(), n, batch)
        logits = ModelT()(**batch)
        assert isinstance(logits, TOutput) and logits.logits.shape == (2, length, 64)
