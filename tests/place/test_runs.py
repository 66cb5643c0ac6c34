"""Runs say what the mask said, and nothing else; passes hold each run once."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from autosp_dtensor.place.masks.runs import Pass, passes_of, runs_of

CPU = torch.device("cpu")


def drawn(seed: int) -> Tensor:
    """A mask [B, S, T] of what people combine."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, queries = draw.choice([1, 2, 3]), draw.choice([5, 9, 13, 30])
    keys = queries if draw.random() < 0.8 else draw.choice([4, 9, 20])
    q, k = torch.arange(queries)[None, :, None], torch.arange(keys)[None, None]
    mask = torch.ones(rows, queries, keys, dtype=torch.bool)
    if draw.random() < 0.5 and queries == keys:
        starts = torch.rand(rows, queries, generator=generator) < draw.choice([0.1, 0.3, 0.8])
        documents = starts.long().cumsum(1)
        mask &= documents[:, :, None] == documents[:, None]
    if draw.random() < 0.6:
        mask &= k <= q
    if draw.random() < 0.4:
        mask &= q - k <= draw.randrange(8)
    if draw.random() < 0.3:
        mask &= k - q <= draw.randrange(8)
    if draw.random() < 0.3:
        cut = torch.randint(0, keys, (rows, 1, 1), generator=generator)
        mask &= k < cut if draw.random() < 0.5 else k >= cut
    return mask | (k < draw.randrange(keys)) if draw.random() < 0.2 else mask


def spans(mask: Tensor) -> tuple[Tensor, Tensor] | None:
    at = torch.arange(mask.shape[-1])
    first = torch.where(mask, at, mask.shape[-1]).amin(-1)
    last = torch.where(mask, at, -1).amax(-1)
    gaps = (last - first + 1).clamp(min=0) != mask.sum(-1)
    return None if gaps.any() or not mask.any() else (first, last)


def allowed(passes: list[Pass], rows: int, queries: int, keys: int) -> Tensor:
    """How often a query reads a key, in all calls together, by flash-attn's rule."""
    found = torch.zeros(rows * queries, rows * keys, dtype=torch.int64)
    for each in passes:
        q = torch.arange(rows * queries) if each.queries is None else each.queries
        k = torch.arange(rows * keys) if each.keys is None else each.keys
        cuts_q, cuts_k = each.query_cuts.tolist(), each.key_cuts.tolist()
        assert each.most_queries == max(b - a for a, b in itertools.pairwise(cuts_q))
        assert each.most_keys == max(b - a for a, b in itertools.pairwise(cuts_k))
        pieces = zip(itertools.pairwise(cuts_q), itertools.pairwise(cuts_k), strict=True)
        for (top, bottom), (left, right) in pieces:
            at = torch.arange(bottom - top)[:, None] + (right - left) - (bottom - top)
            away = torch.arange(right - left)[None] - at
            reads = torch.ones_like(away, dtype=torch.bool)
            if each.window[0] >= 0:
                reads &= away >= -each.window[0]
            if each.window[1] >= 0:
                reads &= away <= each.window[1]
            found[q[top:bottom][:, None], k[left:right][None]] += reads.long()
    return found


@pytest.mark.parametrize("seeds", [range(part * 250, part * 250 + 250) for part in range(4)])
def test_runs_are_the_mask(seeds: range) -> None:
    seen = 0
    for seed in seeds:
        mask = drawn(seed)
        rows, queries, keys = mask.shape
        known = spans(mask)
        if known is None:
            continue
        passes = passes_of(runs_of(*known), rows, queries, keys, CPU)
        if passes is None:
            continue
        seen += 1
        want = torch.zeros(rows, queries, rows, keys, dtype=torch.int64)
        for row in range(rows):
            want[row, :, row] = mask[row].long()
        got = allowed(passes, rows, queries, keys)
        assert torch.equal(got, want.view(rows * queries, rows * keys)), seed
    assert seen > len(seeds) / 2


@pytest.mark.parametrize("window", [None, 3, 40])
def test_documents_are_one_call_that_copies_nothing(window: int | None) -> None:
    documents = torch.tensor([0] * 7 + [1] + [2] + [3] * 12 + [4] * 9).expand(2, -1)
    q, k = torch.arange(30)[:, None], torch.arange(30)[None]
    mask = (documents[:, :, None] == documents[:, None]) & (k <= q)
    if window is not None:
        mask &= q - k < window
    known = spans(mask)
    assert known is not None
    (only,) = passes_of(runs_of(*known), 2, 30, 30, CPU) or []
    assert only.queries is None and only.keys is None
    assert only.query_cuts.tolist() == [0, 7, 8, 9, 21, 30, 37, 38, 39, 51, 60]
    assert torch.equal(only.query_cuts, only.key_cuts)
    assert only.window == ((2, 0) if window == 3 else (-1, 0))


def test_keys_are_not_copied_without_end() -> None:
    """Each query reads a span of its own: no kernel's window says it."""
    first = torch.arange(40)[None] % 7
    assert passes_of(runs_of(first, first * 0 + 39), 1, 40, 40, CPU) is None
