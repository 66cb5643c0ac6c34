"""Cut a flat program into regions: one for each call of a module that must really be called, or
that is repeated.

A region is a graph of its own with the parameters first and then the values it takes; the program
around it calls it like any function. Equal regions print the same and share one compiled function.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ..graph import Facts, Origin, Scope, facts, set_facts

__all__ = ["Region", "cut_regions"]


@dataclass(eq=False)
class Region:
    """Part of the program. `graph`: placeholders for `states`, then for inputs; the output is
    always a tuple.
    """

    path: str
    scope: Scope | None
    graph: Graph = field(default_factory=Graph)
    states: list[Origin] = field(default_factory=list)
    children: list[Region] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)

    @property
    def __name__(self) -> str:
        return f"region {self.path}"

    def walk(self):
        yield self
        for child in self.children:
            yield from child.walk()

    def __call__(self, *args):
        raise AssertionError("a region is bound to a rank and a module before it runs")


def cut_regions(flat: Graph, paths: set[str]) -> Region:
    """Outline the calls of the modules at `paths` (nested ones too) from a flat lowered graph."""
    nodes = [n for n in flat.nodes if n.op not in ("placeholder", "get_attr", "output")]
    inputs = [n for n in flat.nodes if n.op == "placeholder"]
    output = next(n for n in flat.nodes if n.op == "output")
    results = list(output.args[0])  # type: ignore[arg-type]
    root = Region("", None)
    _fill(root, nodes, inputs, results, paths, 0)
    set_facts(next(n for n in root.graph.nodes if n.op == "output"), facts(output))
    return root


def _chain(node: Node, paths: set[str]) -> list[Scope]:
    return [scope for scope in facts(node).scope if scope.path in paths and scope.path]


def _fill(
    region: Region,
    nodes: list[Node],
    inputs: list[Node],
    results: list[Node],
    paths: set[str],
    depth: int,
) -> None:
    graph = region.graph
    made: dict[Node, Node] = {}
    region.inputs, region.outputs = inputs, results
    groups = _groups(nodes, paths, depth)
    inside = {n: scope for scope, group in groups for n in group if scope is not None}
    states: dict[Origin, Node] = {}
    for node in [*[n for scope, g in groups if scope is None for n in g], *_direct(results)]:
        for used in node.all_input_nodes if node.op == "call_function" else [node]:
            if used.op == "get_attr":
                origin = facts(used).origin
                assert origin is not None
                if origin not in states:
                    states[origin] = graph.placeholder(f"state_{len(states)}")
                    set_facts(states[origin], facts(used))
                made[used] = states[origin]
    region.states = list(states)
    for node in inputs:
        if node not in made:
            made[node] = graph.placeholder(node.name)
            set_facts(
                made[node], facts(node).having(origin=facts(node).origin if depth == 0 else None)
            )
    used_after = _used_outside(groups, results)
    for scope, group in groups:
        if scope is None:
            for node in group:
                made[node] = graph.node_copy(node, lambda n: made[n])
                set_facts(made[node], facts(node))
            continue
        own = set(group)
        takes = list(dict.fromkeys(
            u for n in group for u in n.all_input_nodes if u not in own and u.op != "get_attr"
        ))  # fmt: skip
        gives = [n for n in group if n in used_after[id(group)]]
        child = Region(scope.path, scope)
        _fill(child, group, takes, gives, paths, depth + 1)
        region.children.append(child)
        call = graph.call_function(child, tuple(made[t] for t in takes))
        set_facts(call, _joined(gives))
        for index, node in enumerate(gives):
            made[node] = graph.call_function(operator.getitem, (call, index))
            set_facts(made[node], facts(node).having(bytes=0, option=None, rule=None))
    assert all(n in made or n in inside for n in nodes), "every node belongs to a region"
    output = graph.output(tuple(made[r] for r in results))
    set_facts(output, _joined(results))
    graph.lint()


def _direct(results: list[Node]) -> list[Node]:
    return [r for r in results if r.op == "get_attr"]


def _groups(
    nodes: list[Node], paths: set[str], depth: int
) -> list[tuple[Scope | None, list[Node]]]:
    """Runs of nodes of this region itself (None) and of each region called inside it."""
    groups: list[tuple[Scope | None, list[Node]]] = []
    seen: set[Scope] = set()
    for node in nodes:
        chain = _chain(node, paths)
        scope = chain[depth] if len(chain) > depth else None
        if groups and groups[-1][0] == scope:
            groups[-1][1].append(node)
            continue
        assert scope is None or scope not in seen, f"the call of {scope} is not one run of nodes"
        if scope is not None:
            seen.add(scope)
        groups.append((scope, [node]))
    return groups


def _used_outside(
    groups: list[tuple[Scope | None, list[Node]]], results: list[Node]
) -> dict[int, set[Node]]:
    wanted = set(results)
    found = {}
    for _, group in groups:
        own = set(group)
        found[id(group)] = {
            n
            for n in group
            if n in wanted or any(user not in own for user in n.users if user.op != "output")
        }
    return found


def _joined(nodes: list[Node]) -> Facts:
    return Facts(
        tuple(facts(n).outs[0] for n in nodes),
        placements=tuple(facts(n).placement for n in nodes),
        homes=tuple(facts(n).home for n in nodes),
        single=False,
    )
