"""What takes the wide results of a module that FSDP2 gathers runs inside of that module's call.

A final projection with its own `fully_shard` has its weights in its call alone. Logits then exist
for one tile only if the loss is made where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from ..capture.tap import Tap
from ..capture.targets import Opaque
from ..graph import Scope, facts
from ..lower import Collective, LoweredBlock
from .chains import WIDER, is_token_wise, members_of, unit_of
from .operands import local_bytes
from .order import in_order
from .tile import LEAST_BYTES

__all__ = ["absorb"]

Chain = tuple[Scope, ...]


def absorb(graph: Graph, regions: set[str], barred: set[str], tile: str | int) -> dict[Node, Chain]:
    """Put what takes wide results of regions behind what makes them, and nothing in between.

    Args:
        graph: a lowered program, not yet cut into regions; its operations are put in order.
        regions: paths of modules whose calls are. barred: those of them that are to stay as they
            are: what they hold runs again in backward.
        tile: "auto" (for large values only), "none" or tokens of a tile.

    Returns:
        operations that run inside of regions that they do not stand in, and which those are.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    within = {n: tuple(s for s in facts(n).scope if s.path in regions) for n in nodes}
    if tile == "none" or not any(within.values()):
        return {}
    least = 1 if isinstance(tile, int) else LEAST_BYTES
    moved: dict[Node, Chain] = {}
    for sizes in dict.fromkeys(s for s in map(is_token_wise, nodes) if s is not None):
        members = members_of(graph, sizes)
        wider = unit_of(graph, members, sizes) * WIDER
        if not wider:
            continue
        wide = [n for n in nodes if n in members and local_bytes(n) > wider]
        for chain in dict.fromkeys(within[n] for n in wide if within[n]):
            if any(scope.path in barred for scope in chain):
                continue
            given = [n for n in wide if within[n] == chain and local_bytes(n) >= least]
            taken = _followers(nodes, given, chain, within)
            inside = {n for n in nodes if within[n][: len(chain)] == chain or n in taken}
            if not taken or any(_leaves(n, inside) for n in wide if n in inside):
                continue
            tried = {**within, **dict.fromkeys(taken, chain)}
            ordered = _in_order(nodes, tried, 0)
            if ordered is not None:
                nodes, within = ordered, tried
                moved.update(dict.fromkeys(taken, chain))
    if moved:
        end = next(n for n in graph.nodes if n.op == "output")
        for node in nodes:
            end.prepend(node)
        graph.lint()
    return moved


def _followers(
    nodes: Sequence[Node], given: list[Node], chain: Chain, within: dict[Node, Chain]
) -> set[Node]:
    """What is made of these outside of their region, on a rank alone, and of nothing else that is
    made of what the region gives.
    """
    inside = {n for n in nodes if within[n][: len(chain)] == chain}
    after = set(inside)  # and all that is made of it
    taken: set[Node] = set()
    begun = set(given)
    for node in nodes:
        inputs = node.all_input_nodes
        if node in inside or not any(n in after for n in inputs):
            continue
        after.add(node)
        if not begun.isdisjoint(inputs) and _may_follow(node, chain, within[node]):
            if all(n not in after or n in inside or n in taken for n in inputs):
                taken.add(node)
                begun.add(node)
    return taken


def _may_follow(node: Node, chain: Chain, own: Chain) -> bool:
    target = node.target
    if chain[: len(own)] != own or facts(node).random or isinstance(target, LoweredBlock):
        return False
    if isinstance(target, Opaque) and isinstance(target.func, Tap):
        return False
    return not isinstance(target, Collective) or target.kind == "scale_grad"


def _leaves(node: Node, inside: set[Node]) -> bool:
    return any(user not in inside and user.op != "output" for user in node.users)


def _in_order(nodes: Iterable[Node], within: dict[Node, Chain], depth: int) -> list[Node] | None:
    """The nodes after what they take, a region's together; otherwise as they stand. None: no such
    order is there.
    """
    units: dict[Node | Scope, list[Node]] = {}
    unit_of: dict[Node, Node | Scope] = {}
    for node in nodes:
        chain = within[node]
        unit_of[node] = chain[depth] if len(chain) > depth else node
        units.setdefault(unit_of[node], []).append(node)
    takes = {
        unit: {unit_of[n] for node in group for n in node.all_input_nodes if n in unit_of} - {unit}
        for unit, group in units.items()
    }
    ordered: list[Node] = []
    for unit in in_order(takes):
        inner = [unit] if isinstance(unit, Node) else _in_order(units[unit], within, depth + 1)
        if inner is None:
            return None
        ordered += inner
    return ordered if len(ordered) == len(unit_of) else None
