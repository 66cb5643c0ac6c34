"""One tensor's move in an exchange: how it is cut by destination and joined by source."""

from __future__ import annotations

import math

import torch

from ..placement import Shard

__all__ = ["Move", "Piece", "memory_order"]

Move = tuple[Shard, Shard]


class Piece:
    """Shapes of one tensor's move: how it is cut by destination and joined by source.

    Dims are numbered as they stand on the wire.
    """

    def __init__(
        self, x: torch.Tensor, move: Move, rank: int, tokens: int | None, order: list[int] | None
    ) -> None:
        assert move[0].dim != move[1].dim, "an exchange moves the sharding to another dim"
        self.wire = _wire_order(x.dim(), move, tokens)
        self.source, self.target = (shard.at(self.wire.index(shard.dim)) for shard in move)
        source, target = self.source, self.target
        x = x.permute(self.wire)
        first, second = sorted((source, target), key=lambda s: s.dim)
        shape = list(x.shape)
        lengths = {id(source): source.sizes[rank], id(target): target.block}
        exposed = [
            *shape[: first.dim], first.outer, lengths[id(first)],
            *shape[first.dim + 1 : second.dim], second.outer, lengths[id(second)],
            *shape[second.dim + 1 :],
        ]  # fmt: skip
        self.laid = order is not None  # apart from the others: no memory is shared
        self._order = [self.wire.index(d) for d in order] if order else memory_order(x)
        self.view = x.reshape(exposed)
        self._shape = list(self.view.shape)
        self.have_dim = first.dim + 1 if first is source else second.dim + 2
        self.want_dim = first.dim + 1 if first is target else second.dim + 2
        self.first_dim, self.second_dim = first.dim, second.dim

    def as_given(self, out: torch.Tensor) -> torch.Tensor:
        """The result with its dims in the tensor's own order."""
        return out.permute([self.wire.index(d) for d in range(len(self.wire))])

    @property
    def joins_first(self) -> bool:
        """Whether the parts that come in, one after the other, are the result; the same on all
        ranks.
        """
        return math.prod(self._shape[: self.have_dim]) == 1

    @property
    def in_wire_order(self) -> bool:
        """Whether the result is to lie in memory as it does on the wire."""
        return self._order == list(range(len(self._order)))

    def sizes(self, have: int, want: int) -> list[int]:
        """The result's."""
        exposed = self.shape(have, want)
        first, second = self.first_dim, self.second_dim
        exposed[second + 1 : second + 3] = [exposed[second + 1] * exposed[second + 2]]
        exposed[first : first + 2] = [exposed[first] * exposed[first + 1]]
        return exposed

    def shape(self, have: int, want: int) -> list[int]:
        shape = list(self._shape)
        shape[self.have_dim], shape[self.want_dim] = have, want
        return shape

    def forget(self) -> None:
        """Let go of the values once they are packed."""
        self.view = self.view.new_empty(0)

    def empty(self, buffer: torch.Tensor, have: int, want: int) -> torch.Tensor:
        """Memory for the result, its dims in the same order there as the input's, or as asked for.

        What follows then finds the layout that the model has made: attention's [B, H, S, D] stays a
        view of [B, S, H, D], and is folded to [B, S, H * D] without a copy.
        """
        shape = self.sizes(have, want)
        out = buffer.new_empty([shape[d] for d in self._order])
        return out.permute([self._order.index(d) for d in range(len(shape))])

    def cut_from(self, parts: torch.Tensor) -> torch.Tensor:
        """The result where it came in: parts of all ranks, [n, ...], that join without a copy."""
        sizes = parts.shape[0] * self.source.sizes[0], self.target.sizes[0]
        return self.as_given(parts.movedim(0, self.have_dim).view(self.sizes(*sizes)))

    def copied_from(self, parts: torch.Tensor) -> torch.Tensor:
        """The result of the parts from all ranks, [n, ...]."""
        n = parts.shape[0]
        sizes = n * self.source.sizes[0], self.target.sizes[0]
        out = self.empty(parts, *sizes)
        places = self.exposed(out, *sizes).unflatten(self.have_dim, (n, -1))
        places.movedim(self.have_dim, 0).copy_(parts)
        return self.as_given(out)

    def exposed(self, out: torch.Tensor, have: int, want: int) -> torch.Tensor:
        """The result seen with the dims that pieces have."""
        sizes = self.shape(have, want)
        first, second = self.first_dim, self.second_dim
        out = out.unflatten(second, sizes[second + 1 : second + 3])
        return out.unflatten(first, sizes[first : first + 2])


def _wire_order(dims: int, move: Move, tokens: int | None) -> list[int]:
    """Dims as they stand on the wire: tokens come before the dim that changes places with them."""
    order = list(range(dims))
    first, second = sorted(shard.dim for shard in move)
    if tokens == second:
        order.insert(first, order.pop(second))
    return order


def memory_order(x: torch.Tensor) -> list[int]:
    """Dims from the longest stride to the shortest; those of one element stand where they are."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    long = [d for d in order if x.shape[d] > 1]
    return list(range(x.dim())) if long == sorted(long) else order
