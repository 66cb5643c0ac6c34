"""`reshape_shard` against the truth: elements marked by owner, looked at in the other shape."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from autosp_dtensor.place.rules.views import reshape_shard
from autosp_dtensor.placement import Shard
from tests.pieces import cut, positions

RANKS = (1, 2, 3, 4)


def factorizations(count: int, most: int) -> list[tuple[int, ...]]:
    """All shapes of up to `most` dims with `count` elements, sizes of one included."""
    if most == 0:
        return [()] if count == 1 else []
    found = [()] if count == 1 else []
    for first in range(1, count + 1):
        if count % first == 0:
            found += [(first, *rest) for rest in factorizations(count // first, most - 1)]
    return found


def ways(length: int, n: int) -> list[tuple[tuple[int, ...], int]]:
    """Every (sizes, outer) of a short dim; of a longer one those with few distinct sizes."""
    found = []
    for outer in range(1, length + 1):
        if length % outer:
            continue
        block = length // outer
        for sizes in itertools.product(range(block + 1), repeat=n):
            if sum(sizes) == block and (block <= 6 or len(set(sizes)) < 3):
                found.append((sizes, outer))
    return found


def owners(shape: tuple[int, ...], shard: Shard, n: int) -> Tensor:
    """Which rank holds each element."""
    marks = torch.full(shape, -1)
    for rank in range(n):
        marks.index_fill_(shard.dim, positions(shard, rank), rank)
    return marks


def truth(marks: Tensor, n: int) -> set[Shard]:
    """All shardings of one dim that give exactly these owners."""
    found = set()
    for dim, length in enumerate(marks.shape):
        lines = marks.movedim(dim, 0).reshape(length, -1)
        if not bool((lines == lines[:, :1]).all()):
            continue
        line = lines[:, 0].tolist()
        for outer in range(1, length + 1):
            if length % outer:
                continue
            block = length // outer
            first = line[:block]
            if line != first * outer or first != sorted(first):
                continue
            found.add(Shard(dim, tuple(first.count(rank) for rank in range(n)), outer))
    return found


_PAIRS = [
    (source, target)
    for count, most in ((1, 2), (2, 3), (4, 3), (6, 3), (8, 3), (12, 3))
    for source in factorizations(count, most)
    for target in factorizations(count, most)
    if len(source) + len(target) <= (5 if count < 12 else 4) and source
]


@pytest.mark.parametrize("n", RANKS)
def test_reshape_keeps_a_shard_exactly_where_each_part_is_an_interval_of_one_dim(n: int) -> None:
    """Found wherever there is one, never claimed where there is none. Where one rank holds all, it
    need not be found."""
    checked = 0
    for source, target in _PAIRS:
        for dim, length in enumerate(source):
            for sizes, outer in ways(length, n)[:14]:
                shard = Shard(dim, sizes, outer)
                marks = owners(source, shard, n).reshape(target)
                placed = reshape_shard(source, target, shard)
                legal = truth(marks, n)
                if placed is None:
                    alone = len(marks.unique()) == 1
                    assert alone or not legal, f"{source} {shard} -> {target}: {legal}"
                else:
                    assert placed in legal, f"{source} {shard} -> {target}: {placed} not {legal}"
                checked += 1
    assert checked > 1000


@pytest.mark.parametrize("n", RANKS)
def test_local_part_reshaped_is_the_part_of_the_reshaped_whole(n: int) -> None:
    for source, target in _PAIRS[::5]:
        whole = torch.arange(math.prod(source)).reshape(source)
        for dim, length in enumerate(source):
            for sizes, outer in ways(length, n)[:12]:
                shard = Shard(dim, sizes, outer)
                placed = reshape_shard(source, target, shard)
                if placed is None:
                    continue
                want = cut(whole.reshape(target), placed, n)
                for part, each in zip(cut(whole, shard, n), want, strict=True):
                    assert torch.equal(part.reshape(each.shape), each)


@pytest.mark.parametrize(
    ("source", "shard", "target", "placed"),
    [
        ((2, 8, 6), Shard(1, (4, 4)), (16, 6), Shard(0, (4, 4), 2)),
        ((16, 6), Shard(0, (4, 4), 2), (2, 8, 6), Shard(1, (4, 4))),
        ((2, 8, 6), Shard(1, (3, 1, 4)), (16, 6), Shard(0, (3, 1, 4), 2)),
        ((2, 8, 6), Shard(1, (3, 1, 4)), (2, 48), Shard(1, (18, 6, 24))),
        ((2, 8, 4, 3), Shard(2, (2, 2)), (2, 8, 12), Shard(2, (6, 6))),
        ((2, 8, 12), Shard(2, (6, 6)), (2, 8, 4, 3), Shard(2, (2, 2))),
        ((2, 8, 12), Shard(2, (5, 7)), (2, 8, 4, 3), None),
        ((2, 8), Shard(1, (4, 4)), (4, 4), Shard(0, (1, 1), 2)),
        ((1, 8, 6), Shard(1, (4, 4)), (8, 6), Shard(0, (4, 4))),
        ((8, 6), Shard(0, (4, 4)), (1, 8, 1, 6), Shard(1, (4, 4))),
    ],
)
def test_known_reshapes(
    source: tuple[int, ...], shard: Shard, target: tuple[int, ...], placed: Shard | None
) -> None:
    assert reshape_shard(source, target, shard) == placed


def test_same_shape_keeps_the_same_placement() -> None:
    for sizes in ((4, 4), (8, 0), (0, 8), (3, 5)):
        for dim, shape in ((0, (8, 6)), (1, (4, 8, 6)), (2, (4, 6, 8))):
            assert reshape_shard(shape, shape, Shard(dim, sizes)) == Shard(dim, sizes)
