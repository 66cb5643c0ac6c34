"""Hooks see values in whatever placement they have, as DTensors; nothing is moved for them."""

from __future__ import annotations

from collections.abc import Sequence

from ...placement import Partial, Placement, Replicate, Shard
from ..rule import Op, Option, Rule

__all__ = ["TapRule"]


class TapRule(Rule):
    """Takes each tensor as it is and gives it back so."""

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        if i >= len(op.outs):
            return None
        ins: list[Placement] = [Replicate()] * len(op.ins)
        outs: list[Placement] = [Replicate()] * len(op.outs)
        ins[i] = outs[i] = shard
        return Option(tuple(ins), tuple(outs))

    def as_is(self, op: Op, placements: Sequence[Placement]) -> Option:
        ins = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
        return Option(ins, ins[: len(op.outs)])
