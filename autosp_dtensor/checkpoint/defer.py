"""Wide results are made when the user looks at them: logits, beside a loss that does without.

The program gives what they are made of instead. A loss function traced later takes that, so that
its logits, too, exist for one tile alone.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Meta, Origin, facts, result_nodes, set_facts
from ..lower import Call, Collective, Region
from ..placement import Replicate
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


class Later:
    """A result that is not made yet: what makes it, and from which local values.

    Not a dataclass: FSDP2 looks for tensors in those that pass it.
    """

    def __init__(self, deferred: Deferred, tensors: tuple[torch.Tensor, ...]) -> None:
        self.deferred, self.tensors = deferred, tensors


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
    calls = Counter(region for _, region in root.walk())
    alone = {region for region, count in calls.items() if count == 1}
    output = _output(root)
    wanted = dict.fromkeys(result_nodes(output)[:results])
    return sum(_defer(root, result, alone, height, grad=grad) for result in wanted)


def _defer(
    region: Region, result: Node, alone: set[Region], height: int | None, *, grad: bool
) -> bool:
    """Defer a result of a region, or of a region that is called there."""
    graph, output = region.graph, _output(region)
    if result.target is operator.getitem:
        called = result.all_input_nodes[0].target
        if isinstance(called, Call):
            inner = result_nodes(_output(called.region))[_place(result)]
            own = called.region in alone and all(user is output for user in result.users)
            if not own or not _defer(called.region, inner, alone, height, grad=grad):
                return False
            _forget(result)
            return True
    factor, source = _source(result)
    nodes = _wide_producers(graph, source, LEAST_BYTES if height is None else 1)
    if not nodes or (not grad and not _is_used(source, result, output)):
        return False
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
    return True


def _output(region: Region) -> Node:
    return next(n for n in region.graph.nodes if n.op == "output")


def _place(part: Node) -> int:
    """Of a getitem: which one it takes."""
    index = part.args[1]
    assert isinstance(index, int)
    return index


def _forget(result: Node) -> None:
    """A call's result, and the call, no longer say that there is something wide."""
    call, index = result.all_input_nodes[0], _place(result)
    known = facts(call)
    nothing = Meta((0,), known.outs[index].dtype, known.outs[index].device)
    outs, placements = list(known.outs), list(known.placements)
    outs[index], placements[index] = nothing, Replicate()
    set_facts(call, known.having(outs=tuple(outs), placements=tuple(placements)))
    set_facts(result, facts(result).having(outs=(nothing,), placements=(Replicate(),)))


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
