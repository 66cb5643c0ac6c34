"""Memory that is there for an exchange alone: what it packs, and what comes in. Who counts memory
can tell it from values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["are_made", "landed", "making_buffers", "told_of_landings"]


class _Making:
    """Inside, what operations make is memory of an exchange."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


making_buffers = _Making()
_told: list[Callable[[torch.Tensor], None]] = []


def are_made() -> bool:
    """Whether what operations make now is memory of an exchange."""
    return making_buffers.depth > 0


def landed(received: torch.Tensor) -> None:
    """What has come in is put together. Where nothing was copied for it, its memory is a value's
    from now on."""
    for tell in _told:
        tell(received)


@contextlib.contextmanager
def told_of_landings(tell: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, `tell` is called with what has come in, once it is put together."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)
