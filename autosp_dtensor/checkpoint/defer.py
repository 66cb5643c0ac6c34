"""Wide results are made when the user looks at them: logits, beside a loss that does without.

The program gives what they are made of instead. A loss function traced later takes that, so that
its logits, too, exist for one tile alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Origin, facts, result_nodes, set_facts
from ..lower import Collective, Region
from .chains import (
    WIDER,
    is_token_wise,
    members_of,
    producers,
    takes_as_made,
    unit_of,
    wide_of,
)
from .operands import local_bytes
from .tile import LEAST_BYTES, Tile, cut_of, make_tile, tile_count

__all__ = ["Deferred", "Later", "defer_results", "open_inputs"]


@dataclass(eq=False)
class Later:
    """A result that is not made yet: what makes it, and from which local values."""

    deferred: Deferred
    tensors: tuple[torch.Tensor, ...]


@dataclass(eq=False)
class Deferred:
    """Makes a result's `Later` of what it is made of, as a node's target.

    source: the operations, on whole local values. factor: what its incoming gradient is multiplied
    by. origins: of the inputs; parameters are gone when FSDP2 reshards them, and others once the
    optimizer has run.
    """

    tile: Tile
    source: Graph
    factor: float
    origins: tuple[Origin | None, ...]

    @property
    def __name__(self) -> str:  # what explain prints, and ranks compare
        return "on demand"

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return Later(self, tensors)


def defer_results(root: Region, results: int, height: int | None, *, grad: bool) -> int:
    """Defer the wide ones of a program's first `results` results.

    Without a gradient only those that a loss is made of: the others are what is asked for.

    Returns:
        how many there are.
    """
    graph = root.graph
    output = next(n for n in graph.nodes if n.op == "output")
    made = 0
    for result in dict.fromkeys(result_nodes(output)[:results]):
        factor, source = _source(result)
        nodes = _wide_producers(graph, source, LEAST_BYTES if height is None else 1)
        if not nodes or (not grad and not _is_used(source, result, output)):
            continue
        count = tile_count(nodes, height)
        tile, inputs = make_tile(nodes, (source,), count)
        origins = tuple(facts(n).origin for n in inputs)
        made_of = Deferred(tile, _copied(nodes, inputs, source), factor, origins)
        with graph.inserting_before(output):
            later = graph.call_function(made_of, inputs)
        changes = {"rule": None, "option": None, "bytes": 0, "aten": ()}
        set_facts(later, facts(source).having(**changes))
        result.replace_all_uses_with(later, delete_user_cb=lambda user: user is output)
        for node in dict.fromkeys((result, *reversed(nodes))):
            if not node.users and node.op == "call_function" and node is not later:
                graph.erase_node(node)
        made += 1
    return made


def _copied(nodes: tuple[Node, ...], inputs: tuple[Node, ...], result: Node) -> Graph:
    graph, made = Graph(), {}
    for k, node in enumerate(inputs):
        held = graph.placeholder(f"of_{k}")
        set_facts(held, facts(node).having(origin=None))
        made.setdefault(node, held)
    for node in nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
        set_facts(made[node], facts(node))
    set_facts(graph.output((made[result],)), facts(result))
    return graph


def open_inputs(root: Region, given: dict[int, Deferred]) -> None:
    """Inputs of a program that are not made yet are made in it, of what they are made of.

    given: by number of the input, whose placeholder goes; those that they are made of come after
    all others, in the order of the inputs.
    """
    graph = root.graph
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs = holders[len(root.states) :]
    last = holders[-1]
    for number, deferred in sorted(given.items()):
        made: dict[Node, Node] = {}
        for node in deferred.source.nodes:
            if node.op == "placeholder":
                with graph.inserting_after(last):
                    made[node] = last = graph.placeholder(f"{node.name}_of_{number}")
                set_facts(made[node], facts(node))
        after, result = last, result_nodes([*deferred.source.nodes][-1])[0]
        for node in deferred.source.nodes:
            if node.op == "call_function":
                with graph.inserting_after(after):
                    made[node] = after = graph.node_copy(node, lambda n, made=made: made[n])
                set_facts(made[node], facts(node))
        # Gradients of a DTensor's parts are multiplied where it leaves a program and divided where
        # it enters the next; it does neither.
        holder = inputs[number]
        for user in [holder, *holder.users]:
            if user is holder or _scales(user):
                user.replace_all_uses_with(made[result], delete_user_cb=lambda u: not _scales(u))
        for user in [*holder.users, holder]:
            graph.erase_node(user)
    graph.lint()


def _scales(node: Node) -> bool:
    return isinstance(node.target, Collective) and node.target.kind == "scale_grad"


def _source(result: Node) -> tuple[float, Node]:
    if _scales(result):
        assert isinstance(result.target, Collective)
        return result.target.factor, result.all_input_nodes[0]
    return 1.0, result


def _is_used(source: Node, result: Node, output: Node) -> bool:
    return any(user not in (result, output) for user in source.users)


def _wide_producers(graph: Graph, source: Node, least: int) -> tuple[Node, ...]:
    """The token-wise operations that make a wide value of narrow ones, in order; () if none do."""
    sizes = is_token_wise(source)
    if sizes is None or local_bytes(source) < least:
        return ()
    members = members_of(graph, sizes)
    unit = unit_of(graph, members, sizes)
    wide = wide_of(members, unit, least)
    if not unit or source not in wide or local_bytes(source) <= unit * WIDER:
        return ()
    nodes = producers([source], wide)
    for node in nodes:
        outside = [u for u in node.users if u not in members and not _gives(u)]
        if outside:  # it has to be made anyway
            return ()
    if not all(takes_as_made(node, nodes) for node in nodes):
        return ()
    taken = {u for n in nodes for u in n.all_input_nodes} - nodes
    if any(cut_of(u) and local_bytes(u) > unit * WIDER for u in taken):
        return ()
    order = {node: k for k, node in enumerate(graph.nodes)}
    return tuple(sorted(nodes, key=lambda n: order[n]))


def _gives(node: Node) -> bool:
    return node.op == "output" or (_scales(node) and all(u.op == "output" for u in node.users))
