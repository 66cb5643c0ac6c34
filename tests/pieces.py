"""A whole value and the pieces of it that ranks hold: by index, in plain torch.

Nothing of `lower/layout.py` is used: this is what it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autosp_dtensor.placement import Cover, Partial, Placement, Replicate, Shard


def positions(shard: Shard, rank: int) -> Tensor:
    """Which positions of the whole dim a rank holds, in its local order."""
    if isinstance(shard, Cover):  # intervals that may overlap
        return torch.arange(shard.starts[rank], shard.starts[rank] + shard.sizes[rank])
    start = sum(shard.sizes[:rank])
    block = sum(shard.sizes)
    return torch.tensor(
        [b * block + start + k for b in range(shard.outer) for k in range(shard.sizes[rank])],
        dtype=torch.int64,
    )


def cut(whole: Tensor, placement: Placement, n: int) -> list[Tensor]:
    """What each rank holds of a whole value."""
    if isinstance(placement, Shard):
        return [whole.index_select(placement.dim, positions(placement, r)) for r in range(n)]
    assert isinstance(placement, Replicate), "a whole value is not cut into terms"
    return [whole] * n


def glue(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole value; replicas have to be equal bit for bit."""
    if isinstance(placement, Shard):
        for rank, part in enumerate(parts):
            assert part.shape[placement.dim] == placement.outer * placement.sizes[rank]
        order = torch.cat([positions(placement, r) for r in range(len(parts))])
        joined = torch.cat(list(parts), placement.dim)
        return joined.index_select(placement.dim, order.argsort())
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
    return parts[0]


def shardings(length: int, n: int) -> list[tuple[tuple[int, ...], int]]:
    """(sizes, outer) that cut a dim of `length` for n ranks: balanced, as torch.chunk does, skewed,
    all on one rank, and in two blocks."""
    found = []
    for outer in (1, 2):
        block = length // outer
        if outer > 1 and (length % outer or block < 2):
            continue
        each, more = divmod(block, n)
        ceil = -(-block // n)
        skewed = [min(1, block)] * n
        skewed[n // 2] = max(block - (n - 1) * skewed[0], 0)
        ways = [
            tuple(each + (r < more) for r in range(n)),
            tuple(max(0, min(ceil, block - r * ceil)) for r in range(n)),
            tuple(skewed),
            (0,) * (n - 1) + (block,),
        ]
        found += [(way, outer) for way in ways[: 4 if outer == 1 else 1] if sum(way) == block]
    return list(dict.fromkeys(found))
