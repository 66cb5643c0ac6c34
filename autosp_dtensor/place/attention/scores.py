"""Scores as scale times a product plus masks: the form that kernels have arguments for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ...graph import facts, set_facts, short_name
from ..masks import MASKED_BELOW
from .products import as_product

__all__ = ["CASTS", "ScoreMask", "Scores", "walk_back"]

CASTS = {"to", "float", "double", "half", "bfloat16", "type_as", "type"}


@dataclass(frozen=True)
class ScoreMask:
    """A float mask that is added, or a bool one of what is allowed and the score of the rest."""

    node: Node
    fill: float | None = None


@dataclass
class Scores:
    """What was found on the way from softmax back to the product of queries and keys."""

    product: Node | None = None
    scale: float = 1.0
    masks: list[ScoreMask] = field(default_factory=list)
    casts: list[Node] = field(default_factory=list)


def walk_back(start: Any) -> Scores | None:
    """From softmax's argument to the product, through casts, masks, then scales; else None."""
    found = Scores()
    node = start
    while isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1:
        name = short_name(node.target)
        if node.kwargs and name not in CASTS:
            return None  # torch.add(mask, scores, alpha=0.1) and the like
        if as_product(node) is not None:
            found.product = node
            return found
        if name in CASTS:
            found.casts.append(node)
            node = node.args[0]
            continue
        step = _mask_step(node, name, found) or _scale_step(node, name, found)
        if step is None:
            return None
        node = step
    return None


def _mask_step(node: Node, name: str, found: Scores) -> Node | None:
    """scores + mask, scores.masked_fill(mask, -inf), where(mask, scores, -inf): the scores."""
    if found.scale != 1.0:
        return None  # a mask added before the scale would be scaled as well
    args: list[Any] = list(node.args)
    if name == "add" and len(args) == 2 and all(isinstance(a, Node) for a in args):
        sides = [a for a in args if _leads_to_product(a)]
        if len(sides) == 1:
            mask = args[1 - args.index(sides[0])]
            if not facts(mask).meta.dtype.is_floating_point:
                return None  # adding True adds 1
            found.masks.append(ScoreMask(mask))
            return sides[0]
    elif name == "masked_fill" and len(args) == 3 and _forbids(args[2]):
        found.masks.append(ScoreMask(_not(node, args[1]), _number(args[2])))
        return args[0]
    elif name == "where" and len(args) == 3 and _forbids(args[2]):
        found.masks.append(ScoreMask(args[0], _number(args[2])))
        return args[1]
    elif name == "where" and len(args) == 3 and _forbids(args[1]):
        found.masks.append(ScoreMask(_not(node, args[0]), _number(args[1])))
        return args[2]
    return None


def _not(at: Node, mask: Any) -> Node:
    """The opposite of a bool mask; dead code once it has been recognized."""
    with at.graph.inserting_before(at):
        node = at.graph.call_function(torch.logical_not, (mask,))
    meta = replace(facts(mask).meta, dtype=torch.bool)
    set_facts(node, replace(facts(at), outs=(meta,), aten=(torch.ops.aten.logical_not.default,)))
    return node


def _forbids(value: Any) -> bool:
    number = _number(value)
    return number is not None and number <= MASKED_BELOW


def _number(value: Any) -> float | None:
    """A Python number, or a scalar tensor made from one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and facts(value).meta.shape == () and value.op == "call_function":
        number = _scalar_number(value)
        return (
            None if number is None else torch.tensor(number, dtype=facts(value).meta.dtype).item()
        )
    return None


def _scalar_number(value: Node) -> float | None:
    if value.op == "call_function":
        name, args = short_name(value.target), value.args
        if name == "tensor" and args and isinstance(args[0], (int, float)):
            return float(args[0])
        if name == "full":
            fill = args[1] if len(args) > 1 else value.kwargs.get("fill_value")
            return float(fill) if isinstance(fill, (int, float)) else None
        if name in CASTS:
            return _number(args[0])
    return None


def _leads_to_product(value: Any) -> bool:
    while isinstance(value, Node) and value.op == "call_function":
        name = short_name(value.target)
        if as_product(value) is not None:
            return True
        if name not in CASTS and name not in (
            "mul",
            "rmul",
            "div",
            "truediv",
            "masked_fill",
            "add",
        ):
            return False
        value = value.args[0]
    return False


def _scale_step(node: Node, name: str, found: Scores) -> Node | None:
    """scores * number, scores / number."""
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    if name in ("mul", "rmul"):
        for rest, other in ((a, b), (b, a)):
            number = _number(other)
            if number is not None and isinstance(rest, Node):
                found.scale *= number
                return rest
    number = _number(b)
    if name in ("div", "truediv") and number and isinstance(a, Node):
        found.scale /= number
        return a
    return None
