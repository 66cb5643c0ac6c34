"""FIELD-CASES.md, class packing: documents side by side in a row, over the cuts and at them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

from autosp_dtensor.errors import CaptureError
from autosp_dtensor.place.masks import tiles
from tests import reference_attention
from tests.model_t import IGNORED, ModelT, TConfig, TOutput, rms_norm, rotate
from tests.place.field_cases import (
    assert_reach_only,
    batch_with,
    checked,
    logits_of,
    loss_of,
)
from tests.simulate import Lowered, assert_program_equals_whole, lowered

RANKS = [2, 3, 4]
WAYS = ["mask", "matmul", "einsum", "flex", "varlen"]


@pytest.fixture(autouse=True)
def flash_and_small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tiles, "TILE", 4)
    with reference_attention.references_here():
        yield


def positions_of(*rows: tuple[int, ...]) -> Tensor:
    """Positions that start anew with each document."""
    made = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    return torch.stack(made)


def cuts_of(positions: Tensor) -> Tensor:
    """cu_seqlens, as a loader makes them of the whole batch."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    return F.pad(starts, (0, 1), value=positions.numel()).to(torch.int32)


class Packed(ModelT):
    """Model T, its documents told by the positions, and attention inside them written in one of
    five ways. On one device, flex_attention is its reference."""

    def __init__(self, way: str, reference: bool = False) -> None:
        super().__init__(TConfig(attention=(way if way in ("matmul", "einsum") else "sdpa",)))
        self.way, self.reference = way, reference

    def forward(  # type: ignore[override]
        self, ids: Tensor, labels: Tensor, position_ids: Tensor, cu_seqlens: Tensor
    ) -> TOutput:
        x = self.embedding(ids)
        documents = (position_ids == 0).cumsum(1)
        angles = self.angles(position_ids, ids.shape[1]).unsqueeze(-3)
        for block in self.blocks:
            if self.way in ("flex", "varlen"):
                mixed = self.mixed(block.attention, rms_norm(x), angles, documents, cu_seqlens)
                x = x + block.attention.o(mixed)
                x = x + block.down(F.silu(block.up(rms_norm(x))))
            else:
                at = torch.arange(ids.shape[1])
                same = documents[:, None, :, None] == documents[:, None, None, :]
                x = block(x, angles, same & (at <= at[:, None]))
        logits = self.head(rms_norm(x))
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return TOutput(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)

    def mixed(
        self, attention: Any, x: Tensor, angles: Tensor, documents: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        q, k, v = attention.heads_of(x)
        q, k = rotate(q, angles), rotate(k, angles)
        rows, length = documents.shape
        if self.way == "varlen":
            q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v))
            cuts = cu_seqlens, cu_seqlens, length, length
            out = sys.modules["flash_attn"].flash_attn_varlen_func(q, k, v, *cuts, causal=True)
            return out.unflatten(0, (rows, length)).flatten(2)

        def mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
            return (documents[b, m] == documents[b, n]) & (m >= n)

        attend = reference_attention.flex_attention if self.reference else flex.flex_attention
        mask = create_block_mask(mod, rows, None, length, length, device="cpu", BLOCK_SIZE=16)
        return attend(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


def packed_batch(*rows: tuple[int, ...], tail: int = 0) -> dict[str, Tensor]:
    """Documents of these lengths in each row, targets inside them only, the last `tail` tokens
    padding."""
    positions = positions_of(*rows)
    batch = batch_with(range(15), len(rows))
    batch["labels"] = batch["labels"].masked_fill(positions == 0, IGNORED)
    if tail:
        batch["labels"][:, -tail:] = IGNORED
    return {**batch, "position_ids": positions, "cu_seqlens": cuts_of(positions)}


def run(way: str, n: int, batch: dict[str, Tensor]) -> tuple[Lowered, float]:
    program = assert_program_equals_whole(
        Packed(way), (), n, reference=Packed(way, reference=True), **batch
    )
    return program, Packed(way, reference=True)(**batch).loss.item()


def others(ids: Tensor, row: int, where: slice) -> Tensor:
    changed = ids.clone()
    changed[row, where] = (changed[row, where] + 17) % 64
    return changed


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_fc_002_documents_do_not_see_each_other(way: str, n: int) -> None:
    batch = packed_batch((5, 11))
    program, loss = run(way, n, batch)
    assert loss == checked(4.692)
    assert_reach_only(program, batch, others(batch["ids"], 0, slice(0, 5)), [(0, slice(5, 16))])


class FromShards(Packed):
    """Makes its cu_seqlens itself; their number depends on data."""

    def forward(self, ids: Tensor, labels: Tensor, position_ids: Tensor) -> TOutput:  # type: ignore[override]
        return super().forward(ids, labels, position_ids, cuts_of(position_ids))


@pytest.mark.parametrize("n", RANKS)
def test_fc_019_borders_are_those_of_the_whole_sequence(n: int) -> None:
    """Every rank is handed offsets of all tokens, whatever part of the sequence it holds."""
    batch = packed_batch((5, 11))
    program, _ = run("varlen", n, batch)
    assert batch["cu_seqlens"].tolist() == [0, 5, 16]
    for node in program.named("flash_attn_varlen_func"):
        assert node.kwargs["cu_seqlens_q"].meta["autosp"].outs[0].shape == (3,)
    del batch["cu_seqlens"]
    with pytest.raises(CaptureError, match="nonzero"):
        lowered(FromShards("varlen"), (), n, **batch)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_fc_020_a_document_over_any_number_of_ranks_is_one(way: str, n: int) -> None:
    """And of several, changing the longest leaves the others as they were, bit for bit."""
    batch = packed_batch((5, 11))
    program, loss = run(way, n, batch)
    assert loss == checked(4.692)
    changed = others(batch["ids"], 0, slice(5, 16))
    assert_reach_only(program, batch, changed, [(0, slice(0, 5))])
    run(way, n, packed_batch((16,)))
    batch = packed_batch((1, 14, 1))
    program, _ = run(way, n, batch)
    changed = others(batch["ids"], 0, slice(1, 15))
    assert_reach_only(program, batch, changed, [(0, slice(0, 1)), (0, slice(15, 16))])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("lengths", [(8, 8), (5, 11)])
def test_fc_021_last_token_of_a_document_has_no_target(lengths: tuple[int, ...], n: int) -> None:
    """14 of 15 targets, each weighed alike: the sum over the count is the loss."""
    batch = packed_batch(lengths)
    assert int((batch["labels"][:, 1:] != IGNORED).sum()) == 14
    _, loss = run("mask", n, batch)
    logits = Packed("mask")(**batch).logits[0]
    each = F.cross_entropy(logits[:-1], batch["ids"][0, 1:], reduction="none")
    border = lengths[0] - 1
    assert loss == pytest.approx((each.sum() - each[border]).item() / 14)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_fc_044_documents_of_any_length_and_padding(way: str, n: int) -> None:
    """Pads are a document of their own; a document alone, on one device, has the logits that the
    ranks give it in its row, and the second one reaches no other."""
    for lengths, tail in (((7, 3, 6), 6), ((1, 1, 1, 13), 0)):
        batch = packed_batch(lengths, tail=tail)
        program, _ = run(way, n, batch)
        logits = logits_of(program, batch)
        start = 0
        for length in lengths:
            alone = batch_with(range(15))["ids"][:, start : start + length]
            want = ModelT()(alone).logits
            torch.testing.assert_close(logits[:, start : start + length], want)
            start += length
        second = slice(lengths[0], lengths[0] + lengths[1])
        rest = [(0, slice(0, second.start)), (0, slice(second.stop, 16))]
        assert_reach_only(program, batch, others(batch["ids"], 0, second), rest)


class Recurrent(nn.Module):
    """h[t] = a[t] h[t - 1] + x[t], and nothing of h where a document starts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 32).double()

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        decay = torch.sigmoid(self.gate(x)) * (position_ids != 0)[..., None]
        state, states = torch.zeros_like(x[:, 0]), []
        for at in range(x.shape[1]):
            state = decay[:, at] * state + x[:, at]
            states.append(state)
        return torch.stack(states, 1)


class Mixed(Packed):
    """Layer 0 attends, layer 1 is a recurrence."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__("mask")
        self.blocks = self.blocks[:1]
        self.recurrent = Recurrent()

    def forward(  # type: ignore[override]
        self, ids: Tensor, labels: Tensor, position_ids: Tensor, cu_seqlens: Tensor
    ) -> TOutput:
        logits = super().forward(ids, labels, position_ids, cu_seqlens).logits
        logits = self.head(self.recurrent(logits @ self.embedding.weight, position_ids))
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return TOutput(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)


@pytest.mark.parametrize("n", RANKS)
def test_fc_047_recurrence_beside_attention_starts_anew_as_well(n: int) -> None:
    batch = packed_batch((5, 11))
    program = assert_program_equals_whole(Mixed(), (), n, **batch)
    assert_reach_only(program, batch, others(batch["ids"], 0, slice(0, 5)), [(0, slice(5, 16))])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_fc_062_each_row_has_its_borders(way: str, n: int) -> None:
    batch = packed_batch((5, 11), (9, 7))
    program, _ = run(way, n, batch)
    changed = others(batch["ids"], 0, slice(0, 5))
    assert_reach_only(program, batch, changed, [(0, slice(5, 16)), (1, slice(0, 16))])
    changed = others(batch["ids"], 1, slice(9, 16))
    assert_reach_only(program, batch, changed, [(1, slice(0, 9)), (0, slice(0, 16))])
    # Row 0's documents changed, not its tokens: row 1 stays as it is.
    other = packed_batch((3, 13), (9, 7))
    before, (program, _) = logits_of(program, batch), run(way, n, other)
    after = logits_of(program, other)
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])


@pytest.mark.parametrize("n", RANKS)
def test_fc_089_three_axes_of_positions_are_no_documents(n: int) -> None:
    """As many as a row of text has: equal on all three axes."""
    config = TConfig(positions="mrope")
    positions = torch.arange(16).expand(3, 1, 16).contiguous()
    loss = loss_of(config, n, batch_with(position_ids=positions))
    assert loss == pytest.approx(loss_of(TConfig(), n, batch_with()))
