"""Attention, products of matrices, and all else: what costs arithmetic, and what only bytes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import facts, short_name
from ..lower import Drawn
from ..place.register import UserRule
from .by_heads import ByHeads

__all__ = ["inner", "is_attention", "is_product", "sequences_read"]

_ATTENTION = {"scaled_dot_product_attention", "tiled_attention", "flex_weights"}
_PRODUCTS = {"linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "bilinear", "dot", "mv"}


def is_attention(node: Node) -> bool:
    """Whether a node is attention, whichever kernel runs it."""
    target, rule = inner(node), facts(node).rule
    if isinstance(rule, UserRule):
        if rule.attention is not None:
            return rule.attention
        return len(sequences_read(node)) > 1
    return short_name(target) in _ATTENTION or bool(getattr(target, "form", ""))


def sequences_read(node: Node) -> list[int]:
    """Of each tensor that an operation with a rule of the user's reads whole along a dim before its
    last, the size of that: queries, keys and values, for an attention; not a norm's features.
    """
    known = facts(node)
    assert isinstance(known.rule, UserRule)
    op, _ = known.option
    factors = known.rule.factors(op)
    found = []
    for names, meta in zip(factors.ins, op.ins, strict=True):
        whole = [size for name, size in zip(names[:-1], meta.shape, strict=False)
                 if name is not None and name not in factors.local]  # fmt: skip
        found += whole[-1:]
    return found


def is_product(node: Node) -> bool:
    """Whether a node multiplies matrices."""
    name = short_name(inner(node))
    return name in _PRODUCTS or name.startswith("conv")


def inner(node: Node) -> Any:
    """The function that is called, inside of what lowering put around it."""
    target: Any = node.target
    if isinstance(target, Drawn):
        target = target.target
    if getattr(target, "__name__", "") == "attend" and node.args and callable(node.args[0]):
        target = node.args[0]
    return target.target if isinstance(target, ByHeads) else target
