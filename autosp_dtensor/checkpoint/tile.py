"""Token-wise operations as one operation that runs them on some tokens at a time.

A tile is a rank of a longer axis: what a rule makes of an operation on n ranks' tokens, it makes on
n times `count` shorter ones. So tiles need no rules of their own.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Meta, facts, set_facts
from ..place.rule import fill
from ..placement import Placement, Shard, balanced_sizes
from .operands import is_part, local_bytes, operands, placements_of
from .steps import Steps
from .tiled import TiledCall

__all__ = ["LEAST_BYTES", "Tile", "cut_of", "make_tile", "tile_count"]

# Wide values of a chain on one rank below which tiles gain nothing; what the widest has in a tile;
# tokens below which adding up weights' gradients in fp32 takes as long as the products.
LEAST_BYTES = 256 << 20
TILE_BYTES = 128 << 20
LEAST_TOKENS = 2048


@dataclass(eq=False)
class Tile:
    """Operations of a region that run tile by tile, as a node's target.

    body: their graph on `axis_size * count` ranks. cuts, gives: how inputs and outputs are cut on
    that axis; None: an input that is taken whole, an output that is a sum.
    """

    body: Graph
    axis_size: int
    count: int
    cuts: tuple[Shard | None, ...]
    gives: tuple[Shard | None, ...]
    outs: tuple[Meta, ...]
    _bound: dict[int, TiledCall] = field(default_factory=dict)

    @property
    def __name__(self) -> str:  # what explain prints, and ranks compare
        return f"tiles x{self.count}"

    @property
    def sums_once(self) -> bool:
        """Whether its gradients are made in forward."""
        return self.bind(0).sums_once

    @property
    def runs_again(self) -> bool:
        """Whether its backward runs it once more."""
        return any(meta.requires_grad for meta in self.outs) and not self.sums_once

    def bind(self, rank: int) -> TiledCall:
        """What one rank runs."""
        if rank not in self._bound:
            parts = range(rank * self.count, (rank + 1) * self.count)
            made: dict[str, Any] = {}
            calls = []
            for part in parts:
                steps = Steps.of(self.body, part)
                calls.append(made.setdefault(steps.key, steps))
            own = slice(parts.start, parts.stop)
            self._bound[rank] = TiledCall(
                calls,
                tuple(_own(cut, own) for cut in self.cuts),
                tuple(_own(give, own) for give in self.gives),
                tuple(meta.requires_grad for meta in self.outs),
                tuple(meta.numel == 1 for meta in self.outs),
            )
        return self._bound[rank]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """On the first rank; others run what `bind` gives."""
        return self.bind(0)(*tensors)


def _own(shard: Shard | None, parts: slice) -> Shard | None:
    return None if shard is None else replace(shard, sizes=shard.sizes[parts])


def make_tile(
    nodes: tuple[Node, ...], outputs: tuple[Node, ...], count: int
) -> tuple[Tile, tuple[Node, ...]]:
    """The tile of token-wise nodes of a lowered graph, `count` on each rank, and its inputs."""
    body = Graph()
    given: dict[tuple[Node, Placement], Node] = {}
    made: dict[Node, Node] = {}
    size = 0
    for node in nodes:  # inputs first: fx wants placeholders before all else
        if is_part(node):
            continue
        for each, placed in zip(operands(node), placements_of(node), strict=True):
            if each is not None and each not in nodes and (each, placed) not in given:
                given[each, placed] = body.placeholder(f"{each.name}_{len(given)}")
                known = facts(each).having(placements=_refined((placed,), count))
                set_facts(given[each, placed], known)
    for node in nodes:
        known = facts(node)
        if is_part(node):
            taken = made[node.all_input_nodes[0]]
            made[node] = body.call_function(operator.getitem, (taken, node.args[1]))
            set_facts(made[node], known.having(placements=_refined(known.placements, count)))
            continue
        op, option = known.option
        size = op.axis_size
        finer = replace(option, ins=_refined(option.ins, count), outs=_refined(option.outs, count))
        local = known.rule.localize(op, finer)
        tensors = [
            None if each is None else made[each] if each in made else given[each, placed]
            for each, placed in zip(operands(node), option.ins, strict=True)
        ]
        args, kwargs = fill(local.args, tensors), fill(dict(local.kwargs), tensors)
        made[node] = body.call_function(local.target, args, kwargs)
        set_facts(made[node], known.having(placements=_refined(known.placements, count)))
    output = body.output(tuple(made[node] for node in outputs))
    set_facts(output, facts(outputs[0]))
    body.lint()
    tile = Tile(
        body,
        size,
        count,
        tuple(_cut(facts(node).placement) for node in given.values()),
        tuple(_cut(facts(made[node]).placement) for node in outputs),
        tuple(facts(node).meta for node in outputs),
    )
    return tile, tuple(node for node, _ in given)


def _cut(placement: Placement) -> Shard | None:
    return placement if isinstance(placement, Shard) else None


def _refined(placements: tuple[Placement, ...], count: int) -> tuple[Placement, ...]:
    return tuple(
        replace(p, sizes=tuple(s for size in p.sizes for s in balanced_sizes(size, count)))
        if isinstance(p, Shard)
        else p
        for p in placements
    )


def tile_count(nodes: tuple[Node, ...], height: int | None) -> int:
    """Tiles of each rank, by the widest of some values."""
    widest = max((n for n in nodes if cut_of(n)), key=local_bytes)
    cut = cut_of(widest)
    assert cut is not None
    shape = list(facts(widest).meta.shape)
    shape[cut.dim] = cut.outer * max(cut.sizes)
    rows = math.prod(shape[:-1])
    if height is None:
        height = max(LEAST_TOKENS, TILE_BYTES * rows // max(local_bytes(widest), 1))
    return max(1, min(-(-rows // height), max(cut.sizes)))


def cut_of(node: Node) -> Shard | None:
    placements = facts(node).placements
    return placements[0] if placements and isinstance(placements[0], Shard) else None
