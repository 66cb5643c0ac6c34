"""What a lowered call takes, as its placement rule numbers it."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from ..graph import facts
from ..lower import local_meta
from ..place.rule import Local, Slot
from ..placement import Placement

__all__ = ["is_part", "local_bytes", "operands", "placements_of"]


def local_bytes(node: Node) -> int:
    """Bytes of a node's results on the first rank."""
    known = facts(node)
    return sum(
        math.prod(local_meta(known, i, 0)) * meta.dtype.itemsize
        for i, meta in enumerate(known.outs)
    )


def is_part(node: Node) -> bool:
    """Whether a node takes one result of an operation that has several (chunk)."""
    if node.target is not operator.getitem or facts(node).option is not None:
        return False
    (made,) = node.all_input_nodes
    return made.op == "call_function" and facts(made).option is not None


def operands(node: Node) -> list[Node | None]:
    """The tensors of a lowered call by their number in its operation; None: it is taken no more."""
    if is_part(node):
        return [*node.all_input_nodes]
    op, option = facts(node).option
    local: Local = facts(node).rule.localize(op, option)
    slots: list[Any] = []
    values: list[Any] = []
    map_aggregate((local.args, dict(local.kwargs)), slots.append)
    map_aggregate((node.args, node.kwargs), values.append)
    found = {s.index: v for s, v in zip(slots, values, strict=True) if isinstance(s, Slot)}
    return [found.get(k) for k in range(len(option.ins))]


def placements_of(node: Node) -> tuple[Placement, ...]:
    """How it takes them. (On one rank a value that is split is whole, too.)"""
    if is_part(node):
        return (facts(node).placement,)
    return facts(node).option[1].ins
