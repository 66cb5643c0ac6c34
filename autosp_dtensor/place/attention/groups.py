"""Attention by hand over grouped heads, [B, Hkv, group, S, T], as one over heads [B, H, S, T]; and
over one key head that has no dim of its own, bqhd,bsd->bhqs, as one over heads that share it.

What lies between its two products treats each score by itself, softmax aside, so that two of its
dims are one as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ...capture.targets import UnderAutocast
from ...graph import Meta, facts, set_facts, short_name
from ..insert import add_call
from ..rules.pointwise import RULES, is_pointwise
from .products import einsum_terms, permuted, transposed_from

__all__ = ["merge_groups"]


@dataclass(frozen=True)
class _Grouped:
    """left [B, Hkv, group, S, k] times right [B, Hkv, 1 or group, T, k], or [.., k, n] for values.

    left, right: nodes and the order that makes them so; a right without groups has four dims.
    order: of the result [B, Hkv, group, m, n], as a permutation of the node's dims.
    """

    node: Node
    left: Node
    left_order: tuple[int, ...]
    right: Node
    right_order: tuple[int, ...]
    order: tuple[int, ...]


def merge_groups(graph: Graph) -> None:
    """Rewrite each attention whose scores have five dims, two of them heads, or whose keys have no
    dim of heads."""
    for node in list(graph.nodes):
        if node.op != "call_function" or len(facts(node).outs) != 1:
            continue
        first = _scores(node) if len(facts(node).meta.shape) == 5 else _scores_of_one(node)
        chain = None if first is None else _chain(node)
        if first is None or chain is None:
            continue
        if len(facts(node).meta.shape) == 4:
            last = _weighted_of_one(chain[-1], chain[-2])
            if last is not None:
                _rewrite_one(graph, first, last)
        elif (last := _weighted(chain[-1], chain[-2])) is not None:
            _rewrite(graph, first, chain[:-1], last)


def _scores(node: Node) -> _Grouped | None:
    """bqkgd,bskd->bkgqs, or matmul of [B, Hkv, group, S, D] and [B, Hkv, 1, D, T]."""
    terms = einsum_terms(node)
    if terms is None:
        found = _matmul(node)
        if found is None:
            return None
        source = transposed_from(found.right)
        if source is not None:
            return replace(found, right=source)
        return replace(found, right_order=(0, 1, 2, 4, 3))
    b, kv, group, m, n = terms.out
    inner = [x for x in terms.a if x not in terms.out]
    if {*terms.a} != {b, kv, group, m, *inner} or len(inner) != 1 or n in terms.a:
        return None
    if {*terms.b} - {group} != {b, kv, n, *inner}:
        return None
    shared = [b, kv, group, n] if group in terms.b else [b, kv, n]
    left = tuple(terms.a.index(x) for x in (b, kv, group, m, *inner))
    right = tuple(terms.b.index(x) for x in (*shared, *inner))
    return _Grouped(node, terms.left, left, terms.right, right, (0, 1, 2, 3, 4))


def _scores_of_one(node: Node) -> _Grouped | None:
    """bqhd,bsd->bhqs."""
    terms = einsum_terms(node)
    if terms is None or len(terms.out) != 4 or len(terms.b) != 3:
        return None
    b, head, m, n = terms.out
    inner = [x for x in terms.a if x not in terms.out]
    if {*terms.a} != {b, head, m, *inner} or {*terms.b} != {b, n, *inner} or len(inner) != 1:
        return None
    left = tuple(terms.a.index(x) for x in (b, head, m, *inner))
    right = tuple(terms.b.index(x) for x in (b, n, *inner))
    return _Grouped(node, terms.left, left, terms.right, right, (0, 1, 2, 3))


def _weighted_of_one(node: Node, weights: Node) -> _Grouped | None:
    """bhqs,bsd->bqhd."""
    terms = einsum_terms(node)
    if terms is None or terms.left is not weights or len(terms.out) != 4 or len(terms.b) != 3:
        return None
    b, head, m, t = terms.a
    wide = [x for x in terms.b if x not in terms.a]
    if len(wide) != 1 or {*terms.b} != {b, t, *wide} or {*terms.out} != {b, head, m, *wide}:
        return None
    right = tuple(terms.b.index(x) for x in (b, t, *wide))
    order = tuple(terms.out.index(x) for x in (b, head, m, *wide))
    return _Grouped(node, weights, (0, 1, 2, 3), terms.right, right, order)


def _weighted(node: Node, weights: Node) -> _Grouped | None:
    """bkgqs,bskd->bqkgd, or matmul of [B, Hkv, group, S, T] and [B, Hkv, 1, T, E]."""
    terms = einsum_terms(node)
    if terms is None:
        found = _matmul(node)
        return found if found is not None and found.left is weights else None
    if terms.left is not weights or len(terms.a) != 5 or len(terms.out) != 5:
        return None
    b, kv, group, m, t = terms.a
    wide = [x for x in terms.b if x not in terms.a]
    if len(wide) != 1 or {*terms.out} != {b, kv, group, m, *wide}:
        return None
    if {*terms.b} - {group} != {b, kv, t, *wide}:
        return None
    shared = [b, kv, group, t] if group in terms.b else [b, kv, t]
    right = tuple(terms.b.index(x) for x in (*shared, *wide))
    order = tuple(terms.out.index(x) for x in (b, kv, group, m, *wide))
    return _Grouped(node, weights, (0, 1, 2, 3, 4), terms.right, right, order)


def _matmul(node: Node) -> _Grouped | None:
    if short_name(node.target) != "matmul" or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    a, b = facts(left).meta.shape, facts(right).meta.shape
    if isinstance(node.target, UnderAutocast) or len(a) != 5 or len(b) != 5 or a[:2] != b[:2]:
        return None
    if b[2] not in (1, a[2]):
        return None
    plain = (0, 1, 2, 3, 4)
    return _Grouped(node, left, plain, right, plain, plain)


def _chain(scores: Node) -> list[Node] | None:
    """What is made of scores by element, softmax over keys among it, and at last the product."""
    shape = facts(scores).meta.shape
    found, ends = {scores}, []
    softmaxes = 0
    for node in _later(scores):
        if not any(each in found for each in node.all_input_nodes):
            continue
        if _is_softmax(node):
            softmaxes += 1
        elif node.op == "output" or not _by_element(node, shape):
            ends.append(node)
            continue
        found.add(node)
    if softmaxes != 1 or len(ends) != 1 or ends[0].op != "call_function":
        return None
    order = [node for node in [scores, *_later(scores)] if node in found]
    return [*order, ends[0]] if len(order) > 1 else None


def _later(node: Node) -> list[Node]:
    """Users of a node and of those, in order."""
    rank = len(facts(node).meta.shape)
    seen: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen.add(user)
                if len(facts(user).outs) == 1 and len(facts(user).meta.shape) == rank:
                    todo.append(user)
    return sorted(seen)


def _is_softmax(node: Node) -> bool:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    last = len(facts(node).meta.shape) - 1
    return short_name(node.target) == "softmax" and dim in (-1, last)


def _by_element(node: Node, shape: tuple[int, ...]) -> bool:
    known = facts(node)
    if node.op != "call_function" or not known.single or known.meta.shape != shape:
        return False
    if isinstance(node.target, UnderAutocast):
        return False
    ranks = [len(facts(each).meta.shape) for each in node.all_input_nodes]
    named = short_name(node.target) in RULES
    return max(ranks) <= 5 and (named or is_pointwise(node.target, known.aten))


def _rewrite(graph: Graph, first: _Grouped, chain: list[Node], last: _Grouped) -> None:
    _, kv, group, _, _ = facts(first.node).meta.shape
    with graph.inserting_before(last.node):
        merger = _Merger(graph, last.node, kv, group)
        query = merger.heads(permuted(graph, first.left, first.left_order))
        keys = merger.keys(first)
        made = {chain[0]: merger.product(first.node, query, merger.transposed(keys))}
        for node in chain[1:]:
            made[node] = merger.again(node, made)
        out = merger.product(last.node, made[last.left], merger.keys(last))
        b, _, m, n = facts(out).meta.shape
        wide = merger.reshaped(out, (b, kv, group, m, n))
        back = sorted(range(5), key=lambda dim: last.order[dim])
        last.node.replace_all_uses_with(permuted(graph, wide, tuple(back)))
    for node in [last.node, *reversed(chain)]:
        graph.erase_node(node)


def _rewrite_one(graph: Graph, first: _Grouped, last: _Grouped) -> None:
    for product in (first, last):
        with graph.inserting_before(product.node):
            merger = _Merger(graph, product.node, 1, 1)
            left = permuted(graph, product.left, product.left_order)
            right = permuted(graph, product.right, product.right_order)
            b, t, k = facts(right).meta.shape
            right = merger.reshaped(right, (b, 1, t, k))
            if product is first:
                right = merger.transposed(right)
            out = merger.product(product.node, left, right)
            back = sorted(range(4), key=lambda dim: product.order[dim])
            product.node.replace_all_uses_with(permuted(graph, out, tuple(back)))
        graph.erase_node(product.node)


@dataclass(frozen=True)
class _Merger:
    """Dims 1 and 2 of five as one of four."""

    graph: Graph
    at: Node
    kv: int
    group: int

    def call(self, target: Any, args: tuple[Any, ...], meta: Meta, *aten: Any) -> Node:
        return add_call(self.graph, self.at, target, args, {}, meta, aten)

    def transposed(self, node: Node) -> Node:
        *lead, m, n = facts(node).meta.shape
        meta = replace(facts(node).meta, shape=(*lead, n, m))
        return self.call(torch.transpose, (node, -2, -1), meta)

    def reshaped(self, node: Node, shape: tuple[int, ...]) -> Node:
        meta = replace(facts(node).meta, shape=shape)
        return self.call(torch.reshape, (node, shape), meta)

    def heads(self, node: Node) -> Node:
        b, kv, group, m, n = facts(node).meta.shape
        return self.reshaped(node, (b, kv * group, m, n))

    def keys(self, product: _Grouped) -> Node:
        """Each key head for all of its group: `share_key_heads` finds it so."""
        node = permuted(self.graph, product.right, product.right_order)
        shape = facts(node).meta.shape
        if len(shape) == 5 and shape[2] == self.group:
            return self.heads(node)
        if len(shape) == 5:
            node = self.reshaped(node, (*shape[:2], *shape[3:]))
        return self.repeated(node)

    def repeated(self, node: Node) -> Node:
        b, kv, m, n = facts(node).meta.shape
        if self.group == 1:
            return node
        meta = replace(facts(node).meta, shape=(b, kv * self.group, m, n))
        return self.call(torch.repeat_interleave, (node, self.group, 1), meta)

    def product(self, like: Node, left: Node, right: Node) -> Node:
        (*lead, m, _), n = facts(left).meta.shape, facts(right).meta.shape[-1]
        meta = replace(facts(like).meta, shape=(*lead, m, n))
        return self.call(torch.matmul, (left, right), meta, torch.ops.aten.bmm.default)

    def again(self, node: Node, made: dict[Node, Node]) -> Node:
        """The same call on merged heads."""

        def merged(value: Any) -> Any:
            return made.get(value) or self.merged(value) if isinstance(value, Node) else value

        given: tuple[Any, ...] = node.args
        args, kwargs = map_aggregate((given, node.kwargs), merged)
        if _is_softmax(node):
            args, kwargs = (args[0], -1), {k: v for k, v in kwargs.items() if k != "dim"}
        again = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        shape = facts(next(iter(made.values()))).meta.shape
        set_facts(again, replace(facts(node), outs=(replace(facts(node).meta, shape=shape),)))
        return again

    def merged(self, node: Node) -> Node:
        """What is broadcast to scores, with one dim of heads."""
        shape = facts(node).meta.shape
        if len(shape) < 3 or (len(shape) == 3 and shape[0] == 1):
            return node
        b, kv, group, m, n = (1,) * (5 - len(shape)) + shape
        if kv == group == 1 or (kv, group) == (self.kv, self.group):
            return self.reshaped(node, (b, kv * group, m, n))
        if group == 1:
            return self.repeated(self.reshaped(node, (b, kv, m, n)))
        meta: Meta = replace(facts(node).meta, shape=(b, self.kv, group, m, n))
        wide = self.reshaped(node, (b, 1, group, m, n))
        return self.heads(self.call(torch.Tensor.expand, (wide, -1, self.kv, -1, -1, -1), meta))
