"""Masks that flash-attn's kernel runs, on ranks; and ranks that do not agree on having it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.place.attention_table import HEADS
from tests.pool import Rank, run_on_ranks
from tests.ranks.test_kernels import a_cell
from tests.ranks.training import batches_of_t, split
from tests.reference_attention import install_flash_attn


@contextmanager
def flash_attn_here() -> Iterator[list[object]]:
    """Gives the calls made; ranks live on after a test."""
    from autosp_dtensor.place.masks import attend, varlen

    made: list[object] = []
    install_flash_attn()
    takes, run = varlen.TAKES, attend.attend_runs
    attend.attend_runs = lambda *a: (made.append(a), run(*a))[1]
    varlen.TAKES = {"cpu": (torch.float32, torch.float64)}
    try:
        yield made
    finally:
        varlen.TAKES, attend.attend_runs = takes, run


def by_flash_attn(rank: Rank, form: str, mask: str, heads: str) -> bool:
    with flash_attn_here() as made:
        a_cell(rank, form, mask, heads)
    return bool(made)


@pytest.mark.parametrize("form", ["sdpa", "matmul", "flex"])
def test_cells_of_the_table_by_flash_attn(form: str) -> None:
    for mask, heads in (("documents", "7/7 on 4"), ("window", "4/4 on 2"), ("chunked", "7/7 on 4")):
        assert all(run_on_ranks(by_flash_attn, form, mask, heads, n=HEADS[heads][2])), mask


def on_one_rank(rank: Rank) -> str:
    from autosp_dtensor.errors import RankMismatchError
    from tests.model_t import ModelT, TConfig

    model = split(ModelT(TConfig(window=4)), rank.mesh(sp=2))
    batch = batches_of_t(1)[0]
    try:
        if rank.rank == 0:
            with flash_attn_here():
                model(**batch)
        else:
            model(**batch)
    except RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_all_have_it_are_told() -> None:
    for text in run_on_ranks(on_one_rank, n=2):
        assert "traced different programs" in text and "environment" in text
