"""Which dim of a tensor is which of attention's [B, H, S, T], through views of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ...graph import facts, short_name

__all__ = ["Frame", "NotStatic", "Rect", "View", "view_of"]

Span = tuple[int, int]


class NotStatic(Exception):
    """The mask depends on data, or is built by an operation that is not understood."""


class Rect(NamedTuple):
    """Queries top:bottom and keys left:right, of some heads and batch rows (None: of all)."""

    top: int
    bottom: int
    left: int
    right: int
    heads: Span | None = None
    batch: Span | None = None

    @property
    def spans(self) -> tuple[Span | None, Span | None, Span, Span]:
        return self.batch, self.heads, (self.top, self.bottom), (self.left, self.right)


class Frame(NamedTuple):
    """For batch, heads, queries, keys: its dim counted from the last (-1), None if it has none;
    its size there; at which element of that dim the mask begins, and how long the mask is.
    """

    dims: tuple[int | None, ...]
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...]) -> Frame:
        """That of a mask [.., S, T] with at most four dims."""
        sizes = (1,) * (4 - len(shape)) + tuple(shape)
        return Frame((-4, -3, -2, -1), sizes, (0, 0, 0, 0), sizes)

    def holds_plane(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has all queries and all keys, each more than one."""
        for dim, size in zip(self.dims[2:], self.sizes[2:], strict=True):
            if dim is None or -dim > len(shape) or size < 2 or shape[dim] != size:
                return False
        return True

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has its own dims as they are, in their order."""
        plain = Frame.of(shape)
        here = zip(self.dims, plain.dims, self.starts, plain.sizes, self.sizes, strict=True)
        return all(
            size == own == 1 or (dim == at and start == 0 and size == own)
            for dim, at, start, size, own in here
        )

    def cut(self, value: torch.Tensor, rect: Rect) -> torch.Tensor:
        """The part of a tensor that a rectangle reads; dims of size 1 are broadcast."""
        each = zip(self.dims, self.sizes, self.starts, self.lengths, rect.spans, strict=True)
        for dim, size, start, length, span in each:
            if dim is None or -dim > value.dim() or value.shape[dim] != size or size == 1:
                continue
            begin, end = span or (0, length)
            if (start + begin, end - begin) != (0, size):
                value = value.narrow(dim, start + begin, end - begin)
        return value

    def moved(self, view: View) -> Frame:
        """The frame of a view's source.

        Raises:
            NotStatic: the view cuts a dim that is none of the four, or takes one element for all.
        """
        have, want = facts(view.source).meta.shape, view.shape
        dims: list[int | None] = []
        sizes, starts = list(self.sizes), list(self.starts)
        cuts = {d for at, d in enumerate(view.origin) if d is not None and 1 != have[d] > want[at]}
        for which, dim in enumerate(self.dims):
            at = None if dim is None or -dim > len(want) else view.origin[dim]
            dims.append(None if at is None else at - len(have))
            if at is not None and have[at] != 1:
                assert dim is not None
                if want[dim] == 1 != self.lengths[which]:
                    raise NotStatic("one element for all")
                sizes[which] = have[at]
                starts[which] += view.offsets.get(at, 0)
                cuts.discard(at)
        if cuts:
            raise NotStatic("a part of a dim")
        return Frame(tuple(dims), tuple(sizes), tuple(starts), self.lengths)

    def shifted_left(self, count: int) -> Frame:
        """That of an index whose lookups append `count` dims; heads may be among those."""
        dims = tuple(None if d is None or d + count >= 0 else d + count for d in self.dims)
        return Frame(dims, self.sizes, self.starts, self.lengths)


class View(NamedTuple):
    """What a view is of its source: the source dim of each dim (None: a new one of size 1)."""

    source: Node
    shape: tuple[int, ...]
    origin: list[int | None]
    picked: dict[int, int]
    offsets: dict[int, int]

    def apply(self, part: torch.Tensor) -> torch.Tensor:
        """The view of a part of its source. Dims that the part broadcasts stay so."""
        for dim, index in sorted(self.picked.items(), reverse=True):
            part = part.select(dim, index if part.shape[dim] > 1 else 0)
        kept = [d for d in range(part.dim() + len(self.picked)) if d not in self.picked]
        order = [kept.index(d) for d in self.origin if d is not None]
        for dim in sorted(set(range(part.dim())) - set(order), reverse=True):  # squeezed away
            part = part.squeeze(dim)
            order = [d - (d > dim) for d in order]
        part = part.permute(order)
        for at, dim in enumerate(self.origin):
            if dim is None:
                part = part.unsqueeze(at)
        return part


def view_of(node: Node) -> View | None:
    """What a node is as a view that reorders, adds or drops dims; None where it is no view.

    Raises:
        NotStatic: a view that merges or splits dims, or steps through one; one result of several.
    """
    if not node.args or not isinstance(node.args[0], Node):
        return None
    source, name = node.args[0], short_name(node.target)
    have, want = facts(source).meta.shape, facts(node).meta.shape
    if name == "view" and facts(source).meta.dtype != facts(node).meta.dtype:
        raise NotStatic("a view of the bytes")
    origin: list[int | None]
    match name:
        case "expand" | "expand_as" | "broadcast_to":
            extra = len(want) - len(have)
            origin = [None if d < extra else d - extra for d in range(len(want))]
        case "permute" | "transpose" | "swapaxes" | "swapdims" | "mT" | "movedim" | "T" | "t":
            origin = [*_order(node, name, len(have))]
        case "unsqueeze" | "squeeze" | "view" | "reshape":
            if name == "unsqueeze":
                at = _int(_argument(node, 1, "dim")) % len(want)
                origin = [*range(at), None, *range(at, len(have))]
            else:
                origin = _ones_aside(have, want)
        case "getitem":
            if not facts(source).single:  # a number of a result (meshgrid, chunk), no index
                raise NotStatic(f"one of several results of {source.name}")
            return _indexed(node, source, have)
        case _:
            return None
    return View(source, want, origin, {}, {})


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise NotStatic(f"a dim that is {value!r}")
    return value


def _order(node: Node, name: str, rank: int) -> list[int]:
    order = list(range(rank))
    if name == "permute":
        given = node.args[1:] if len(node.args) > 2 else (_argument(node, 1, "dims"),)
        dims: Any = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        return [_int(d) % rank for d in dims]
    if name == "movedim":
        a, b = _int(_argument(node, 1, "source")), _int(_argument(node, 2, "destination"))
        order.insert(b % rank, order.pop(a % rank))
        return order
    a, b = -2, -1
    if name not in ("mT", "T", "t"):
        names = ("dim0", "dim1") if name in ("transpose", "swapdims") else ("axis0", "axis1")
        a, b = (_int(_argument(node, at, each)) for at, each in enumerate(names, 1))
    if name == "T" and rank != 2:
        raise NotStatic(node.name)
    order[a], order[b] = order[b], order[a]
    return order


def _ones_aside(have: tuple[int, ...], want: tuple[int, ...]) -> list[int | None]:
    """Source dims of a reshape that only adds or drops dims of size 1."""
    kept = [d for d, size in enumerate(have) if size != 1]
    if [have[d] for d in kept] != [size for size in want if size != 1]:
        raise NotStatic("a reshape that merges or splits dims")
    rest = iter(kept)
    return [None if size == 1 else next(rest) for size in want]


def _indexed(node: Node, source: Node, have: tuple[int, ...]) -> View | None:
    index = node.args[1]
    parts: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(p, (Node, list, torch.Tensor)) for p in parts):
        return None  # lookups
    taken = sum(p is not None and p is not Ellipsis and not isinstance(p, bool) for p in parts)
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    origin: list[int | None] = []
    picked: dict[int, int] = {}
    offsets: dict[int, int] = {}
    dim = 0
    for part in parts:
        if part is None:
            origin.append(None)
        elif part is Ellipsis:
            width = len(have) - taken
            origin.extend(range(dim, dim + width))
            dim += width
        elif isinstance(part, slice):
            start, _, step = part.indices(have[dim])
            if step != 1:
                raise NotStatic(node.name)
            offsets[dim] = start
            origin.append(dim)
            dim += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            picked[dim] = part % have[dim]
            dim += 1
        else:
            raise NotStatic(node.name)
    return View(source, facts(node).meta.shape, origin, picked, offsets)
