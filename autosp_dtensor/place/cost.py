"""What a change of placement costs in bytes that one rank sends, to choose between options."""

from __future__ import annotations

from ..graph import Meta
from ..placement import Partial, Placement, Replicate, Shard

__all__ = ["sent_bytes"]


def sent_bytes(meta: Meta, source: Placement, target: Placement, axis_size: int) -> float:
    """Bytes that one rank sends. n ranks, b bytes of the whole value:

    all-to-all b(n-1)/n^2; all-gather and reduce-scatter b(n-1)/n; all-reduce twice that; taking a
    slice nothing. Source: Thakur et al., Optimization of Collective Communication Operations in
    MPICH, 2005 (ring algorithms).
    """
    if source == target or axis_size == 1 or isinstance(source, Replicate):
        return 0.0
    part = meta.nbytes * (axis_size - 1) / axis_size
    if isinstance(source, Shard):
        if not isinstance(target, Shard):
            return part
        copies = sum(target.sizes) / max(target.block, 1)  # more than 1 where intervals overlap
        return copies * part / axis_size
    if isinstance(source, Partial):
        return 2 * part if isinstance(target, Replicate) else part
    raise AssertionError(f"no way from {source} to {target}")
