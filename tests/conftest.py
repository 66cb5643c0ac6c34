"""Ranks are shared by the whole session; see pool.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()
