"""Graph, mesh axis size -> a placement for every node, explicit redistributes."""

from __future__ import annotations

from torch.fx import Graph

from ..placement import Placement
from .blocks import PlacedBlock, outline_blocks
from .canonical import canonicalize
from .groups import LEAST_GROUP, in_groups
from .placer import Placer
from .versions import redistribute

__all__ = [
    "LEAST_GROUP",
    "PlacedBlock",
    "canonicalize",
    "in_groups",
    "place",
    "redistribute",
]


def place(
    graph: Graph,
    axis_size: int,
    inputs: list[Placement | None],
    seq_dim: int,
    whole_results: frozenset[int] = frozenset(),
    blocks: frozenset[str] = frozenset(),
    regions: frozenset[str] = frozenset(),
) -> Graph:
    """Place every node of a canonical graph.

    Args:
        graph: the whole-sequence graph in canonical form; calls of blocks are outlined in it.
        axis_size: ranks on the sp axis.
        inputs: placement of each input tensor that comes sharded (a DTensor), None for a whole one.
        seq_dim: the sequence dim of the inputs.
        whole_results: results that every rank needs whole (buffers that forward writes).
        blocks: paths of modules that repeat; equal calls of them are placed once.
        regions: paths of modules that become regions (blocks that differ in those inside are not
            equal).

    Raises:
        PlacementError: an operation on sharded values has no rule; all such operations are listed.
    """
    if blocks:
        graph = outline_blocks(graph, set(blocks), set(regions))
    return Placer(graph, axis_size, inputs, seq_dim, whole_results).run()
