"""What strategies know of one attention call, whichever function it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..rule import Factors

__all__ = ["HEADS", "KEY_HEADS", "Form"]

HEADS = "h"
KEY_HEADS = "g"


@dataclass(frozen=True)
class Form:
    """Which dims of a call's tensors are what.

    factors: names of dims; HEADS are the heads of queries (and of what differs by head), KEY_HEADS
        those of keys and values where several query heads share one. Local on heads, and on what
        else attention is local on.
    group: query heads of one key head.
    empty: the call's result where a rank has nothing to do: f(*args, **kwargs), zeros.
    own: whether the call takes `own`, the query heads that a rank has of all.
    """

    factors: Factors
    group: int = 1
    empty: Callable[..., Any] | None = None
    own: bool = False

    def dim_of(self, tensor: int, name: str) -> int | None:
        names = self.factors.ins[tensor]
        return names.index(name) if name in names else None

    @property
    def key_tensors(self) -> tuple[int, ...]:
        """The tensors that hold key heads."""
        found = range(len(self.factors.ins))
        return tuple(i for i in found if self.dim_of(i, KEY_HEADS) is not None)

    @property
    def read_again(self) -> tuple[int, ...]:
        """The tensors that every query reads: keys and values."""
        ins = enumerate(self.factors.ins)
        return tuple(i for i, names in ins if "t" in names and "m" not in names)
