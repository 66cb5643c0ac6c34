"""Masks that variable-length kernels run, on ranks; and ranks that do not have the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests import models
from tests.compare import assert_same_as_one_device
from tests.model_t import ModelT, TConfig
from tests.place.attention_table import HEADS
from tests.pool import Rank, run_on_ranks
from tests.ranks.test_kernels import a_cell
from tests.ranks.training import batches_of_t, split
from tests.reference_attention import install_flash_attn, references_here


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


@contextmanager
def torch_varlen_here() -> Iterator[None]:
    """As on a GPU where flash-attn cannot be imported."""
    from autosp_dtensor.place.masks import varlen

    with flash_attn_here(), references_here():
        found = varlen._flash_attn
        varlen._flash_attn = lambda: None
        try:
            yield
        finally:
            varlen._flash_attn = found


def by_torch(rank: Rank, n: int) -> list[str]:
    """Model T with windows against one device; the kernels that its program names."""
    from autosp_dtensor import explain

    build, batch, mesh = (
        partial(models.build_t, TConfig(window=4)),
        batches_of_t(1)[0],
        rank.mesh(sp=n),
    )
    with torch_varlen_here():
        assert_same_as_one_device(rank, build, batch, mesh)
        model = split(build(), mesh)
        model(**batch)
        return [line for line in explain(model).splitlines() if "proved" in line]


@pytest.mark.parametrize("n", [2, 4])
def test_windows_by_torchs_varlen_attn(n: int) -> None:
    for lines in run_on_ranks(by_torch, n, n=n):
        assert lines and all("torch's varlen_attn: 1 run of keys" in line for line in lines)


def on_one_rank(rank: Rank, other: str) -> str:
    from autosp_dtensor.errors import RankMismatchError

    model = split(ModelT(TConfig(window=4)), rank.mesh(sp=2))
    batch = batches_of_t(1)[0]
    try:
        if rank.rank == 0:
            with flash_attn_here():
                model(**batch)
        elif other == "torch":
            with torch_varlen_here():
                model(**batch)
        else:
            model(**batch)
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", ["torch", "tiles"])
def test_ranks_that_do_not_all_have_it_are_told(other: str) -> None:
    for text in run_on_ranks(on_one_rank, other, n=2):
        assert "traced different programs" in text and "environment" in text
