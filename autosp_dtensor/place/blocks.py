"""Repeated blocks: equal calls of a model's layers are placed and lowered once.

A block is a call of a module that the model repeats (`block_paths` in run/build.py). Its nodes are
cut out of the captured graph; blocks that do the same on values of the same shapes become calls of
one `Block`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..graph import Facts, Meta, Origin, Scope, exact, facts, set_facts

__all__ = ["Block", "PlacedBlock", "outline_blocks"]


@dataclass(eq=False)
class Block:
    """A block's captured graph: placeholders for what comes from outside, get_attr for its state.

    Origins in it are relative to `path`, the first module that is such a block.
    """

    path: str
    graph: Graph
    __name__: str = "block"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a block is placed and lowered before it runs")


@dataclass(eq=False)
class PlacedBlock:
    """A block for given placements of its inputs.

    border: for each placeholder of `graph`, which input it takes and in which placement.
    """

    block: Block
    graph: Graph
    border: list[tuple[int, Any]] = field(default_factory=list)
    __name__: str = "block"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a placed block is lowered before it runs")


def outline_blocks(graph: Graph, paths: set[str], regions: set[str]) -> Graph:
    """Replace each call of a module at `paths` by a call of a Block; equal ones share it.

    regions: paths of all modules that must become regions of their own; blocks that differ in those
    are not equal.
    """
    runs = _runs(graph, paths)
    known: dict[Any, Block] = {}
    for scope, nodes in runs:
        _outline(graph, scope, nodes, regions, known)
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    graph.lint()
    return graph


def _runs(graph: Graph, paths: set[str]) -> list[tuple[Scope, list[Node]]]:
    """Nodes of each block call, in order."""
    runs: dict[Scope, list[Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        scope = next((s for s in facts(node).scope if s.path in paths), None)
        if scope is not None:
            runs.setdefault(scope, []).append(node)
    return list(runs.items())


def _outline(
    graph: Graph, scope: Scope, nodes: list[Node], regions: set[str], known: dict[Any, Block]
) -> None:
    inside = set(nodes)
    prefix = f"{scope.path}."
    outer: list[Node] = []
    states: dict[Node, Origin] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            if used in inside or used in states or used in outer:
                continue
            own = _own_state(used, scope.path)
            if own is None:
                outer.append(used)
                if used.op == "get_attr" and nodes[0] < used:
                    nodes[0].prepend(used)  # it stands at its first use, inside
            else:
                states[used] = own
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    if any(not facts(n).single for n in outputs):
        return  # a tuple crosses the border: leave this call as it is
    nested = sorted(
        {
            s.path[len(prefix) :]
            for n in nodes
            for s in facts(n).scope
            if s.path.startswith(prefix) and s.path in regions
        }
    )
    key = _signature(nodes, outer, states, outputs, nested)
    if key not in known:
        known[key] = Block(scope.path, _copy(nodes, outer, states, outputs))
    first = facts(nodes[0])
    around = first.scope[: first.scope.index(scope)]
    with graph.inserting_before(nodes[0]):
        call = graph.call_function(known[key], tuple(outer))
        set_facts(
            call,
            Facts(
                tuple(facts(n).meta for n in outputs),
                scope=around,
                source=first.source,
                origin=Origin("block", scope.path, str(scope.call)),
                single=False,
            ),
        )
        for index, node in enumerate(outputs):
            item = graph.call_function(operator.getitem, (call, index))
            set_facts(item, Facts((facts(node).meta,), scope=around, source=facts(node).source))
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)


def _own_state(node: Node, path: str) -> Origin | None:
    """The origin of a parameter or buffer that belongs to the block, relative to it."""
    origin = facts(node).origin
    if node.op != "get_attr" or origin is None or origin.kind not in ("param", "buffer", "attr"):
        return None
    if origin.module != path and not origin.module.startswith(f"{path}."):
        return None
    return Origin(origin.kind, origin.module[len(path) :].lstrip("."), origin.name)


def _signature(
    nodes: list[Node],
    outer: list[Node],
    states: dict[Node, Origin],
    outputs: list[Node],
    nested: list[str],
) -> Any:
    numbers: dict[Node, str] = {node: f"%{i}" for i, node in enumerate(nodes)}
    numbers.update((node, f"in{i}") for i, node in enumerate(outer))
    numbers.update((node, f"state {origin}") for node, origin in states.items())
    rows = []
    for node in nodes:
        known = facts(node)
        args = exact((node.args, node.kwargs), numbers.__getitem__)
        rows.append((node.target, args, known.outs, known.single, known.random))
    metas: list[tuple[Meta, ...]] = [
        tuple(facts(n).meta for n in outer),
        tuple(facts(n).meta for n in states),
    ]
    return tuple(rows), tuple(metas), tuple(numbers[n] for n in outputs), tuple(nested)


def _copy(
    nodes: list[Node], outer: list[Node], states: dict[Node, Origin], outputs: list[Node]
) -> Graph:
    graph = Graph()
    made: dict[Node, Node] = {}
    for index, node in enumerate(outer):
        made[node] = graph.placeholder(f"in_{index}")
        set_facts(made[node], facts(node).having(origin=Origin("input", name=str(index)), scope=()))
    for node, origin in states.items():
        made[node] = graph.get_attr(f"{origin.module}.{origin.name}".lstrip("."))
        set_facts(made[node], facts(node).having(origin=origin))
    for node in nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
        set_facts(made[node], facts(node))
    output = graph.output(tuple(made[n] for n in outputs))
    set_facts(output, Facts(tuple(facts(n).meta for n in outputs), single=False))
    return graph
