"""Changes of placement as collectives that autograd can go through.

One convention: the mean over sp of what ranks hold is the gradient of a replicated value; of a
sharded or partial value, each rank holds n times its part. So all_reduce transposes to all_reduce,
all_gather to reduce_scatter and all_to_all to all_to_all, with no factor (JAX's shard_map types the
same rule).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .._torch import all_gather_single, once_differentiable, reduce_scatter_single
from ..placement import Shard
from .buffers import making_buffers
from .layout import merge

__all__ = [
    "all_gather",
    "all_reduce",
    "mean_grad",
    "reduce_scatter",
    "relayout",
    "scale_grad",
]


def relayout(group: Any, rank: int, source: Shard, target: Shard, x: torch.Tensor) -> torch.Tensor:
    """Move the borders between ranks along one dim: one all-to-all of the rows that move."""
    return _Relayout.apply(group, rank, source, target, x)


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, rank: int, source: Shard, target: Shard, x: torch.Tensor):
        ctx.saved = group, rank, source, target
        return _move_rows(group, rank, source, target, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        group, rank, source, target = ctx.saved
        return None, None, None, None, _move_rows(group, rank, target, source, grads[0])


def _intervals(shard: Shard, rank: int) -> list[tuple[int, int, int]]:
    """(start in the whole dim, end, start in the local dim) of what a rank holds."""
    size, offset = shard.sizes[rank], shard.offsets[rank]
    return [
        (o * shard.block + offset, o * shard.block + offset + size, o * size)
        for o in range(shard.outer)
    ]


def _overlaps(
    a: list[tuple[int, int, int]], b: list[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """(start in the whole dim, start in a's local dim, length) of what two ranks have in common."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        low, high = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if low < high:
            found.append((low, a[i][2] + low - a[i][0], high - low))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _move_rows(
    group: Any, rank: int, source: Shard, target: Shard, x: torch.Tensor
) -> torch.Tensor:
    n, dim = len(source.sizes), source.dim
    x = x.movedim(dim, 0)
    row = x[:1].numel() if x.shape[0] else math.prod(x.shape[1:])
    mine = _intervals(source, rank)
    pieces, out_counts = [], []
    for r in range(n):
        overlap = _overlaps(mine, _intervals(target, r))
        pieces.extend(x.narrow(0, start, length) for _, start, length in overlap)
        out_counts.append(row * sum(length for *_, length in overlap))
    with making_buffers:
        sent = torch.cat([p.reshape(-1) for p in pieces]) if pieces else x.new_empty(0)
    incoming, in_counts = [], []
    for r in range(n):
        overlap = _overlaps(_intervals(source, r), _intervals(target, rank))
        incoming.extend((start, length) for start, _, length in overlap)
        in_counts.append(row * sum(length for *_, length in overlap))
    with making_buffers:
        received = x.new_empty(sum(in_counts))
    dist.all_to_all_single(received, sent, in_counts, out_counts, group=group)
    parts = received.split([row * length for _, length in incoming]) if incoming else ()
    ordered = [
        part
        for _, part in sorted(zip([s for s, _ in incoming], parts, strict=True), key=lambda p: p[0])
    ]
    shape = (target.outer * target.sizes[rank], *x.shape[1:])
    joined = torch.cat(ordered) if ordered else received
    return joined.view(shape).movedim(0, dim).contiguous()


def all_gather(group: Any, rank: int, source: Shard, x: torch.Tensor) -> torch.Tensor:
    """Shard -> replicate. Parts of unequal size are padded to the longest for the exchange."""
    if x.dtype == torch.bool:
        return _AllGather.apply(group, rank, source, x.to(torch.uint8)).to(torch.bool)
    if x.is_complex():
        return torch.view_as_complex(
            _AllGather.apply(group, rank, source, torch.view_as_real(x.resolve_conj()))
        )
    return _AllGather.apply(group, rank, source, x)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, rank: int, source: Shard, x: torch.Tensor):
        ctx.saved = group, rank, source
        return _gather(group, rank, source, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        group, rank, source = ctx.saved
        return None, None, None, _scatter_sum(group, rank, source, grads[0])


def _gather(group: Any, rank: int, source: Shard, x: torch.Tensor) -> torch.Tensor:
    n, longest = len(source.sizes), max(source.sizes)
    part = x.unflatten(source.dim, (source.outer, source.sizes[rank])).movedim(source.dim + 1, 0)
    if part.shape[0] < longest:
        part = torch.cat([part, part.new_zeros((longest - part.shape[0], *part.shape[1:]))])
    part = part.contiguous()
    out = part.new_empty((n * longest, *part.shape[1:]))
    all_gather_single(out, part, group=group)
    if not source.even:
        out = torch.cat([out.narrow(0, r * longest, size) for r, size in enumerate(source.sizes)])
    return merge(out.movedim(0, source.dim + 1), source).contiguous()


def _scatter_sum(group: Any, rank: int, target: Shard, x: torch.Tensor) -> torch.Tensor:
    n, longest = len(target.sizes), max(target.sizes)
    whole = x.unflatten(target.dim, (target.outer, target.block)).movedim(target.dim + 1, 0)
    if not target.even:
        padded = whole.new_zeros((n * longest, *whole.shape[1:]))
        for r, (offset, size) in enumerate(zip(target.offsets, target.sizes, strict=True)):
            padded.narrow(0, r * longest, size).copy_(whole.narrow(0, offset, size))
        whole = padded
    whole = whole.contiguous()
    out = whole.new_empty((longest, *whole.shape[1:]))
    reduce_scatter_single(out, whole, group=group)
    return merge(
        out.narrow(0, 0, target.sizes[rank]).movedim(0, target.dim + 1), target
    ).contiguous()


def reduce_scatter(group: Any, rank: int, target: Shard, x: torch.Tensor) -> torch.Tensor:
    """Partial -> shard."""
    return _ReduceScatter.apply(group, rank, target, x)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, rank: int, target: Shard, x: torch.Tensor):
        ctx.saved = group, rank, target
        return _scatter_sum(group, rank, target, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        group, rank, target = ctx.saved
        return None, None, None, _gather(group, rank, target, grads[0])


def all_reduce(group: Any, x: torch.Tensor) -> torch.Tensor:
    """Partial -> replicate."""
    return _AllReduce.apply(group, x)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, x: torch.Tensor):
        ctx.group = group
        return _summed(group, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        return None, _summed(ctx.group, grads[0])


def _summed(group: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.resolve_conj().contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def scale_grad(factor: float, x: torch.Tensor) -> torch.Tensor:
    """The same value; its gradient is multiplied."""
    return _ScaleGrad.apply(factor, x)


class _ScaleGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: float, x: torch.Tensor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        return None, grads[0] * ctx.factor


def mean_grad(group: Any, n: int, x: torch.Tensor) -> torch.Tensor:
    """The same value; its gradient becomes the mean over sp, as the caller expects."""
    return _MeanGrad.apply(group, n, x)


class _MeanGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, n: int, x: torch.Tensor):
        ctx.saved = group, n
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        group, n = ctx.saved
        return None, None, _summed(group, grads[0]) / n
