"""Which heads of an attention go into one call of its kernel.

A kernel's backward allocates workspace for the heads of the call: as much as several hidden states
where a rank has them all. Heads know nothing of each other, so they can go through it in groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..capture.flash import ENTRIES, FlashCall
from ..capture.targets import Opaque
from ..cost import workspace
from ..graph import short_name
from ..placement import balanced_sizes

__all__ = [
    "MOST_WORKSPACE",
    "Group",
    "Heads",
    "call_of",
    "groups_of",
    "heads_of",
    "kernel_of",
    "named",
]

# Of one call, from which on fewer heads at a time gain something. A call that has this much fills a
# device by itself.
MOST_WORKSPACE = 256 << 20

_TORCH = FlashCall(
    {"query": "b h m d", "key": "b g t d", "value": "b g t e", "attn_mask": "b h m t"}, "b h m e"
)


def kernel_of(target: Callable[..., Any]) -> FlashCall | None:
    """The names and dims of an attention's tensors; None for what is no kernel of heads."""
    if isinstance(target, Opaque):
        return ENTRIES.get(target.form)
    return _TORCH if short_name(target) == "scaled_dot_product_attention" else None


def call_of(target: Callable[..., Any]) -> FlashCall | None:
    """The same, if it gives one tensor: what can be called for some heads at a time."""
    return None if isinstance(target, Opaque) and not target.single else kernel_of(target)


def named(call: FlashCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """A call's arguments by name; None where one that is no tensor has none."""
    if len(args) > len(call.dims):
        return None
    return dict(zip(call.dims, args, strict=False)) | dict(kwargs)


@dataclass(frozen=True)
class Heads:
    """The sizes of one call: heads of queries, of keys, and what each takes.

    tokens, keys: of all batch rows. width: of a query's head. wide: of a value's.
    """

    heads: int
    key_heads: int
    tokens: int
    keys: int
    width: int
    wide: int

    @property
    def each(self) -> int:
        """Query heads of one key head."""
        return self.heads // self.key_heads

    def of(self, group: Group) -> Heads:
        """The sizes of a group's call."""
        return replace(self, heads=group.queries[1], key_heads=group.keys[1])

    def workspace(self, itemsize: int) -> int:
        """Bytes that the kernel's backward allocates beside the gradients."""
        sizes = self.heads, self.key_heads, self.tokens, self.keys, self.width, self.wide
        return workspace(*sizes, itemsize)


def heads_of(
    call: FlashCall, shapes: Mapping[str, Sequence[int]], *, own_keys: bool = False
) -> Heads | None:
    """The sizes, from those of the tensors by name; None where heads cannot be told apart.

    own_keys: whether each query head will be given a key head of its own.
    """
    found: dict[str, set[int]] = {}
    for name, text in call.dims.items():
        letters, shape = text.split(), shapes.get(name, ())
        for letter, size in zip(reversed(letters), reversed(shape), strict=False):
            found.setdefault(letter, set()).add(size)
    first = next(iter(call.dims))
    if len(shapes.get(first, ())) != len(call.dims[first].split()):
        return None
    heads = found["h"] - {1} or {1}  # 1: for all heads
    key_heads = heads if own_keys else found.get("g", heads)
    if len(heads) > 1 or len(key_heads) > 1:
        return None
    sizes = {letter: max(each) for letter, each in found.items()}
    (count,), (key_count,) = heads, key_heads
    if not count or not key_count or count % key_count:
        return None
    rows, width = sizes.get("b", 1) if "b" in call.out else 1, sizes.get("d", 1)
    keys = sizes.get("t", sizes["m"])
    return Heads(count, key_count, rows * sizes["m"], rows * keys, width, sizes.get("e", width))


@dataclass(frozen=True)
class Group:
    """What one call takes: (first, count) of the query heads, and of the key heads."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def groups_of(sizes: Heads, itemsize: int, most: int | None) -> list[Group]:
    """As few calls as have a workspace below `most` each, at most one for each query head.

    most: bytes; None: a call for each query head.
    """
    for count in range(1 if most is not None else sizes.heads, sizes.heads):
        groups = _cut(sizes, count)
        if max(sizes.of(group).workspace(itemsize) for group in groups) < (most or 0):
            return groups
    return _cut(sizes, sizes.heads)


def _cut(sizes: Heads, count: int) -> list[Group]:
    """Whole key heads with all that read them, or one with some of those: what a kernel takes."""
    each = sizes.each
    if count <= sizes.key_heads:
        ranges = _ranges(0, balanced_sizes(sizes.key_heads, count))
        return [Group((first * each, n * each), (first, n)) for first, n in ranges]
    parts = balanced_sizes(each, min(each, math.ceil(count / sizes.key_heads)))
    return [
        Group(queries, (key, 1))
        for key in range(sizes.key_heads)
        for queries in _ranges(key * each, parts)
    ]


def _ranges(start: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    found = []
    for count in counts:
        found.append((start, count))
        start += count
    return found
