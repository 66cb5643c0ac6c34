"""Placed graph -> local torch calls, collectives and regions; the only code that inserts a
collective.
"""

from __future__ import annotations

from torch.fx import Graph

from .._torch import FakeTensorMode
from .localize import Collective, Drawn, bound, flatten_exchanges, local_meta, localize
from .regions import Region, cut_regions
from .verify import verify_lowered

__all__ = [
    "Collective",
    "Drawn",
    "Region",
    "bound",
    "cut_regions",
    "local_meta",
    "lower",
    "verify_lowered",
]


def lower(placed: Graph, axis_size: int, fake_mode: FakeTensorMode) -> Graph:
    """The passes in order; the result is checked on fake local tensors."""
    graph = localize(placed, axis_size)
    graph = flatten_exchanges(graph)
    verify_lowered(graph, axis_size, fake_mode)
    return graph
