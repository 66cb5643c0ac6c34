"""Rewrites of whole-sequence calls into equal ones that can be placed, up to rounding."""

from __future__ import annotations

from torch.fx import Graph

from ..capture.targets import Opaque
from ..graph import short_name
from .attention.fuse import fuse_attention
from .attention.masking import MaskSearch, noted, plain_or_tiled
from .attention.sharing import share_key_heads
from .losses import split_mean
from .masks import ReadState
from .scatter import look_up_marked

__all__ = ["canonicalize"]


def canonicalize(graph: Graph, axis_size: int, read: ReadState | None = None) -> Graph:
    """Means become sums over a global count, features at marked tokens are looked up, plain causal
    masks go, key heads are shared. What nobody uses goes first: attention whose weights a module
    returns and its caller drops is one call.

    read: gives the value of a buffer; masks kept in buffers are then recognized.
    """
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    masks = MaskSearch(read)
    fuse_attention(graph, masks)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = short_name(node.target)
        if name == "scaled_dot_product_attention":
            node = plain_or_tiled(graph, node, masks)
        if name in ("scaled_dot_product_attention", "tiled_attention"):
            share_key_heads(graph, node)
        elif isinstance(node.target, Opaque) and node.target.form:
            noted(node, "the model's own call")
        elif name == "masked_scatter":
            look_up_marked(graph, node)
        else:
            split_mean(graph, node)
    graph.lint()
    return graph
