"""Features put at marked tokens: masked_scatter as a lookup, which each rank can do for its part.

The k-th marked token of the whole batch, row by row, takes the k-th feature. Marks are O(S) and had
whole, so the number of each is known everywhere, and nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ..graph import facts, short_name
from .insert import add_call, bind

__all__ = ["look_up_marked", "number_of_mark"]

# What changes neither a mask's values nor the order of its rows.
_SAME = ("expand", "expand_as", "broadcast_to", "to", "bool", "contiguous", "clone")


def look_up_marked(graph: Graph, node: Node) -> None:
    """x.masked_scatter(mask, features) where the mask marks whole rows of x's last dim."""
    given = bind(node, ("input", "mask", "source"))
    x, source = given["input"], given["source"]
    mask = _one_mark_a_token(given["mask"])
    if not isinstance(x, Node) or not isinstance(source, Node) or mask is None:
        return
    shape, width = facts(x).meta.shape, facts(x).meta.shape[-1]
    if facts(mask).meta.shape != (*shape[:-1], 1):
        return
    known, rows = facts(node), facts(source).meta
    with graph.inserting_before(node):
        if len(rows.shape) != 2 or rows.shape[1] != width:
            if rows.numel % width:
                return
            rows = replace(rows, shape=(rows.numel // width, width))
            source = add_call(
                graph, node, torch.Tensor.reshape, (source, rows.shape), {}, rows,
                (torch.ops.aten.view.default,),
            )  # fmt: skip
        number = replace(facts(mask).meta, shape=shape[:-1], dtype=torch.int64, requires_grad=False)
        order = add_call(graph, node, number_of_mark, (mask,), {}, number)
        taken = replace(rows, shape=shape)
        features = add_call(
            graph, node, F.embedding, (order, source), {}, taken,
            (torch.ops.aten.embedding.default,),
        )  # fmt: skip
        result = add_call(
            graph, node, torch.where, (mask, features, x), {}, known.meta,
            (torch.ops.aten.where.self,),
        )  # fmt: skip
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _one_mark_a_token(mask: object) -> Node | None:
    """The mask [..., 1] that was expanded over the last dim."""
    while isinstance(mask, Node):
        if facts(mask).meta.shape[-1:] == (1,):
            return mask if facts(mask).meta.dtype == torch.bool else None
        if mask.op != "call_function" or short_name(mask.target) not in _SAME:
            return None
        mask = mask.args[0]
    return None


def number_of_mark(mask: torch.Tensor) -> torch.Tensor:
    """[..., 1] -> [...]: which feature each marked token takes; 0 before the first.

    As on one device, more marks than features are an error: the lookup's own.
    """
    return mask.flatten().cumsum(0).sub(1).clamp(min=0).view(mask.shape[:-1])
