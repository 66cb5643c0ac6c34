"""What concerns the whole session: its ranks (see pool.py), the order of tests, garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    close_pools()


@pytest.hookimpl(trylast=True)  # the markers are there by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers end together, as the last tests are short ones. Tests on ranks stay side by side: a
    worker that is given none starts no ranks."""
    items.sort(key=lambda item: ("slow" not in item.keywords, "ranks" not in item.keywords))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a collection need not go through them each time."""
    gc.collect()
    gc.freeze()
