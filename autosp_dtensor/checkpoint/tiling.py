"""Chains of token-wise operations become tiles in a region's graph; attention goes by heads."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from torch.fx import Graph, Node

from .._torch import FakeTensorMode
from ..graph import facts, set_facts
from ..lower import Call, Region, verify_lowered
from ..place.attention.heads import attend
from ..placement import Shard
from .by_heads import ByHeads
from .chains import Chain, find_chains, is_convex
from .choose import Policy
from .defer import defer_results
from .head_groups import MOST_WORKSPACE, groups_of
from .head_sizes import sizes_of
from .kinds import inner
from .order import in_order
from .record import record
from .tile import LEAST_BYTES, make_tile, tile_count

__all__ = ["tile_chains", "tile_free", "tile_losses", "tile_run_again"]


def tile_free(root: Region, results: int, tile: str | int, *, grad: bool) -> None:
    """Tiles that take no time: losses that are one sum, and all large chains where there is no
    backward. An integer asks for all chains, in tiles of that many tokens. Wide results are
    deferred. Attention whose backward takes much workspace goes by groups of heads; with an
    integer, by one head at a time.

    Args:
        root: the whole program. results: how many of its results the user is given.
        tile: "auto", "none" or tokens of a tile.
    """
    if tile == "none":
        return
    height = tile if isinstance(tile, int) else None
    defer_results(root, results, height, grad=grad)
    for region in dict.fromkeys(region for _, region in root.walk()):
        free = (lambda c: c.reduces and c.sums_once) if grad and height is None else lambda c: True
        tile_chains(region, height, free)
        if grad:
            attend_by_heads(region, MOST_WORKSPACE if height is None else None)


def tile_losses(root: Region, worth: Callable[[], bool]) -> int:
    """Tiles for the other large losses, whose backward then runs their projection once more.

    worth: whether they are to be, asked for if there are any.

    Returns:
        how many there are.
    """
    asked = functools.cache(worth)
    regions = dict.fromkeys(region for _, region in root.walk())
    return sum(tile_chains(region, None, lambda c: c.reduces and asked()) for region in regions)


def tile_run_again(policy: Policy) -> int:
    """Tiles for large chains that a policy runs again whole: one tile at a time takes no longer.

    Returns:
        how many there are; the policy was for the graphs without them.
    """
    made = 0
    for region in policy.choices:
        nodes = list(region.graph.nodes)
        kept = {nodes[k] for choice in policy.all_of(region) for k in choice.keep}
        made += tile_chains(
            region, None, lambda c, kept=kept: not kept & {*c.nodes}, frozenset(kept)
        )
    return made


def tile_chains(
    region: Region,
    height: int | None,
    wanted: Callable[[Chain], bool],
    kept: frozenset[Node] = frozenset(),
) -> int:
    """Put tiles in the place of a region's chains that are wanted.

    Args:
        height: tokens of a tile; None: as many as keep matrix products and fp32 sums of weights'
            gradients efficient, for chains that are large.
        kept: operations that are not to join a chain.

    Returns:
        how many there are.
    """

    @functools.cache
    def bases() -> dict[Node, Node]:
        found = record(region)
        return {found.nodes[k]: found.nodes[b] for k, b in found.base.items() if b is not None}

    least = LEAST_BYTES if height is None else 1
    total = 0
    while True:
        made = 0
        gone: set[Node] = set()
        for chain in list(find_chains(region.graph, least, lambda n: bases().get(n, n), kept)):
            if gone & {*chain.nodes, *chain.inputs} or not wanted(chain) or not is_convex(chain):
                continue
            count = tile_count((*chain.nodes, *chain.inputs), height)
            if count > 1 or height is not None:
                contract(region.graph, chain, count)
                gone |= {*chain.nodes}
                made += 1
        total += made
        if not made:
            break
        sort_graph(region.graph)
        region.calls[:] = [n.target for n in region.graph.nodes if isinstance(n.target, Call)]
    return total


def attend_by_heads(region: Region, most: int | None) -> None:
    """Have attention's kernel called for groups of heads where one call takes more workspace.

    most: bytes; None: for one head of queries at a time.
    """
    for node in region.graph.nodes:
        known = facts(node)
        if node.op != "call_function" or known.random or not known.meta.requires_grad:
            continue  # what is drawn for some heads at a time would be other numbers
        placed = known.placement
        ranks = range(len(placed.sizes) if isinstance(placed, Shard) else 1)
        count = max(_calls(node, most, rank) for rank in ranks)
        if count < 2:
            continue
        if node.target is attend:
            node.args = (ByHeads(inner(node), most), *node.args[1:])
        else:
            node.target = ByHeads(inner(node), most)
        notes = [note for note in (known.note, f"{count} groups of heads") if note]
        set_facts(node, known.having(note=", ".join(notes)))


def _calls(node: Node, most: int | None, rank: int) -> int:
    """How many groups of heads one rank has."""
    sizes = sizes_of(node, rank)
    itemsize = facts(node).meta.dtype.itemsize
    return 1 if sizes is None else len(groups_of(sizes, itemsize, most))


def contract(graph: Graph, chain: Chain, count: int) -> Node:
    """Put a tile in the place of a chain."""
    tile, inputs = make_tile(chain.nodes, chain.outputs, count)
    verify_lowered(tile.body, tile.axis_size * count, FakeTensorMode())
    last = chain.nodes[-1]
    metas = [facts(node) for node in chain.outputs]
    with graph.inserting_after(last):
        made = graph.call_function(tile, inputs)
    widest = max(chain.nodes, key=lambda n: facts(n).meta.nbytes)
    set_facts(
        made,
        facts(widest).having(
            outs=tuple(f.meta for f in metas),
            placements=tuple(f.placement for f in metas),
            homes=tuple(f.home for f in metas),
            single=len(metas) == 1,
            rule=None,
            option=None,
            bytes=0,
            aten=(),
            turn=None,
        ),
    )
    after = made
    for index, node in enumerate(chain.outputs):
        given = made
        if len(metas) > 1:
            with graph.inserting_after(after):
                given = after = graph.call_function(operator.getitem, (made, index))
            set_facts(given, facts(node).having(rule=None, option=None, bytes=0))
        node.replace_all_uses_with(given, delete_user_cb=lambda user: user not in chain.nodes)
    for node in reversed(chain.nodes):
        graph.erase_node(node)
    return made


def sort_graph(graph: Graph) -> None:
    """Nodes after what they take; otherwise in the order that they have."""
    end = next(n for n in graph.nodes if n.op == "output")
    for node in in_order({node: node.all_input_nodes for node in graph.nodes}):
        if node is not end:
            end.prepend(node)
    graph.lint()
