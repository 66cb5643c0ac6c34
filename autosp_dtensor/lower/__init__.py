"""Placed graph -> local torch calls, collectives, regions; nothing else inserts a collective."""

from __future__ import annotations

from torch.fx import Graph

from .._torch import FakeTensorMode
from ..place import PlacedBlock
from ..place.rule import bound
from .buffers import are_made, told_of_landings
from .localize import Collective, Drawn, flatten_exchanges, local_meta, localize
from .regions import Call, LoweredBlock, Region, cut_regions
from .schedule import Step, schedule
from .verify import verify_lowered

__all__ = [
    "Call",
    "Collective",
    "Drawn",
    "LoweredBlock",
    "Region",
    "Step",
    "are_made",
    "bound",
    "cut_regions",
    "local_meta",
    "lower",
    "schedule",
    "told_of_landings",
    "verify_lowered",
]


def lower(
    placed: Graph,
    axis_size: int,
    fake_mode: FakeTensorMode,
    *,
    whole_border: bool = False,
    by_head: bool = True,
) -> Graph:
    """Run the passes for each distinct block, then for the program around; all are verified.

    whole_border: keep factors of gradients at the program's border that would cancel. by_head: what
    attention reads comes as a CPU's kernel reads it best, where it is one.
    """
    blocks: dict[PlacedBlock, LoweredBlock] = {}
    for node in placed.nodes:
        if isinstance(node.target, PlacedBlock) and node.target not in blocks:
            inner = localize(node.target.graph, axis_size, by_head=by_head)
            inner = _passes(inner, axis_size, fake_mode)
            blocks[node.target] = LoweredBlock(node.target.block.path, inner)
    flat = localize(placed, axis_size, blocks, whole_border=whole_border, by_head=by_head)
    return _passes(flat, axis_size, fake_mode)


def _passes(graph: Graph, axis_size: int, fake_mode: FakeTensorMode) -> Graph:
    graph = flatten_exchanges(graph)
    verify_lowered(graph, axis_size, fake_mode)
    return graph
