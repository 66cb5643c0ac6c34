"""Where one tensor lives on the sp axis: replicated, sharded, or a sum still owed.

These are DTensor's three placements with one addition. A shard carries the sizes that each rank
holds, so that lengths and heads need not divide, a slice of a sequence stays where it is, and `[B,
S@sp]` flattened to `[B*S@sp]` is described exactly (DTensor calls that one `_StridedShard`, and
only for even sizes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "Cover",
    "Partial",
    "PerRank",
    "Placement",
    "Replicate",
    "Shard",
    "chunk_sizes",
    "even_shard",
]


@dataclass(frozen=True)
class PerRank:
    """An integer that differs by rank; a program holds all of them, so it is equal on all ranks."""

    values: tuple[Any, ...]

    def __repr__(self) -> str:
        return "<" + "|".join(map(str, self.values)) + ">"


@dataclass(frozen=True)
class Replicate:
    """Every rank holds the whole value."""

    def __repr__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a term; the value is the sum over ranks."""

    def __repr__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Shard:
    """Rank r holds an interval of dim `dim`, in rank order.

    The dim is `outer` blocks of `sum(sizes)` elements; rank r holds `sizes[r]` elements of each
    block. `outer` is 1 except for a flattened dim such as `[B*S@sp]`, where each of the B rows is
    cut.
    """

    dim: int
    sizes: tuple[int, ...]
    outer: int = 1

    @property
    def block(self) -> int:
        return sum(self.sizes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each rank's interval starts within a block."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += size
        return tuple(starts)

    @property
    def even(self) -> bool:
        return len(set(self.sizes)) == 1

    def local(self, rank: int) -> int:
        """Length of the dim on one rank."""
        return self.outer * self.sizes[rank]

    def length(self) -> int | PerRank:
        """Length of the dim on every rank: a plain int where all agree."""
        if self.even:
            return self.local(0)
        return PerRank(tuple(self.outer * s for s in self.sizes))

    def at(self, dim: int) -> Shard:
        return replace(self, dim=dim)

    def scaled(self, factor: int) -> Shard:
        return Shard(self.dim, tuple(s * factor for s in self.sizes), self.outer)

    def __repr__(self) -> str:
        sizes = str(self.sizes[0]) if self.even else "|".join(map(str, self.sizes))
        return f"S({self.dim}:{sizes}{'' if self.outer == 1 else f'x{self.outer}'})"


@dataclass(frozen=True)
class Cover(Shard):
    """Rank r holds `sizes[r]` elements from `starts[r]` on; intervals may overlap.

    So key heads are held that serve query heads of several ranks. Its transpose adds what ranks
    hold of the same element. Only operations that ask for it get a value in this placement; no
    result is left in it.
    """

    starts: tuple[int, ...] = ()
    whole: int = 0

    @property
    def block(self) -> int:
        return self.whole

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.starts

    @property
    def even(self) -> bool:
        return False

    def __repr__(self) -> str:
        spans = "|".join(f"{a}:{a + s}" for a, s in zip(self.starts, self.sizes, strict=True))
        return f"C({self.dim}:{spans})"


Placement = Replicate | Shard | Partial


def chunk_sizes(length: int, axis_size: int) -> tuple[int, ...]:
    """Sizes of `torch.chunk` and of DTensor: ceil(length / n) until nothing is left."""
    each = math.ceil(length / axis_size)
    return tuple(max(0, min(each, length - rank * each)) for rank in range(axis_size))


def balanced_sizes(length: int, axis_size: int) -> tuple[int, ...]:
    """Sizes that differ by at most one, larger ones first: 7 heads on 4 ranks are 2, 2, 2, 1."""
    each, more = divmod(length, axis_size)
    return tuple(each + (rank < more) for rank in range(axis_size))


def even_shard(dim: int, length: int, axis_size: int) -> Shard:
    return Shard(dim, balanced_sizes(length, axis_size))
