"""What a way of splitting attention has to offer; a strategy is one file beside this one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...placement import Shard
from ..rule import Local, Op, Option
from .form import Form

__all__ = ["AttentionOption", "Strategy"]


class Strategy:
    """Says how tensors have to lie for an attention call, and what each rank then runs."""

    def from_input(self, op: Op, form: Form, i: int, shard: Shard) -> AttentionOption | None:
        """The option in which input i is placed so; None if this strategy has none."""
        return None

    def fresh(self, op: Op, form: Form) -> Iterable[AttentionOption]:
        """Options for inputs that lie in some other way, the preferred ones first."""
        return ()

    def localize(self, op: Op, form: Form, option: AttentionOption) -> Local:
        """The call that a rank makes, on the tensors that the option asks for."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionOption(Option):
    """An option and the strategy that runs it."""

    strategy: Strategy
