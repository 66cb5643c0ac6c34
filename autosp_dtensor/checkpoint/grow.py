"""Narrow token-wise operations beside a chain join it where backward then has less to hold."""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Node

from ..placement import Shard
from .kinds import is_product
from .operands import local_bytes, operands, placements_of

__all__ = ["grow", "join", "with_producers"]


def grow(nodes: set[Node], joining: set[Node]) -> set[Node]:
    """A chain with what makes its inputs and takes its outputs.

    An operation joins if the chain takes no more bytes by it, and nothing else its result. Products
    do not: a chain runs again in backward.

    Args:
        joining: the token-wise operations that may.
    """
    while True:
        grown = with_producers(nodes, joining)
        found = _after(grown, joining)
        if found is None:
            return grown
        nodes = grown | {found}


def join(chains: list[set[Node]], joining: set[Node]) -> list[set[Node]]:
    """Chains whose outputs only one other takes become part of that (a norm, of its MLP)."""
    chains = [set(chain) for chain in chains]
    again = True
    while again:
        again = False
        for first in chains:
            takers = {u for node in first for u in node.users} - first
            into = next((c for c in chains if c is not first and takers and takers <= c), None)
            if (
                into is not None
                and first <= joining
                and _input_bytes(first | into) <= max(_input_bytes(into), 1)
            ):
                into |= first
                chains.remove(first)
                again = True
                break
    return chains


def parts_of(node: Node) -> set[Node]:
    """What an operation takes by tokens."""
    return {
        each
        for each, placed in zip(operands(node), placements_of(node), strict=True)
        if each is not None and isinstance(placed, Shard)
    }


def _inputs(nodes: Iterable[Node]) -> set[Node]:
    nodes = set(nodes)
    return {each for node in nodes for each in parts_of(node)} - nodes


def _input_bytes(nodes: set[Node]) -> int:
    return sum(map(local_bytes, _inputs(nodes)))


def with_producers(nodes: set[Node], joining: set[Node]) -> set[Node]:
    """With what its inputs are made of, as far back as that takes the fewest bytes (a norm takes
    its input and a statistic of it, which is made of its input).
    """
    best, least = set(nodes), _input_bytes(nodes)
    tried = set(nodes)
    while True:
        inputs = sorted(_inputs(tried) & joining, reverse=True)
        found = next((n for n in inputs if not is_product(n) and {*n.users} <= tried), None)
        if found is None:
            return best
        tried.add(found)
        if (now := _input_bytes(tried)) <= least:
            best, least = set(tried), now


def _after(nodes: set[Node], joining: set[Node]) -> Node | None:
    inputs = _inputs(nodes)
    for node in nodes:
        outside = [user for user in node.users if user not in nodes]
        if len(outside) != 1 or outside[0] not in joining or is_product(outside[0]):
            continue
        if parts_of(outside[0]) <= nodes | inputs and local_bytes(outside[0]) <= local_bytes(node):
            return outside[0]
    return None
