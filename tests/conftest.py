"""Ranks are shared by the whole session; see pool.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_leaves_is_not_looked_through() -> Iterator[None]:
    """Traces look through all objects for tensors that forward kept; thousands of tests leave
    some (programs, compiled functions), and the last ones would take ten times as long."""
    yield
    gc.collect()
    gc.freeze()
