"""Rules that a test registers are gone after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autosp_dtensor.place.table import USER_RULES

__all__ = ["rules_are_put_back"]


@pytest.fixture(autouse=True)
def rules_are_put_back() -> Iterator[None]:
    before = dict(USER_RULES)
    yield
    USER_RULES.clear()
    USER_RULES.update(before)
