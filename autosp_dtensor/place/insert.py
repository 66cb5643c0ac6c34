"""Adding calls to a captured graph while it is rewritten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Graph, Node

from ..graph import Meta, facts, set_facts

__all__ = ["add_call", "bind"]


def add_call(
    graph: Graph,
    like: Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: Meta,
    aten: tuple[Any, ...] = (),
) -> Node:
    """A call that stands where `like` does, of one result."""
    node = graph.call_function(target, args, kwargs)
    set_facts(node, replace(facts(like), outs=(meta,), aten=aten, random=False, single=True))
    return node


def bind(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of a call by name."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs
