"""Errors say what, where, have, why, fix, in that order, and can be sent to another process."""

from __future__ import annotations

import pickle

import pytest

import autosp_dtensor as autosp
from autosp_dtensor.errors import (
    AutoSPError,
    CaptureError,
    MeshError,
    PlacementError,
    RankMismatchError,
    UsageError,
)

CLASSES = [AutoSPError, CaptureError, MeshError, PlacementError, RankMismatchError, UsageError]


def test_error_is_laid_out_so() -> None:
    error = PlacementError(
        "torch.histc has no rule.",
        where="layers.3 (my_model.py:88)",
        have=["arg 0 f32[2, 16@sp]", "arg 1 f32[4]"],
        why="a histogram reads every token",
        fix="register one",
    )
    assert str(error) == (
        "torch.histc has no rule.\n"
        "  node  layers.3 (my_model.py:88)\n"
        "  have  arg 0 f32[2, 16@sp]\n"
        "        arg 1 f32[4]\n"
        "  why   a histogram reads every token\n"
        "  fix   register one"
    )


def test_parts_that_are_not_given_leave_no_line() -> None:
    assert str(MeshError("no mesh.")) == "no mesh."
    assert str(MeshError("no mesh.", have=[], where="", fix="make one")) == (
        "no mesh.\n  fix   make one"
    )


def test_order_of_parts_is_fixed() -> None:
    error = CaptureError("what.", fix="fix", why="why", have="have", where="where")
    assert str(error) == "what.\n  node  where\n  have  have\n  why   why\n  fix   fix"


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_the_same_after_pickling(cls: type[AutoSPError]) -> None:
    error = cls("what.", where="where", have=["one", "two"], why="why", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == str(error)
    assert (again.what, again.where, again.have, again.why, again.fix) == (
        "what.", "where", ["one", "two"], "why", "fix",
    )  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES)
def test_one_except_catches_all(cls: type[AutoSPError]) -> None:
    assert issubclass(cls, autosp.AutoSPError)


def test_wrong_use_is_a_value_error() -> None:
    assert issubclass(UsageError, ValueError)


def test_classes_that_a_user_may_catch_are_public() -> None:
    for cls in CLASSES:
        if cls is not UsageError:  # a ValueError, and nothing to handle
            assert getattr(autosp, cls.__name__) is cls
