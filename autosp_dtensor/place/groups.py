"""Attention by groups of heads: projection, exchange and kernel go through some at a time.

Heads know nothing of each other, from the rows of the projections' weights to attention's result. A
group is a rank of a shorter axis: what a rule makes of an operation on n ranks' heads it makes on
those of n groups, so nothing here names an operation. The graph computes the same values with calls
of a group each; a group begins when the one before the last is done, so that queries, keys and
values of all heads never stand there together, and backward has those of each group again when it
comes to it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import Facts, Meta, Scope, arg, facts, set_facts
from ..placement import Placement, Replicate, Shard
from .attention import AttentionRule
from .insert import add_call
from .rule import Local, Option, Slot, bound, fill, local_shape, op_of
from .rules.tap import TapRule
from .table import find_rule

__all__ = ["LEAST_GROUP", "in_groups"]

# What queries, keys and values of a group take at least on a rank: a product or an exchange of this
# much takes as long as its share of a larger one.
LEAST_GROUP = 96 << 20


def in_groups(graph: Graph, axis_size: int, least: int, borders: frozenset[str]) -> Graph | None:
    """A canonical graph whose attention goes by groups of heads; None where none would.

    Args:
        axis_size: ranks of the sp axis. A group has the same number of key heads on each of them.
        least: bytes that queries, keys and values of a group take at least on a rank.
        borders: paths of modules whose calls are blocks or regions: no group crosses one.
    """
    if all(_count(node, axis_size, least) == 1 for node in graph.nodes):
        return None
    copied = Graph()
    output = copied.output(copied.graph_copy(graph, {}))
    set_facts(output, facts(next(node for node in graph.nodes if node.op == "output")))
    _drop_dead(copied)  # what a rewrite left behind takes keys and values, too
    counts = {node: _count(node, axis_size, least) for node in copied.nodes}
    counts = {node: count for node, count in counts.items() if count > 1}
    for number, (node, count) in enumerate(counts.items()):
        _split(copied, node, count, number, borders)
    _drop_dead(copied)
    copied.lint()
    return copied


def _drop_dead(graph: Graph) -> None:
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))


def _count(node: Node, axis_size: int, least: int) -> int:
    """How many groups an operation goes by; 1 for what is no attention of heads."""
    known = facts(node)
    if node.op != "call_function" or known.random or not known.meta.requires_grad:
        return 1  # what is drawn for some heads at a time would be other numbers
    op, _ = op_of(node, axis_size)
    rule = find_rule(op.target, op.name, known)
    if not isinstance(rule, AttentionRule):
        return 1
    form, heads = rule.form(op), rule.heads(op)
    if form.own or not op.single or not heads:
        return 1
    each, more = divmod(heads // form.group, axis_size)
    taken = sum(meta.nbytes for meta in op.ins[:3]) // axis_size
    counts = [n for n in range(1, each + 1) if each % n == 0 and taken // n >= least]
    return max(counts, default=1) if not more else 1


@dataclass(frozen=True)
class _Member:
    """An operation that goes by groups: its tensors, where they are cut, and a group's call."""

    tensors: tuple[Node, ...]
    option: Option
    local: Local


def _split(graph: Graph, node: Node, count: int, number: int, borders: frozenset[str]) -> None:
    """Replace one attention, with what makes its heads and what only moves its result's dims."""
    attention = _attention(node, count)
    if attention is None:
        return
    chain = _before(graph, node, attention, count, borders)
    after = _after(node, attention, count, borders)
    last = next(reversed(after), node)
    parts: dict[tuple[Node, Shard], list[Node]] = {}
    results: list[Node] = []
    with graph.inserting_before(node):
        for group in range(count):
            made: dict[Node, Node] = {}
            turn = (number, group)
            for each, member in (*chain.items(), (node, attention), *after.items()):
                taken = [
                    made[t] if t in made else _part(graph, node, parts, t, placed, turn)
                    for t, placed in zip(member.tensors, member.option.ins, strict=True)
                ]
                made[each] = _call(graph, each, member, taken, group)
                known = facts(made[each])
                note = f"heads {group + 1} of {count}" if each is node else ""
                notes = ", ".join(text for text in (known.note, note) if text)
                set_facts(made[each], known.having(turn=turn, note=notes))
            results.append(made[last])
        shard = (after[last] if after else attention).option.outs[0]
        assert isinstance(shard, Shard)
        whole = add_call(
            graph, last, torch.cat, (results, shard.dim), {}, facts(last).meta,
            (torch.ops.aten.cat.default,),
        )  # fmt: skip
    set_facts(whole, facts(whole).having(note=""))
    last.replace_all_uses_with(whole)
    for each in (*reversed(after), node, *reversed(chain)):
        graph.erase_node(each)


def _part(
    graph: Graph,
    like: Node,
    parts: dict[tuple[Node, Shard], list[Node]],
    tensor: Node,
    placed: Any,
    turn: tuple[int, int],
) -> Node:
    """A group's part of a tensor that is there for all of them."""
    if not isinstance(placed, Shard):
        return tensor
    if (tensor, placed) not in parts:
        known = facts(tensor)
        metas = [_meta(known.meta, placed, k) for k in range(len(placed.sizes))]
        cut = add_call(
            graph, like, torch.split, (tensor, placed.sizes[0], placed.dim), {}, metas[0],
            (torch.ops.aten.split.Tensor,),
        )  # fmt: skip
        set_facts(cut, facts(cut).having(outs=tuple(metas), single=False, note=""))
        found = parts[tensor, placed] = []
        for k, meta in enumerate(metas):
            found.append(add_call(graph, cut, operator.getitem, (cut, k), {}, meta))
            set_facts(found[k], facts(found[k]).having(turn=(turn[0], k)))
    return parts[tensor, placed][turn[1]]


def _call(graph: Graph, like: Node, member: _Member, tensors: list[Node], group: int) -> Node:
    local, known = member.local, facts(like)
    args = bound(fill(local.args, tensors), group)
    kwargs = bound(fill(dict(local.kwargs), tensors), group)
    pairs = zip(known.outs, member.option.outs, strict=True)
    outs = tuple(_meta(meta, placed, group) for meta, placed in pairs)
    made = add_call(graph, like, local.target, args, kwargs, outs[0], known.aten)
    set_facts(made, facts(made).having(outs=outs, single=known.single))
    return made


def _meta(meta: Meta, placed: Placement, group: int) -> Meta:
    return replace(meta, shape=bound(local_shape(meta, placed), group))


def _attention(node: Node, count: int) -> _Member | None:
    """The call of a group, if it is the same call on fewer heads."""
    op, tensors = op_of(node, count)
    rule = find_rule(op.target, op.name, facts(node))
    assert isinstance(rule, AttentionRule)
    option = next(iter(rule.fresh(op)), None)
    if option is None or not _is_even(option):
        return None
    local = rule.localize(op, option)
    same = local.target is op.target and local.args == op.args and local.kwargs == op.kwargs
    return _Member(tensors, option, local) if same else None


def _before(
    graph: Graph, end: Node, attention: _Member, count: int, borders: frozenset[str]
) -> dict[Node, _Member]:
    """What makes queries, keys and values and can go by groups with them, in order: all that takes
    it does, and asks for the same heads."""
    wanted: dict[Node, list[tuple[Node, Any]]] = {}
    found: dict[Node, _Member] = {}

    def ask(user: Node, member: _Member) -> None:
        for tensor, placed in zip(member.tensors, member.option.ins, strict=True):
            wanted.setdefault(tensor, []).append((user, placed))

    ask(end, attention)
    within = _borders(facts(end), borders)
    nodes = list(graph.nodes)
    for node in reversed(nodes[: nodes.index(end)]):
        member = None
        if _borders(facts(node), borders) == within:
            member = _asked_for(node, wanted.get(node, []), count)
        if member is not None:
            found[node] = member
            ask(node, member)
        elif not facts(node).single:
            for user in node.users:  # its results are there for all groups
                found.pop(user, None)
    return dict(reversed(found.items()))


def _asked_for(node: Node, asked: list[tuple[Node, Any]], count: int) -> _Member | None:
    """asked: who takes an operation's result by groups, and which heads of it."""
    shards = {placed for _, placed in asked}
    if len(shards) != 1 or {user for user, _ in asked} != {*node.users}:
        return None
    (shard,) = shards
    if not isinstance(shard, Shard):
        return None
    if _is_result(node):
        local = Local(operator.getitem, (Slot(0), node.args[1]))
        return _Member((arg(node, 0),), Option((shard,), (shard,)), local)
    member = _member(node, count, lambda rule, op: rule.from_output(op, shard))
    return member if member is not None and {*member.option.outs} == {shard} else None


def _is_result(node: Node) -> bool:
    """Whether a node is one of several results of an operation."""
    return node.target is operator.getitem and not facts(arg(node, 0)).single


def _after(
    start: Node, attention: _Member, count: int, borders: frozenset[str]
) -> dict[Node, _Member]:
    """What takes the result alone, one after the other, and can go by groups: moves of its dims."""
    within = _borders(facts(start), borders)
    found: dict[Node, _Member] = {}
    node, placed = start, attention.option.outs[0]
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op != "call_function" or len(node.all_input_nodes) != 1 or not facts(node).single:
            break
        if _borders(facts(node), borders) != within or not isinstance(placed, Shard):
            break
        member = _member(node, count, lambda rule, op, s=placed: rule.from_input(op, 0, s))
        if member is None or len(member.tensors) != 1:
            break
        found[node] = member
        placed = member.option.outs[0]
    return found


def _member(node: Node, count: int, choose: Any) -> _Member | None:
    known = facts(node)
    if node.op != "call_function" or known.random or not node.all_input_nodes:
        return None  # what takes no tensor makes the same one for all groups
    if any(not facts(t).single for t in node.all_input_nodes):
        return None
    op, tensors = op_of(node, count)
    rule = find_rule(op.target, op.name, known)
    if rule is None or isinstance(rule, (AttentionRule, TapRule)):  # hooks see all heads, once
        return None
    option = choose(rule, op)
    if option is None or not _is_even(option):
        return None
    return _Member(tensors, option, rule.localize(op, option))


def _is_even(option: Option) -> bool:
    """Whether each tensor is whole, or in one piece for each group, all of a size."""
    every = (*option.ins, *option.outs)
    return isinstance(option.outs[0], Shard) and all(
        isinstance(p, Replicate) or (type(p) is Shard and p.even and p.outer == 1) for p in every
    )


def _borders(known: Facts, borders: Iterable[str]) -> tuple[Scope, ...]:
    return tuple(scope for scope in known.scope if scope.path in borders)
