"""Ranks of a group that call with different shapes, modes or data are told so; they do not hang."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import Tensor

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
        assert re.search(r"\n  where ModelT \(test_rank_mismatch\.py:\d+\)\n", text), text
        assert re.search(r"\n  have  ranks [02]: ", text), text
        if what == "mode":  # the rows are the same: nothing is said of data
            assert text.startswith("ranks of one sp group were called with models in different ")
            assert "train() or eval()" in text and "data" not in text
        else:
            assert text.startswith("ranks of one sp group were called with different shapes")
            assert "autosp.data_shard(mesh)" in text


def test_ranks_with_different_data_get_an_error_at_the_first_call() -> None:
    for name, text, seconds in run_on_ranks(differing, "data", False, timeout=60):
        assert name == "RankMismatchError", text
        assert seconds < 5
        assert text.startswith("ranks of one sp group were called with different data.")
        assert re.search(r"ranks [02]: i64\[2, 16\].*; differs: argument 0\n", text), text


class Odd(ModelT):
    """Differs on rank 1 in a way that the call does not show."""

    def __init__(self, what: str, odd: bool) -> None:
        super().__init__()
        self.what, self.is_odd = what, odd
        self.kept = [torch.full((1,), 2.0 if odd else 1.0, dtype=torch.float64)]  # no state
        if what == "parameter" and odd:
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-9

    def hidden(self, x: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        h = super().hidden(x, position_ids, mask)
        if self.what == "program" and self.is_odd:
            h = h.tanh()
        elif self.what == "value" and self.is_odd:
            h = h * h.sum().item()
        elif self.what == "own error" and self.is_odd:
            raise KeyError("no such file on this rank")
        elif self.what == "outside":
            h = h * self.kept[0]
        return h


def unlike(rank: Rank, what: str, check: bool = True) -> tuple[str, str]:
    import autosp_dtensor as autosp

    model = autosp.parallelize(Odd(what, rank.rank == 1), rank.mesh(sp=2), check_ranks=check)
    try:
        model(models.random_ids())
    except Exception as error:
        return type(error).__name__, re.sub(r"\.py:\d+", ".py:LINE", str(error))
    return "", "ran"


def test_ranks_with_different_parameters_are_told_which() -> None:
    for name, text in run_on_ranks(unlike, "parameter", n=2, timeout=60):
        assert name == "RankMismatchError"
        assert text == (
            "ranks of one sp group hold different parameters or buffers.\n"
            "  where Odd (test_rank_mismatch.py:LINE)\n"
            "  have  head.weight\n"
            "  why   each computes a part of the sequence with its own copy\n"
            "  fix   seed all ranks alike before the model is built, or load the same weights; "
            "after to_empty() fill buffers as well, also those that are in no state_dict"
        )


def test_ranks_with_different_tensors_from_outside_are_told_so() -> None:
    for name, text in run_on_ranks(unlike, "outside", n=2, timeout=60):
        assert name == "RankMismatchError"
        assert text.startswith(
            "ranks of one sp group use different tensors from outside of the model.\n"
            "  where Odd (test_rank_mismatch.py:LINE)\n"
            "  have  ranks 0: f64[1]\n"
            "        ranks 1: f64[1]\n"
        )
        assert "data_shard" not in text


def test_ranks_that_traced_different_programs_are_told_to_look_at_their_python() -> None:
    for name, text in run_on_ranks(unlike, "program", n=2, timeout=60):
        assert name == "RankMismatchError"
        assert text.startswith("ranks of one sp group traced different programs.\n")
        assert "the environment" in text and "data_shard" not in text


@pytest.mark.parametrize(
    ("what", "own"),
    [("value", "CaptureError: Python reads the value of a tensor: item()."),
     ("own error", "KeyError: 'no such file on this rank'")],
)  # fmt: skip
def test_one_rank_that_fails_while_tracing_tells_the_others(what: str, own: str) -> None:
    (fine, told), (failed, error) = run_on_ranks(unlike, what, n=2, timeout=60)
    assert (failed, error.split("\n")[0]) == tuple(own.split(": ", 1))
    assert fine == "RankMismatchError"
    assert told.startswith(
        "tracing failed on other ranks of the sp group, not on this one.\n"
        "  where Odd (test_rank_mismatch.py:LINE)\n"
        f"  have  rank 1: {own}"
    )


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
