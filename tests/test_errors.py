"""Errors say what, where, have, why, fix, in that order, and can be sent to another process."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("part", ["where", "have", "why", "fix"])
@pytest.mark.parametrize("cls", CLASSES)
def test_no_part_may_be_left_out(cls: type[AutoSPError], part: str) -> None:
    whole: dict[str, Any] = {"where": "where", "have": "have", "why": "why", "fix": "fix"}
    with pytest.raises(TypeError, match=part):
        cls("what.", **{name: text for name, text in whole.items() if name != part})
    for empty in ("", []):
        with pytest.raises(AssertionError, match=r"an error without .*what\."):
            cls("what.", **{**whole, part: empty})


def raised() -> Iterator[tuple[str, ast.Call]]:
    """Every place of the package that makes an error of a user's."""
    names = {cls.__name__ for cls in CLASSES}
    package = Path(autosp.__file__).parent
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names:
                yield f"{file.relative_to(package)}:{node.lineno}", node


def test_every_error_of_the_package_has_all_parts_and_no_empty_one() -> None:
    places = list(raised())
    assert len(places) > 40, "the errors are made elsewhere: look for them there"
    for place, call in places:
        parts = {keyword.arg: keyword.value for keyword in call.keywords}
        assert set(parts) == {"where", "have", "why", "fix"}, place
        for name, value in parts.items():
            empty = isinstance(value, ast.Constant) and not value.value
            assert not empty and ast.unparse(value) != "[]", f"{place}: {name}"


def test_order_of_parts_is_fixed() -> None:
    error = CaptureError("what.", fix="fix", why="why", have="have", where="where")
    assert str(error) == "what.\n  node  where\n  have  have\n  why   why\n  fix   fix"
    error = MeshError("what.", fix="fix", why="why", have="have", where="where")
    assert str(error) == "what.\n  where where\n  have  have\n  why   why\n  fix   fix"


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
