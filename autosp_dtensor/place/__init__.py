"""Graph, mesh axis size -> a placement for every node, explicit redistributes."""

from __future__ import annotations

from torch.fx import Graph

from ..placement import Placement
from .blocks import PlacedBlock, outline_blocks
from .canonical import canonicalize
from .masks import ReadState
from .placer import Placer
from .versions import redistribute

__all__ = ["PlacedBlock", "place", "redistribute"]


def place(
    graph: Graph,
    axis_size: int,
    inputs: list[Placement | None],
    seq_dim: int,
    whole_results: frozenset[int] = frozenset(),
    blocks: frozenset[str] = frozenset(),
    regions: frozenset[str] = frozenset(),
    read: ReadState | None = None,
) -> Graph:
    """Place every node of a captured graph.

    Args:
        graph: the whole-sequence graph; it is rewritten into canonical form.
        axis_size: ranks on the sp axis.
        inputs: placement of each input tensor that comes sharded (a DTensor), None for a whole one.
        seq_dim: the sequence dim of the inputs.
        whole_results: results that every rank needs whole (buffers that forward writes).
        blocks: paths of modules that repeat; equal calls of them are placed once.
        regions: paths of modules that become regions (blocks that differ in those inside are not
            equal).
        read: gives the value of a buffer; masks kept in buffers are then recognized.

    Raises:
        PlacementError: an operation on sharded values has no rule; all such operations are listed.
    """
    graph = canonicalize(graph, axis_size, read)
    if blocks:
        graph = outline_blocks(graph, set(blocks), set(regions))
    return Placer(graph, axis_size, inputs, seq_dim, whole_results).run()
