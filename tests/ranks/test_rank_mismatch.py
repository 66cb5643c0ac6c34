"""Ranks of a group that call with different shapes, modes or data are told so; they do not hang."""

from __future__ import annotations

import re
import time

import pytest

from tests import models
from tests.compare import Collectives
from tests.model_t import ModelT
from tests.pool import Rank, run_on_ranks


def differing(rank: Rank, what: str, seen_before: bool) -> tuple[str, str, float]:
    """Rank 1 of each group makes another call; every rank of the group must be told, at once."""
    import autosp_dtensor as autosp

    mesh = rank.mesh(dp=2, sp=2)
    odd = mesh["sp"].get_local_rank() == 1
    model = autosp.parallelize(ModelT(), mesh)
    if seen_before:
        for length in (16, 12):
            model(models.random_ids(2, length), None)
    ids = models.random_ids(2, 12 if odd and what == "length" else 16)
    labels = None
    if what == "rows" and odd:
        ids = models.random_ids(3)
    elif what == "argument" and odd:
        labels = ids
    elif what == "data" and odd:
        ids = models.random_ids(seed=2)
    elif what == "mode" and odd:
        model.eval()
    elif what == "dtype" and odd:
        ids = ids.int()
    start = time.monotonic()
    try:
        model(ids, labels)
    except autosp.AutoSPError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "ran", time.monotonic() - start


@pytest.mark.parametrize("seen_before", [False, True], ids=["first_call", "cached"])
@pytest.mark.parametrize("what", ["length", "rows", "argument", "mode", "dtype"])
def test_ranks_with_different_calls_get_an_error_on_every_rank(
    what: str, seen_before: bool
) -> None:
    for name, text, seconds in run_on_ranks(differing, what, seen_before, timeout=60):
        assert name == "RankMismatchError", text
        assert seconds < 5
        assert "ranks of one sp group were called with different shapes" in text
        assert re.search(r"\n  have  ranks [02]: ", text), text
        assert "autosp.data_shard(mesh)" in text


def test_ranks_with_different_data_get_an_error_at_the_first_call() -> None:
    for name, text, seconds in run_on_ranks(differing, "data", False, timeout=60):
        assert name == "RankMismatchError", text
        assert seconds < 5
        assert text.startswith("ranks of one sp group were called with different data.")


def one_more_call(rank: Rank) -> list[int]:
    """What one cached call compares: 8 bytes, and nothing when switched off."""
    import autosp_dtensor as autosp

    counts = []
    for check in (True, False):
        model = autosp.parallelize(ModelT(), rank.mesh(sp=2), check_ranks=check)
        ids = models.random_ids()
        model(ids)
        with Collectives() as sent:
            model(ids)
        counts.append(sent.total() - sent.exchanges())
    return counts


def test_comparison_of_calls_is_one_message_and_can_be_switched_off() -> None:
    assert run_on_ranks(one_more_call, n=2) == [[1, 0]] * 2
