"""The pool itself: results, failures and hangs come back as they are, and the next test gets good
ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import Rank, RanksFailedError, run_on_ranks


def sum_of_ranks(rank: Rank, start: int) -> int:
    total = torch.tensor([start + rank.rank])
    dist.all_reduce(total)
    return int(total)


def coordinates(rank: Rank) -> tuple[int, int, int]:
    mesh = rank.mesh(dp=2, sp=2)
    assert rank.mesh(dp=2, sp=2) is mesh
    return rank.rank, mesh["dp"].get_local_rank(), mesh["sp"].get_local_rank()


def rank_one_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("only here")


def rank_two_never_joins(rank: Rank) -> None:
    if rank.rank == 2:
        time.sleep(3600)
    dist.barrier()


def test_all_ranks_share_one_world_and_results_come_in_rank_order() -> None:
    assert run_on_ranks(sum_of_ranks, 10) == [46] * 4
    assert run_on_ranks(coordinates) == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


def test_pools_of_two_sizes_live_side_by_side() -> None:
    assert run_on_ranks(sum_of_ranks, 0, n=2) == [1, 1]
    assert run_on_ranks(sum_of_ranks, 0, n=4) == [6] * 4


def test_failure_on_one_rank_names_the_rank_and_the_next_call_works() -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)--- rank 1 of 4 ---.*ValueError: only here"):
        run_on_ranks(rank_one_raises)
    assert run_on_ranks(sum_of_ranks, 0) == [6] * 4


def test_hang_ends_at_the_timeout_with_the_stack_of_every_rank() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_on_ranks(rank_two_never_joins, timeout=3)
    text = str(failure.value)
    assert "--- rank 2 of 4 ---\ndid not come back (waited for 3 s)" in text
    assert "in rank_two_never_joins" in text
    assert "in barrier" in text
    assert run_on_ranks(sum_of_ranks, 0) == [6] * 4
