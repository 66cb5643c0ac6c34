"""Kept results are measured anew when what they depend on has changed."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("row", "changed", "fresh"),
    [
        ("FSDP2", "plan", False),  # counts its bytes
        ("FSDP2", "autosp", True),  # runs nothing else of the package
        ("FSDP2", "torch", False),
        ('autosp + SAC ("auto")', "autosp", False),
        ('autosp + SAC ("auto")', "transformers", False),
    ],
)
def test_results_are_kept_until_what_they_depend_on_changes(
    row: str, changed: str, fresh: bool
) -> None:
    pytest.importorskip("transformers")
    import max_length

    now = max_length.versions()
    known: dict[str, Any] = {"versions": dict(now)}
    assert max_length.is_fresh(known, max_length.ROWS[row], now)
    assert max_length.is_fresh(known, max_length.ROWS[row], {**now, changed: "new"}) == fresh
    del known["versions"][changed]  # measured before this was noted
    assert max_length.is_fresh(known, max_length.ROWS[row], now) == fresh
    assert not max_length.is_fresh(None, max_length.ROWS[row], now)
