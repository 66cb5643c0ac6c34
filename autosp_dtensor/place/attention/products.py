"""Batched products of matrices, however they are spelled: matmul, bmm, einsum, baddbmm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ...capture.targets import UnderAutocast
from ...graph import facts, set_facts, short_name
from ..insert import add_call, bind

__all__ = [
    "Product",
    "Terms",
    "as_product",
    "einsum_terms",
    "permuted",
    "split_baddbmm",
    "transposed_from",
]

_bmm = torch.ops.aten.bmm.default


@dataclass(frozen=True)
class Product:
    """left [batch.., m, k] times right [batch.., k, n], up to the order of their dims.

    orders: of left as [batch.., m, k], of right as [batch.., n, k], of the result as
    [batch.., m, n], as permutations of the dims that the node has; all None for matmul.
    """

    node: Node
    left: Node
    right: Node
    orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the result is [batch.., m, n] as it stands."""
        return self.orders is None or self.orders[2] == tuple(range(len(self.orders[2])))

    def left_last(self, graph: Graph) -> Node:
        """left as [batch.., m, k]."""
        return self.left if self.orders is None else permuted(graph, self.left, self.orders[0])

    def right_last(self, graph: Graph) -> Node:
        """right as [batch.., n, k]: keys, not their transpose."""
        if self.orders is not None:
            return permuted(graph, self.right, self.orders[1])
        source = transposed_from(self.right)
        if source is not None:
            return source
        rank = len(facts(self.right).meta.shape)
        return permuted(graph, self.right, (*range(rank - 2), rank - 1, rank - 2))

    def right_rows(self, graph: Graph) -> Node:
        """right as [batch.., k, n]: values."""
        if self.orders is None:
            return self.right
        *batch, n, k = self.orders[1]
        return permuted(graph, self.right, (*batch, k, n))

    def in_order(self, graph: Graph, result: Node) -> Node:
        """[batch.., m, n] in the order of dims that the node has."""
        if self.is_plain:
            return result
        assert self.orders is not None
        back = sorted(range(len(self.orders[2])), key=lambda d: self.orders[2][d])  # type: ignore[index]
        return permuted(graph, result, tuple(back))


def as_product(node: Any) -> Product | None:
    """The node as a batched product; None where it is none."""
    if not isinstance(node, Node) or node.op != "call_function" or node.kwargs:
        return None
    if isinstance(node.target, UnderAutocast):
        return None
    name = short_name(node.target)
    if name in ("matmul", "bmm") and len(node.args) == 2:
        left, right = node.args
        if not isinstance(left, Node) or not isinstance(right, Node):
            return None
        ranks = {len(facts(left).meta.shape), len(facts(right).meta.shape)}
        return Product(node, left, right) if ranks in ({3}, {4}) else None
    return _einsum(node) if name == "einsum" else None


@dataclass(frozen=True)
class Terms:
    """A product written as letters: left's dims, right's dims and the result's."""

    left: Node
    right: Node
    a: str
    b: str
    out: str


def einsum_terms(node: Node) -> Terms | None:
    """einsum of two tensors, each letter once in each; None for anything else."""
    if short_name(node.target) != "einsum" or node.kwargs:
        return None
    if isinstance(node.target, UnderAutocast):
        return None
    flat = node.args[1:] if len(node.args) != 2 else node.args[1]
    operands: list[Any] = list(flat) if isinstance(flat, (tuple, list)) else [flat]
    text = node.args[0]
    if not isinstance(text, str) or len(operands) != 2:
        return None
    left, right = operands
    sides, arrow, out = text.replace(" ", "").partition("->")
    a, comma, b = sides.partition(",")
    if not arrow or not comma or not all(isinstance(x, Node) for x in operands):
        return None
    if not all(len(set(x)) == len(x) and x.isalpha() for x in (a, b, out)):
        return None
    return Terms(left, right, a, b, out)


def _einsum(node: Node) -> Product | None:
    """bhqd,bhkd->bhqk and its like: letters shared by all, and one each of m, n and k."""
    terms = einsum_terms(node)
    if terms is None:
        return None
    left, right, a, b, out = terms.left, terms.right, terms.a, terms.b, terms.out
    batch = [x for x in out if x in a and x in b]
    m = [x for x in a if x in out and x not in b]
    n = [x for x in b if x in out and x not in a]
    k = [x for x in a if x in b and x not in out]
    known = len(batch) + 2
    if [len(x) for x in (m, n, k)] != [1, 1, 1] or {len(a), len(b), len(out)} != {known}:
        return None
    if known not in (3, 4):
        return None

    def order(have: str, want: list[str]) -> tuple[int, ...]:
        return tuple(have.index(x) for x in want)

    orders = order(a, [*batch, *m, *k]), order(b, [*batch, *n, *k]), order(out, [*batch, *m, *n])
    return Product(node, left, right, orders)


def transposed_from(node: Node) -> Node | None:
    """x, where the node is x with its last two dims exchanged."""
    name = short_name(node.target)
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return None
    rank = len(facts(node).meta.shape)
    if name in ("transpose", "swapaxes", "swapdims") and len(node.args) == 3:
        dims = {d % rank for d in node.args[1:] if isinstance(d, int)}
        return node.args[0] if dims == {rank - 2, rank - 1} else None
    return node.args[0] if name == "mT" else None


def permuted(graph: Graph, node: Node, order: tuple[int, ...]) -> Node:
    """The node with its dims in this order."""
    if order == tuple(range(len(order))):
        return node
    made = graph.call_function(torch.Tensor.permute, (node, order))
    known = facts(node)
    meta = replace(known.meta, shape=tuple(known.meta.shape[d] for d in order))
    set_facts(made, replace(known, outs=(meta,), origin=None, aten=(), random=False))
    return made


def split_baddbmm(graph: Graph) -> None:
    """baddbmm(x, a, b, beta, alpha) becomes beta * x + alpha * bmm(a, b)."""
    for node in list(graph.nodes):
        if node.op != "call_function" or short_name(node.target) != "baddbmm":
            continue
        given = bind(node, ("input", "batch1", "batch2"))
        alpha, beta = given.get("alpha", 1), given.get("beta", 1)
        if isinstance(node.target, UnderAutocast):
            continue
        meta = facts(node).meta
        with graph.inserting_before(node):
            factors = given["batch1"], given["batch2"]
            total = add_call(graph, node, torch.bmm, factors, {}, meta, (_bmm,))
            total = _scaled(graph, total, alpha)
            if beta != 0:
                term = _scaled(graph, given["input"], beta)
                add = torch.ops.aten.add.Tensor
                total = add_call(graph, node, torch.add, (total, term), {}, meta, (add,))
        node.replace_all_uses_with(total)
        graph.erase_node(node)


def _scaled(graph: Graph, node: Node, factor: Any) -> Node:
    if factor == 1:
        return node
    aten = (torch.ops.aten.mul.Tensor,)
    return add_call(graph, node, torch.mul, (node, factor), {}, facts(node).meta, aten)
