"""All-to-all: the sharding of values moves to another dim. Started early, awaited late.

`start` packs and sends; what it gives has no data before `finish` has waited. In between, the rank
computes what does not need it. Backward goes the same way: the gradient of `finish` starts the
exchange back, that of `start` waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._torch import once_differentiable
from ..placement import Cover, Shard

__all__ = ["Exchange", "all_to_all"]

Move = tuple[Shard, Shard]
Tensors = tuple[torch.Tensor, ...]


def all_to_all(
    group: Any, rank: int, moves: tuple[Move, ...], *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Move the sharding of each tensor from one dim to another, all tensors in one exchange.

    Args:
        moves: for each tensor, the placement it has and the placement asked for, on different dims.
        tensors: local parts of one dtype, any strides.

    Returns:
        local parts in the new placements, dims in memory in the order that they came in.
    """
    return Exchange(group, rank, moves, *tensors).finish()


class Exchange:
    """One exchange on its way: made when it is started, `finish` gives what `all_to_all` does."""

    def __init__(
        self, group: Any, rank: int, moves: tuple[Move, ...], *tensors: torch.Tensor
    ) -> None:
        self.group, self.rank, self.moves = group, rank, moves
        self.is_complex = tensors[0].is_complex()
        if self.is_complex:
            tensors = tuple(torch.view_as_real(t.resolve_conj()) for t in tensors)
        self.backward: _Flight | None = None
        self.forward: _Flight | None = None
        self.size = 0
        self.received: torch.Tensor | None = _Start.apply(self, *tensors)

    def finish(self) -> Tensors:
        """Wait, and put the parts together. Once only."""
        assert self.received is not None, "an exchange is finished once"
        outs = _Finish.apply(self, self.received)
        self.received = None
        return tuple(torch.view_as_complex(out) for out in outs) if self.is_complex else outs


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        flight = _send(exchange.group, exchange.rank, exchange.moves, tensors)
        exchange.forward, exchange.size = flight, flight.received.numel()
        return flight.received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor):
        flight = ctx.exchange.backward
        ctx.exchange.backward = None
        return None, *flight.land()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, received: torch.Tensor) -> Tensors:
        ctx.exchange = exchange
        assert exchange.forward is not None
        outs = exchange.forward.land()
        exchange.forward = None
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor):
        exchange: Exchange = ctx.exchange
        back = tuple((target, source) for source, target in exchange.moves)
        exchange.backward = _send(exchange.group, exchange.rank, back, grads)
        # Shaped as what start gave: only its place in the order of backward counts.
        return None, grads[0].new_zeros(1).expand(exchange.size)


class _Piece:
    """Shapes of one tensor's move: how it is cut by destination and joined by source."""

    def __init__(self, x: torch.Tensor, move: Move, rank: int) -> None:
        source, target = move
        assert source.dim != target.dim, "an exchange moves the sharding to another dim"
        self.source, self.target = source, target
        first, second = sorted((source, target), key=lambda s: s.dim)
        shape = list(x.shape)
        lengths = {id(source): source.sizes[rank], id(target): target.block}
        exposed = [
            *shape[: first.dim], first.outer, lengths[id(first)],
            *shape[first.dim + 1 : second.dim], second.outer, lengths[id(second)],
            *shape[second.dim + 1 :],
        ]  # fmt: skip
        strides = x.stride()
        self._order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
        self.view = x.reshape(exposed)
        self._shape = list(self.view.shape)
        self.have_dim = first.dim + 1 if first is source else second.dim + 2
        self.want_dim = first.dim + 1 if first is target else second.dim + 2
        self.first_dim, self.second_dim = first.dim, second.dim

    def shape(self, have: int, want: int) -> list[int]:
        shape = list(self._shape)
        shape[self.have_dim], shape[self.want_dim] = have, want
        return shape

    def forget(self) -> None:
        """Let go of the values once they are packed."""
        self.view = self.view.new_empty(0)

    def empty(self, buffer: torch.Tensor, have: int, want: int) -> torch.Tensor:
        """Memory for the result, its dims in the same order there as the input's.

        What follows then finds the layout that the model has made: attention's [B, H, S, D] stays a
        view of [B, S, H, D], and is folded to [B, S, H * D] without a copy.
        """
        shape = [0] * len(self._order)
        sizes = self.shape(have, want)
        for dim in range(len(shape)):
            at = dim + (dim > self.first_dim) + (dim > self.second_dim)
            folded = dim in (self.first_dim, self.second_dim)
            shape[dim] = sizes[at] * sizes[at + 1] if folded else sizes[at]
        out = buffer.new_empty([shape[d] for d in self._order])
        return out.permute([self._order.index(d) for d in range(len(shape))])

    def exposed(self, out: torch.Tensor, have: int, want: int) -> torch.Tensor:
        """The result seen with the dims that pieces have."""
        sizes = self.shape(have, want)
        first, second = self.first_dim, self.second_dim
        out = out.unflatten(second, sizes[second + 1 : second + 3])
        return out.unflatten(first, sizes[first : first + 2])


class _Flight:
    """What was sent, until it is received."""

    def __init__(
        self, work: Any, sent: torch.Tensor, received: torch.Tensor, unpack: Callable[[], Tensors]
    ) -> None:
        self.work, self.sent, self.received, self.unpack = work, sent, received, unpack

    def land(self) -> Tensors:
        if self.work is not None:
            self.work.wait()
        return self.unpack()


def _send(group: Any, rank: int, moves: Sequence[Move], tensors: Sequence[torch.Tensor]) -> _Flight:
    pieces = [_Piece(x, move, rank) for x, move in zip(tensors, moves, strict=True)]
    if all(p.source.even and p.target.even for p in pieces):
        return _send_even(group, pieces)
    return _send_uneven(group, rank, pieces)


def _send_even(group: Any, pieces: Sequence[_Piece]) -> _Flight:
    """Equal parts: one copy to pack and one to unpack for each tensor."""
    n = len(pieces[0].source.sizes)
    shapes = [p.shape(p.source.sizes[0], p.target.sizes[0]) for p in pieces]
    counts = [math.prod(shape) for shape in shapes]
    sent = pieces[0].view.new_empty((n, sum(counts)))
    at = 0
    for piece, shape, count in zip(pieces, shapes, counts, strict=True):
        cut = piece.view.unflatten(piece.want_dim, (n, piece.target.sizes[0])).movedim(
            piece.want_dim, 0
        )
        sent.narrow(1, at, count).unflatten(1, shape).copy_(cut)
        at += count
    for piece in pieces:
        piece.forget()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)

    def unpack() -> Tensors:
        outs, at = [], 0
        for piece, shape, count in zip(pieces, shapes, counts, strict=True):
            sizes = n * piece.source.sizes[0], piece.target.sizes[0]
            out = piece.empty(received, *sizes)
            places = piece.exposed(out, *sizes).unflatten(piece.have_dim, (n, -1))
            parts = received.narrow(1, at, count).unflatten(1, shape)
            places.movedim(piece.have_dim, 0).copy_(parts)
            outs.append(out)
            at += count
        return tuple(outs)

    return _Flight(work, sent, received.view(-1), unpack)


def _send_uneven(group: Any, rank: int, pieces: Sequence[_Piece]) -> _Flight:
    """Parts of any size, none included: the exchange carries split sizes."""
    n = len(pieces[0].source.sizes)
    to = [[p.shape(p.source.sizes[rank], p.target.sizes[r]) for p in pieces] for r in range(n)]
    frm = [[p.shape(p.source.sizes[r], p.target.sizes[rank]) for p in pieces] for r in range(n)]
    out_counts = [sum(math.prod(s) for s in shapes) for shapes in to]
    in_counts = [sum(math.prod(s) for s in shapes) for shapes in frm]
    sent = pieces[0].view.new_empty(sum(out_counts))
    at = 0
    for r in range(n):
        for k, shape in enumerate(to[r]):
            count = math.prod(shape)
            target = pieces[k].target
            cut = pieces[k].view.narrow(pieces[k].want_dim, target.offsets[r], target.sizes[r])
            sent.narrow(0, at, count).view(shape).copy_(cut)
            at += count
    for piece in pieces:
        piece.forget()
    received = sent.new_empty(sum(in_counts))
    work = dist.all_to_all_single(received, sent, in_counts, out_counts, group=group, async_op=True)

    def unpack() -> Tensors:
        parts: list[list[torch.Tensor]] = [[] for _ in pieces]
        at = 0
        for r in range(n):
            for k, shape in enumerate(frm[r]):
                count = math.prod(shape)
                parts[k].append(received.narrow(0, at, count).view(shape))
                at += count
        return tuple(_assemble(p, parts[k], rank) for k, p in enumerate(pieces))

    return _Flight(work, sent, received, unpack)


def _assemble(piece: _Piece, parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """One dim from all ranks' parts: side by side, or added where their intervals overlap."""
    source = piece.source
    sizes = source.block, piece.target.sizes[rank]
    out = piece.empty(parts[0], *sizes)
    whole = piece.exposed(out, *sizes)
    if isinstance(source, Cover):
        whole.zero_()
    for part, start, size in zip(parts, source.offsets, source.sizes, strict=True):
        place = whole.narrow(piece.have_dim, start, size)
        place.add_(part) if isinstance(source, Cover) else place.copy_(part)
    return out
