"""Which dim of which input is the sequence."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ..graph import facts
from ..placement import Placement, Shard, chunk_sizes

__all__ = ["find_sequences", "seed_inputs"]


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
    metas = [facts(node).meta for node in nodes]
    found = find_sequences([(m.shape, m.dtype.is_floating_point) for m in metas], seq_dim)
    if found is None:
        return {}
    length, indices = found
    return {nodes[k]: Shard(seq_dim, chunk_sizes(length, axis_size)) for k in indices}


def find_sequences(
    tensors: Sequence[tuple[tuple[int, ...], bool]], seq_dim: int
) -> tuple[int, list[int]] | None:
    """(length, which tensors have it) by the rule of `seed_inputs`; None without a sequence.

    tensors: shape, and whether it is floating point.
    """
    integers = [k for k, (s, is_float) in enumerate(tensors) if len(s) > seq_dim and not is_float]
    floats = [k for k, (s, is_float) in enumerate(tensors) if len(s) > seq_dim + 1 and is_float]
    if not integers and not floats:
        return None
    length = tensors[(integers or floats)[0]][0][seq_dim]
    return length, [k for k in (*integers, *floats) if tensors[k][0][seq_dim] == length]
