"""Which rank holds what: the arithmetic of shards."""

from __future__ import annotations

import pytest
import torch

from autosp_dtensor.placement import (
    Cover,
    Partial,
    PerRank,
    Replicate,
    Shard,
    balanced_sizes,
    chunk_sizes,
    even_shard,
)


@pytest.mark.parametrize("n", range(1, 9))
def test_chunks_are_those_of_torch(n: int) -> None:
    for length in range(40):
        there = [len(part) for part in torch.arange(length).chunk(n)] if length else [0]
        assert list(chunk_sizes(length, n)) == there + [0] * (n - len(there))


@pytest.mark.parametrize("n", range(1, 9))
def test_balanced_sizes_differ_by_one_at_most_and_are_never_empty_where_they_need_not(
    n: int,
) -> None:
    for length in range(40):
        sizes = balanced_sizes(length, n)
        assert len(sizes) == n and sum(sizes) == length
        assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)
        assert length < n or min(sizes) > 0


def test_offsets_and_lengths() -> None:
    shard = Shard(1, (3, 0, 4), 2)
    assert (shard.block, shard.offsets, shard.even) == (7, (0, 3, 3), False)
    assert [shard.local(rank) for rank in range(3)] == [6, 0, 8]
    assert shard.length() == PerRank((6, 0, 8))
    assert Shard(0, (3, 3)).length() == 3 and Shard(0, (3, 3), 2).length() == 6
    assert shard.at(0) == Shard(0, (3, 0, 4), 2)
    assert shard.scaled(2) == Shard(1, (6, 0, 8), 2)
    assert even_shard(2, 7, 3) == Shard(2, (3, 2, 2))


def test_intervals_may_overlap_in_a_cover() -> None:
    cover = Cover(1, (1, 2), starts=(0, 0), whole=2)
    assert (cover.block, cover.offsets, cover.even) == (2, (0, 0), False)
    assert cover != Shard(1, (1, 2))


def test_placements_are_printed_so() -> None:
    assert [repr(p) for p in (Replicate(), Partial(), Shard(1, (4, 4)), Shard(0, (3, 1), 2))] == [
        "R", "P", "S(1:4)", "S(0:3|1x2)",
    ]  # fmt: skip
    assert repr(PerRank((1, 2))) == "<1|2>"
    assert repr(Cover(1, (1, 1), starts=(0, 0), whole=1)) == "C(1:0:1|0:1)"


def test_placements_are_keys() -> None:
    assert len({Replicate(), Replicate(), Partial(), Shard(0, (1,)), Shard(0, (1,), 2)}) == 4
