"""Cutting and joining local tensors along a sharded dim; plain torch, no communication."""

from __future__ import annotations

import torch

from ..placement import Shard

__all__ = ["expose", "merge", "take_shard"]


def expose(x: torch.Tensor, shard: Shard, length: int) -> torch.Tensor:
    """[..., outer * length, ...] -> [..., outer, length, ...]: the cut dim is `shard.dim + 1`."""
    return x.unflatten(shard.dim, (shard.outer, length))


def merge(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Inverse of `expose`."""
    return x.flatten(shard.dim, shard.dim + 1)


def take_shard(x: torch.Tensor, shard: Shard, rank: int) -> torch.Tensor:
    """This rank's part of a replicated value; its transpose pads with zeros, nothing is sent."""
    offset, size = shard.offsets[rank], shard.sizes[rank]
    if shard.outer == 1:
        return x.narrow(shard.dim, offset, size)
    return merge(expose(x, shard, shard.block).narrow(shard.dim + 1, offset, size), shard)
