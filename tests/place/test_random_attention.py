"""Attention in ways that nobody listed: shapes, heads, masks and spelling drawn by a seed."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.place.masks import tiles
from tests.place.varlen import flash_attn_here
from tests.simulate import assert_program_equals_whole

__all__ = ["flash_attn_here"]

LEAST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Drawn:
    """One attention: `inputs` and a function of them."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.batch, self.length = draw.choice([1, 2, 3]), draw.choice([5, 8, 9, 12, 13])
        self.keys = self.length if draw.random() < 0.8 else draw.choice([4, 7, 10])
        self.group, self.kv = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4])
        self.size = draw.choice([2, 4])
        masks = ["none", "pad", "bias", "slopes"]
        if self.keys == self.length:
            masks += ["causal", "is_causal", "window", "documents", "padded", "finite", "prefix"]
            masks += ["both ways", "chunks", "torn", "documents and a window", "runs"]
        self.mask = draw.choice(masks)
        self.spelled = draw.choice(["sdpa", "sdpa", "matmul", "einsum", "groups", "groups @"])
        self.shared = draw.choice(["gqa", "repeat", "expand"]) if self.group > 1 else "plain"
        self.masked = draw.choice(["add", "fill", "where"])
        self.scale = draw.choice([None, 0.3, 1.0])
        self.window = draw.randrange(1, self.length)
        self.table = _drawn(seed, 10, self.kv * self.group * self.size).requires_grad_()
        self.bias = _drawn(seed + 1, self.length, self.keys)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(10, (self.batch, self.length), generator=generator)
        memory = torch.randint(10, (self.batch, self.keys), generator=generator)
        starts = torch.rand(self.batch, self.length, generator=generator) < 0.3
        padding = torch.ones(self.batch, self.keys, dtype=torch.int64)
        for row in padding:
            row[: draw.choice([0, 0, 1, self.keys - 1])] = 0
        documents = starts.long().cumsum(1)
        if self.mask == "torn":  # ids that come back after others
            documents = documents % draw.choice([2, 3])
        self.inputs = (ids, memory, documents, padding)

    def allowed(self, documents: Tensor, padding: Tensor) -> Tensor | None:
        q, k = torch.arange(self.length)[:, None], torch.arange(self.keys)[None]
        real = padding.bool()[:, None, None, :]
        if self.mask in ("none", "is_causal", "bias", "slopes"):
            return None
        if self.mask == "pad":
            return real
        if self.mask == "window":
            return (k <= q) & (q - k < self.window)
        if self.mask == "documents":
            return (k <= q) & (documents[:, None, :, None] == documents[:, None, None, :])
        if self.mask == "prefix":
            return (k <= q) | (k < 3)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        if self.mask in ("torn", "runs"):  # both ways
            return same
        if self.mask == "both ways":
            return (q - k).abs() < self.window
        if self.mask == "chunks":
            return (q // self.window == k // self.window) & (k <= q)
        if self.mask == "documents and a window":
            return same & (k <= q) & (q - k < self.window)
        return (k <= q) if self.mask == "causal" else (k <= q) & real

    def added(self, allowed: Tensor | None) -> Tensor | None:
        """A float mask, where it is one."""
        if self.mask == "bias":
            return self.bias
        if self.mask == "slopes":
            away = torch.arange(self.keys)[None] - torch.arange(self.length)[:, None]
            each = torch.arange(1, self.kv * self.group + 1).double()[None, :, None, None] * 0.1
            return each * away.double()
        if self.mask == "finite":
            assert allowed is not None
            return torch.where(allowed, 0.0, LEAST).double()
        return None

    def __call__(self, ids: Tensor, memory: Tensor, documents: Tensor, padding: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        y = x if self.keys == self.length else F.embedding(memory, self.table)
        width = self.kv * self.size
        q = (x * 1.3).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k = (y[..., :width] * 0.7).unflatten(-1, (-1, self.size)).transpose(1, 2)
        v = (y[..., -width:] * -0.9).unflatten(-1, (-1, self.size)).transpose(1, 2)
        allowed = self.allowed(documents, padding)
        if self.spelled.startswith("groups"):
            out = self.by_groups(q.unflatten(1, (-1, self.group)), k, v, allowed)
            return out.flatten(1, 2).transpose(1, 2).flatten(2)
        if self.shared == "repeat" or (self.shared == "gqa" and self.spelled != "sdpa"):
            k, v = (z.repeat_interleave(self.group, 1) for z in (k, v))
        if self.shared == "expand":
            k, v = (z[:, :, None].expand(-1, -1, self.group, -1, -1).flatten(1, 2) for z in (k, v))
        added = self.added(allowed)
        if self.spelled == "sdpa":
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=allowed if added is None else added, scale=self.scale,
                is_causal=self.mask == "is_causal", enable_gqa=self.shared == "gqa",
            )  # fmt: skip
        else:
            out = self.by_hand(q, k, v, allowed, added)
        return out.transpose(1, 2).flatten(2)

    def by_groups(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        """q [B, Hkv, group, S, D]: scores of five dims."""
        if self.spelled == "groups":
            scores = torch.einsum("bkgqd,bksd->bkgqs", q, k)
        else:
            scores = q @ k[:, :, None].transpose(-1, -2)
        scores = scores * (self.scale or self.size**-0.5)
        if self.mask == "is_causal":
            allowed = torch.ones(self.length, self.keys, dtype=torch.bool).tril()
        if allowed is not None:
            least = -1e9 if self.mask in ("pad", "padded", "finite") else -torch.inf
            allowed = allowed.unsqueeze(1) if allowed.dim() == 4 else allowed
            scores = scores.masked_fill(~allowed, least)
        elif self.mask == "bias":
            scores = scores + self.bias
        elif self.mask == "slopes":
            scores = scores + self.added(None).unflatten(1, (-1, self.group))
        weights = scores.softmax(-1)
        by_letters = self.spelled == "groups"
        return (
            torch.einsum("bkgqs,bksd->bkgqd", weights, v) if by_letters else weights @ v[:, :, None]
        )

    def by_hand(
        self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, added: Tensor | None
    ) -> Tensor:
        by_letters = self.spelled == "einsum"
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if by_letters else q @ k.transpose(-1, -2)
        scores = scores * (self.scale or self.size**-0.5)
        if self.mask == "is_causal":
            above = torch.ones(self.length, self.keys, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(above, -torch.inf)
        elif added is not None:
            scores = scores + added
        elif allowed is not None and self.masked == "add":
            scores = scores + torch.where(allowed, 0.0, -1e9)
        elif allowed is not None and self.masked == "fill":
            scores = scores.masked_fill(~allowed, -1e9)
        elif allowed is not None:
            scores = torch.where(allowed, scores, -1e9)
        weights = scores.softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v) if by_letters else weights @ v


@pytest.mark.parametrize("seed", range(90))
def test_drawn_attention_is_that_of_one_device(seed: int) -> None:
    drawn = Drawn(seed)
    assert_program_equals_whole(drawn, drawn.inputs, n=1 + seed % 4)


@pytest.mark.parametrize("seeds", [range(part, 240, 6) for part in range(6)])
def test_drawn_attention_with_flash_attn_is_that_of_one_device(
    flash_attn_here: list[tuple[int, int]], seeds: range
) -> None:
    """Much of it goes there, and what does not goes by tiles."""
    taken = 0
    for seed in seeds:
        drawn, before = Drawn(seed), len(flash_attn_here)
        assert_program_equals_whole(drawn, drawn.inputs, n=1 + seed % 4)
        taken += len(flash_attn_here) > before
    assert len(seeds) / 4 < taken < len(seeds)
