"""A mask that depends on data, evaluated on tiles while the program runs: it never exists whole.

What the mask is made of (positions, document ids, padding flags) is given as tensors; the mask
itself is their expression. A first pass bounds every tile, so that tiles that allow nothing are
skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ...graph import facts, set_facts
from .expression import Expression, NotStatic, Rect

__all__ = ["Band", "TileMask", "tile_mask"]

TILE = 512


@dataclass(frozen=True)
class Band:
    """Queries rows[0]:rows[1] of batch row `batch` (None: of all) and the keys that they may read.

    masked: whether some of those keys are forbidden to some of the queries.
    """

    batch: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    masked: bool


@dataclass(frozen=True)
class _Known:
    """Bands found for given tensors, held so that no others take their place unnoticed."""

    leaves: tuple[torch.Tensor, ...]
    versions: list[int]
    tile: int
    bands: list[Band]

    def fits(self, leaves: Sequence[torch.Tensor], versions: list[int]) -> bool:
        same = all(a is b for a, b in zip(self.leaves, leaves, strict=True))
        return same and versions == self.versions and self.tile == TILE


class TileMask:
    """The expression of one mask, cut out of the captured graph; calls give `leaves` in order."""

    def __init__(self, graph: Graph, root: Node, leaves: list[Node]) -> None:
        self.graph, self.root, self.leaves = graph, root, leaves
        self._known: _Known | None = None

    def __repr__(self) -> str:
        return f"mask of {len(self.graph.nodes) - len(self.leaves)} operations"

    def values(self, leaves: Sequence[torch.Tensor], rect: Rect, batch: int | None) -> torch.Tensor:
        """The mask on a rectangle, with all its leading dims."""
        mask = self._expression(leaves).exact(rect)
        mask = mask.expand(*mask.shape[:-2], rect[1] - rect[0], rect[3] - rect[2])
        return (
            mask
            if batch is None or mask.dim() < 4 or mask.shape[0] == 1
            else mask[batch : batch + 1]
        )

    def bands(self, leaves: Sequence[torch.Tensor]) -> list[Band]:
        """Which tiles there is work in; the same for every layer that is given the same tensors."""
        versions = [0 if leaf.is_inference() else leaf._version for leaf in leaves]
        if self._known is None or not self._known.fits(leaves, versions):
            self._known = _Known(tuple(leaves), versions, TILE, self._find_bands(leaves))
        return self._known.bands

    def _expression(self, leaves: Sequence[torch.Tensor]) -> Expression:
        expression = Expression(self.root)
        expression.give(dict(zip(self.leaves, leaves, strict=True)))
        return expression

    def _find_bands(self, leaves: Sequence[torch.Tensor]) -> list[Band]:
        shape = facts(self.root).meta.shape
        rows = shape[0] if len(shape) == 4 else 1
        found = []
        for batch in range(rows) if rows > 1 else [None]:
            own = [_row_of(leaf, batch, rows) for leaf in leaves]
            expression = self._expression([leaf.cpu() for leaf in own])
            for top in range(0, expression.rows, TILE):
                found.append(self._band(expression, top, batch))
        return found

    def _band(self, expression: Expression, top: int, batch: int | None) -> Band:
        """The span of columns that may be read in a strip of rows, found tile by tile."""
        bottom = min(top + TILE, expression.rows)
        first, last, masked = None, 0, False
        for left in range(0, expression.columns, TILE):
            right = min(left + TILE, expression.columns)
            verdict = self._verdict(expression, (top, bottom, left, right))
            if verdict is False:
                masked = masked or first is not None
                continue
            first = left if first is None else first
            last = right
            masked = masked or verdict is None
        # A forbidden tile after the last allowed one takes no part.
        return Band(batch, (top, bottom), (first or 0, last if first is not None else 0), masked)

    def _verdict(self, expression: Expression, rect: Rect) -> bool | None:
        """All allowed, all forbidden, or neither for certain."""
        bounds = expression.bounds(rect)
        if bounds is None:
            return None
        if facts(self.root).meta.dtype == torch.bool:
            return True if bounds[0] > 0 else False if bounds[1] == 0 else None
        if bounds == (0.0, 0.0):
            return True
        # A finite float only outweighs: where it is all that a query has, it attends to all keys.
        return False if bounds[1] == float("-inf") else None


def _row_of(leaf: torch.Tensor, batch: int | None, rows: int) -> torch.Tensor:
    """One batch row of a leaf; leaves of masks [B, 1, S, T] have four dims where B counts."""
    if batch is None or leaf.dim() != 4 or leaf.shape[0] != rows:
        return leaf
    return leaf[batch : batch + 1]


def tile_mask(root: Node) -> tuple[TileMask, list[Node]] | None:
    """Cut a mask's expression out of its graph: (mask, the nodes whose values it is given).

    None where the mask is no expression: given whole, random, trained, or built by an operation
    that cannot be evaluated on a part.
    """
    meta = facts(root).meta
    if len(meta.shape) not in (2, 4) or meta.requires_grad:
        return None
    expression = Expression(root)
    if not expression._is_large(root):
        return None
    order: list[Node] = []
    leaves: list[Node] = []
    if not _collect(expression, root, order, leaves):
        return None
    graph = Graph()
    made: dict[Node, Node] = {}
    for index, leaf in enumerate(leaves):
        made[leaf] = graph.placeholder(f"leaf_{index}")
        set_facts(made[leaf], facts(leaf))
    for node in order:
        made[node] = graph.node_copy(node, lambda n: made[n])
        set_facts(made[node], facts(node))
    mask = TileMask(graph, made[root], [made[leaf] for leaf in leaves])
    try:  # every operation on the way can be evaluated on a part?
        probe = [
            torch.zeros(facts(leaf).meta.shape, dtype=facts(leaf).meta.dtype) for leaf in leaves
        ]
        mask.values(probe, (0, min(2, expression.rows), 0, min(2, expression.columns)), None)
    except (NotStatic, RuntimeError):
        return None
    return mask, leaves


_LEAF_LIMIT = 1 << 26


def _collect(expression: Expression, node: Node, order: list[Node], leaves: list[Node]) -> bool:
    """Nodes of the size of the mask, inputs first, and the small nodes that they read."""
    if node in order or node in leaves:
        return True
    if not expression._is_large(node):
        meta = facts(node).meta
        if meta.requires_grad or not facts(node).single or meta.numel > _LEAF_LIMIT:
            return False
        leaves.append(node)
        return True
    if facts(node).random or node.op != "call_function":
        return False
    if not all(_collect(expression, each, order, leaves) for each in node.all_input_nodes):
        return False
    order.append(node)
    return True
