"""Cut a lowered program into regions: calls of modules that must really be called, or repeat.

A region is a graph of its own with the parameters first and then the values it takes; the program
around it calls it like any function. A block that is repeated is one region with many calls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..graph import Facts, Origin, Scope, facts, result_nodes, set_facts

__all__ = ["Call", "LoweredBlock", "Region", "cut_regions"]


@dataclass(eq=False)
class LoweredBlock:
    """The local graph of a repeated block; `path` is the first module that is one."""

    path: str
    graph: Graph
    __name__: str = "block"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a block is cut into a region before it runs")


@dataclass(eq=False)
class Region:
    """A graph: placeholders for `states`, then for inputs; the output is always a tuple."""

    graph: Graph = field(default_factory=Graph)
    states: list[Origin] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def walk(self, base: str = "") -> Iterator[tuple[str, Region]]:
        """(module path, region) of this one and of every call inside it, repeated ones too."""
        yield base, self
        for call in self.calls:
            yield from call.region.walk(_join(base, call.path))


@dataclass(eq=False)
class Call:
    """A call of a region, as a node's target.

    path: the module, relative to the region around. number: which call of the trace it is. rebased:
    the region's states are relative to `path` (a repeated block), not to the region around.
    """

    region: Region
    path: str
    number: int
    rebased: bool
    __name__: str = "region"

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a region is bound to a rank and a module before it runs")


def cut_regions(
    graph: Graph, paths: set[str], moved: Mapping[Node, tuple[Scope, ...]] | None = None
) -> Region:
    """Outline the calls of the modules at `paths` (nested ones too) from a lowered graph.

    moved: operations that run in other calls than they stand in.
    """
    return _Cutter(paths, moved or {}).region(graph, "")


class _Cutter:
    def __init__(self, paths: set[str], moved: Mapping[Node, tuple[Scope, ...]]) -> None:
        self.paths, self.moved = paths, moved
        self.blocks: dict[LoweredBlock, Region] = {}

    def region(self, graph: Graph, inside: str) -> Region:
        """The region of a whole graph; `inside`: the module that the graph is the block of."""
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        output = next(n for n in graph.nodes if n.op == "output")
        region = Region()
        self._fill(region, nodes, inputs, list(result_nodes(output)), inside, 0)
        return region

    def _chain(self, node: Node, inside: str) -> list[Scope]:
        """The regions that a node stands in, from the outside in."""
        return [
            scope
            for scope in self.moved.get(node, facts(node).scope)
            if scope.path in self.paths and (not inside or scope.path.startswith(f"{inside}."))
        ]

    def _fill(
        self,
        region: Region,
        nodes: list[Node],
        inputs: list[Node],
        results: list[Node],
        inside: str,
        depth: int,
    ) -> None:
        graph = region.graph
        made: dict[Node, Node] = {}
        groups = self._groups(nodes, inside, depth)
        own = [n for scope, group in groups if scope is None for n in group]
        _take_states(region, own, results, made)
        for node in inputs:
            made[node] = graph.placeholder(node.name)
            set_facts(made[node], facts(node))
        for scope, group in groups:
            if scope is None:
                for node in group:
                    self._copy(region, node, made)
            else:
                self._cut(region, scope, group, results, made, inside, depth)
        output = graph.output(tuple(made[r] for r in results))
        set_facts(output, _joined(results))
        graph.lint()

    def _copy(self, region: Region, node: Node, made: dict[Node, Node]) -> None:
        target = node.target
        made[node] = region.graph.node_copy(node, lambda n: made[n])
        set_facts(made[node], facts(node))
        if not isinstance(target, LoweredBlock):
            return
        if target not in self.blocks:
            self.blocks[target] = self.region(target.graph, target.path)
        origin = facts(node).origin
        assert origin is not None
        call = Call(self.blocks[target], origin.module, int(origin.name), rebased=True)
        region.calls.append(call)
        made[node].target = call

    def _cut(
        self,
        region: Region,
        scope: Scope,
        group: list[Node],
        results: list[Node],
        made: dict[Node, Node],
        inside: str,
        depth: int,
    ) -> None:
        members = set(group)
        takes = list(dict.fromkeys(
            u for n in group for u in n.all_input_nodes if u not in members and u.op != "get_attr"
        ))  # fmt: skip
        gives = [n for n in group if n in results or any(_is_outside(u, members) for u in n.users)]
        child = Region()
        self._fill(child, group, takes, gives, inside, depth + 1)
        relative = scope.path[len(inside) :].lstrip(".") if inside else scope.path
        call = Call(child, relative, scope.call, rebased=False)
        region.calls.append(call)
        node = region.graph.call_function(call, tuple(made[t] for t in takes))
        set_facts(node, _joined(gives))
        for index, each in enumerate(gives):
            made[each] = region.graph.call_function(operator.getitem, (node, index))
            set_facts(made[each], facts(each).having(bytes=0, option=None, rule=None))

    def _groups(
        self, nodes: list[Node], inside: str, depth: int
    ) -> list[tuple[Scope | None, list[Node]]]:
        """Runs of nodes of this region itself (None) and of each region called inside it."""
        groups: list[tuple[Scope | None, list[Node]]] = []
        seen: set[Scope] = set()
        for node in nodes:
            chain = self._chain(node, inside)
            scope = chain[depth] if len(chain) > depth else None
            if groups and groups[-1][0] == scope:
                groups[-1][1].append(node)
                continue
            assert scope is None or scope not in seen, f"the call of {scope} is not one run"
            if scope is not None:
                seen.add(scope)
            groups.append((scope, [node]))
        return groups


def _take_states(
    region: Region, own: list[Node], results: list[Node], made: dict[Node, Node]
) -> None:
    """Placeholders for the parameters, buffers and constants that the region itself uses."""
    states: dict[Origin, Node] = {}
    used = [u for n in own for u in n.all_input_nodes if u.op == "get_attr"]
    for node in [*used, *(r for r in results if r.op == "get_attr")]:
        origin = facts(node).origin
        assert origin is not None
        if origin not in states:
            states[origin] = region.graph.placeholder(f"state_{len(states)}")
            set_facts(states[origin], facts(node))
        made[node] = states[origin]
    region.states = list(states)


def _is_outside(user: Node, members: set[Node]) -> bool:
    return user not in members and user.op != "output"


def _joined(nodes: list[Node]) -> Facts:
    return Facts(
        tuple(facts(n).outs[0] for n in nodes),
        placements=tuple(facts(n).placement for n in nodes),
        homes=tuple(facts(n).home for n in nodes),
        single=False,
    )


def _join(base: str, path: str) -> str:
    return f"{base}.{path}" if base and path else base or path
