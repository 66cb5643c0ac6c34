"""Key and value heads that the model repeats for its query heads are shared instead."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from ...graph import arg_nodes, facts, short_name
from ..insert import bind

__all__ = ["share_key_heads"]


def share_key_heads(graph: Graph, node: Node) -> None:
    """enable_gqa says that heads are shared, and no copies are exchanged."""
    query, *others = arg_nodes(node)
    if node.kwargs.get("enable_gqa"):
        return
    key, value = _repeated_from(others[0]), _repeated_from(others[1])
    if key is None or value is None or key[1] != value[1]:
        return
    node.args = (query, key[0], value[0], *others[2:])
    node.kwargs = {**node.kwargs, "enable_gqa": True}


def _repeated_from(node: Any) -> tuple[Node, int] | None:
    """(x, g) where the node is x [B, Hkv, S, D] with each head g times in a row; else None."""
    if not isinstance(node, Node) or node.op != "call_function":
        return None
    if len(facts(node).meta.shape) != 4:
        return None
    name = short_name(node.target)
    if name == "contiguous":
        return _repeated_from(node.args[0])
    if name == "repeat_interleave":
        given = bind(node, ("input", "repeats", "dim"))
        source, repeats = given.get("input"), given.get("repeats")
        if isinstance(source, Node) and isinstance(repeats, int) and given.get("dim") in (1, -3):
            return source, repeats
        return None
    return _expanded_from(node) if name in ("reshape", "view", "flatten") else None


def _expanded_from(node: Node) -> tuple[Node, int] | None:
    """The same said as x[:, :, None].expand(B, Hkv, g, S, D).reshape(B, Hkv * g, S, D)."""
    wide: Any = node.args[0]
    if short_name(wide.target) not in ("expand", "broadcast_to"):
        return None
    narrow: Any = wide.args[0]
    if not (short_name(narrow.target) == "unsqueeze" or _adds_dims_alone(narrow)):
        return None
    source: Any = narrow.args[0]
    b, h, s, d = facts(node).meta.shape
    wide_shape = facts(wide).meta.shape
    if len(wide_shape) != 5 or wide_shape[3:] != (s, d) or wide_shape[0] != b:
        return None
    kept, groups = wide_shape[1], wide_shape[2]
    shapes = facts(narrow).meta.shape, facts(source).meta.shape
    if shapes != ((b, kept, 1, s, d), (b, kept, s, d)) or kept * groups != h or groups == 1:
        return None
    return source, groups


def _adds_dims_alone(node: Node) -> bool:
    """x[:, :, None]: an index of whole slices and None, which moves nothing."""
    if short_name(node.target) != "getitem":
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(i is None or i is Ellipsis or i == slice(None) for i in index)
