"""Which dim of which input is the sequence."""

from __future__ import annotations

from torch.fx import Graph, Node

from ..graph import facts
from ..placement import Placement, Shard, chunk_sizes

__all__ = ["seed_inputs"]


def seed_inputs(
    graph: Graph, inputs: list[Placement | None], axis_size: int, seq_dim: int
) -> dict[Node, Shard]:
    """Which dim of which input is the sequence.

    The length is that of the first integer input with more dims than `seq_dim`, else of the first
    float one. An integer with that length there, or a float with it and a dim after it, is a
    sequence. This decides where values are cut, never what is computed: a wrong guess costs an
    exchange.
    """
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    wide = [n for n in nodes if len(facts(n).meta.shape) > seq_dim]
    integers = [n for n in wide if not facts(n).meta.dtype.is_floating_point]
    floats = [
        n
        for n in wide
        if facts(n).meta.dtype.is_floating_point and len(facts(n).meta.shape) > seq_dim + 1
    ]
    first = (integers or floats)[:1]
    if not first:
        return {}
    length = facts(first[0]).meta.shape[seq_dim]
    return {
        n: Shard(seq_dim, chunk_sizes(length, axis_size))
        for n in (*integers, *floats)
        if facts(n).meta.shape[seq_dim] == length
    }
