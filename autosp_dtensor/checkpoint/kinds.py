"""Attention, products of matrices, and all else: what costs arithmetic, and what only bytes."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import short_name
from ..lower import Drawn
from .by_heads import ByHeads

__all__ = ["inner", "is_attention", "is_product"]

_ATTENTION = {"scaled_dot_product_attention", "tiled_attention", "flex_weights"}
_PRODUCTS = {"linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "bilinear", "dot", "mv"}


def is_attention(node: Node) -> bool:
    """Whether a node is attention, whichever kernel runs it."""
    target = inner(node)
    return short_name(target) in _ATTENTION or bool(getattr(target, "form", ""))


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
