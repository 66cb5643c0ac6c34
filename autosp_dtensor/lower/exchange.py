"""All-to-all: the sharding of values moves to another dim. Started early, awaited late.

`start` packs and sends; what it gives has no data before `finish` has waited. In between, the rank
computes what does not need it. Backward goes the same way: the gradient of `finish` starts the
exchange back, that of `start` waits for it.

On the wire a tensor's dims stand in an order that all ranks agree on, whatever their strides are:
as in the tensor, but tokens before the dim that changes places with them. Models mostly hold values
so ([B, S, H, D], seen as [B, H, S, D]); packing then copies long runs, or nothing where what goes
to a rank is one piece of memory already. Where tokens come first of all (one row), those of several
tensors lie side by side, token by token: what comes in is then cut, not copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._torch import once_differentiable
from ..placement import Cover
from .buffers import landed, making_buffers
from .piece import Move, Piece, memory_order

__all__ = ["Exchange", "all_to_all"]

Tensors = tuple[torch.Tensor, ...]
# Each tensor's dims, from the longest stride to the shortest; None: as those of what is sent.
Orders = Sequence[list[int] | None]


def all_to_all(
    group: Any,
    rank: int,
    moves: tuple[Move, ...],
    tensors: list[torch.Tensor],
    *,
    tokens: tuple[int | None, ...] = (),
    contiguous: tuple[bool, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Move the sharding of each tensor from one dim to another, all tensors in one exchange.

    Args:
        moves: for each tensor, the placement it has and the placement asked for, on different dims.
        tensors: local parts of one dtype, any strides. The list is emptied: what nobody else holds
            is let go of once it is packed, and before there is memory for what comes in.
        tokens: for each tensor, which of the move's two dims counts tokens; the same on all ranks.
            Where it is None, or nothing is given, the dims stay in their order on the wire.
        contiguous: which results to lay out in the order of their dims; their gradients come back
            as the tensors lie.

    Returns:
        local parts in the new placements, dims in memory in the order that they came in.
    """
    return Exchange(group, rank, moves, tensors, tokens=tokens, contiguous=contiguous).finish()


class Exchange:
    """One exchange on its way: made when it is started, `finish` gives what `all_to_all` does."""

    def __init__(
        self,
        group: Any,
        rank: int,
        moves: tuple[Move, ...],
        tensors: list[torch.Tensor],
        *,
        tokens: tuple[int | None, ...] = (),
        contiguous: tuple[bool, ...] = (),
    ) -> None:
        self.group, self.rank, self.moves = group, rank, moves
        self.contiguous = contiguous or (False,) * len(moves)
        self.tokens = tokens or (None,) * len(moves)
        self.is_complex = tensors[0].is_complex()
        if self.is_complex:
            tensors[:] = [torch.view_as_real(t.resolve_conj()) for t in tensors]
        self.orders: Orders = ()  # of gradients
        self.backward: _Flight | None = None
        self.forward: _Flight | None = None
        self.token: torch.Tensor | None = _Start.apply(self, *tensors)
        tensors.clear()
        assert self.forward is not None
        self.forward.depart()

    def finish(self) -> Tensors:
        """Wait, and put the parts together. Once only."""
        assert self.token is not None, "an exchange is finished once"
        outs = _Finish.apply(self, self.token)
        self.token = None
        return tuple(torch.view_as_complex(out) for out in outs) if self.is_complex else outs


class _Start(torch.autograd.Function):
    """Packs. What it gives is empty: only its place in the graph counts."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        asked = [*zip(tensors, exchange.contiguous, strict=True)]
        orders = [list(range(x.dim())) if laid else None for x, laid in asked]
        exchange.orders = [memory_order(x) if laid else None for x, laid in asked]
        exchange.forward = _packed(exchange, exchange.moves, tensors, orders)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor):
        flight = ctx.exchange.backward
        ctx.exchange.backward = None
        return None, *flight.land()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, token: torch.Tensor) -> Tensors:
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
        exchange.backward = _packed(exchange, back, grads, exchange.orders)
        exchange.backward.depart()
        return None, grads[0].new_empty(0)


class _Flight:
    """What is packed: sent when it departs, received when it lands.

    Args:
        counts: numbers of elements that come in and go out, by rank; None: as many each way, in
            equal parts.
        unpack: makes the results of what came in.
    """

    def __init__(
        self,
        group: Any,
        sent: torch.Tensor,
        counts: tuple[list[int], list[int]] | None,
        unpack: Callable[[torch.Tensor], Tensors],
    ) -> None:
        self.group, self.counts, self.unpack = group, counts, unpack
        self.sent: torch.Tensor | None = sent
        self.received: torch.Tensor | None = None
        self.work: Any = None

    def depart(self) -> None:
        assert self.sent is not None
        size = sum(self.counts[0]) if self.counts else self.sent.numel()
        with making_buffers:
            self.received = self.sent.new_empty(size)
        self.work = dist.all_to_all_single(
            self.received, self.sent, *(self.counts or ()), group=self.group, async_op=True
        )

    def land(self) -> Tensors:
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None  # its memory is there for the result
        assert self.received is not None
        outs = self.unpack(self.received)
        landed(self.received)
        return outs


def _packed(
    exchange: Exchange,
    moves: Sequence[Move],
    tensors: Sequence[torch.Tensor],
    orders: Orders,
) -> _Flight:
    group, rank = exchange.group, exchange.rank
    with making_buffers:
        pieces = [
            Piece(x, move, rank, tokens, order)
            for x, move, tokens, order in zip(tensors, moves, exchange.tokens, orders, strict=True)
        ]
        if all(p.source.even and p.target.even for p in pieces):
            return _packed_even(group, pieces)
        return _packed_uneven(group, rank, pieces)


def _packed_even(group: Any, pieces: Sequence[Piece]) -> _Flight:
    """Equal parts: at most one copy to pack and one to unpack for each tensor."""
    n = len(pieces[0].source.sizes)
    shapes = [p.shape(p.source.sizes[0], p.target.sizes[0]) for p in pieces]
    cuts = [
        p.view.unflatten(p.want_dim, (n, p.target.sizes[0])).movedim(p.want_dim, 0) for p in pieces
    ]
    side_by_side = _side_by_side(pieces, shapes)
    parts_of = side_by_side or _one_after_other(shapes)
    in_place = (side_by_side is not None or len(pieces) == 1) and not any(p.laid for p in pieces)
    if len(cuts) == 1 and cuts[0].is_contiguous():
        sent = cuts[0]
    else:
        sent = cuts[0].new_empty(n * sum(map(math.prod, shapes)))
        for part, cut in zip(parts_of(sent, n), cuts, strict=True):
            part.copy_(cut)
    sent = sent.view(-1)
    del cuts
    for piece in pieces:
        piece.forget()

    def unpack(received: torch.Tensor) -> Tensors:
        parts = parts_of(received, n)
        return tuple(
            piece.cut_from(part)
            if in_place and piece.joins_first and piece.in_wire_order
            else piece.copied_from(part)
            for piece, part in zip(pieces, parts, strict=True)
        )

    return _Flight(group, sent, None, unpack)


Parts = Callable[[torch.Tensor, int], list[torch.Tensor]]


def _one_after_other(shapes: Sequence[Sequence[int]]) -> Parts:
    """What goes to a rank, or comes from one: one tensor's part after another's."""
    counts = [math.prod(shape) for shape in shapes]

    def parts(buffer: torch.Tensor, n: int) -> list[torch.Tensor]:
        cut = buffer.view(n, sum(counts)).split(counts, 1)
        return [part.unflatten(1, shape) for part, shape in zip(cut, shapes, strict=True)]

    return parts


def _side_by_side(pieces: Sequence[Piece], shapes: Sequence[Sequence[int]]) -> Parts | None:
    """The same, each token's of all tensors after another's: what comes in is then the results,
    seen in steps. Shapes alone decide, so ranks agree.
    """
    have, dim = pieces[0].have_dim, pieces[0].want_dim
    others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(pieces) < 2 or len(others) > 1:
        return None
    if not all(p.joins_first and p.target.outer == 1 for p in pieces):
        return None
    if any((p.have_dim, p.want_dim) != (have, dim) for p in pieces):
        return None
    widths = [shape[dim] for shape in shapes]
    shape = [*shapes[0][:dim], sum(widths), *shapes[0][dim + 1 :]]

    def parts(buffer: torch.Tensor, n: int) -> list[torch.Tensor]:
        return [*buffer.view(n, *shape).split(widths, dim + 1)]

    return parts


def _packed_uneven(group: Any, rank: int, pieces: Sequence[Piece]) -> _Flight:
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

    def unpack(received: torch.Tensor) -> Tensors:
        parts: list[list[torch.Tensor]] = [[] for _ in pieces]
        at = 0
        for r in range(n):
            for k, shape in enumerate(frm[r]):
                count = math.prod(shape)
                parts[k].append(received.narrow(0, at, count).view(shape))
                at += count
        return tuple(_assemble(p, parts[k], rank) for k, p in enumerate(pieces))

    return _Flight(group, sent, (in_counts, out_counts), unpack)


def _assemble(piece: Piece, parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
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
    return piece.as_given(out)
