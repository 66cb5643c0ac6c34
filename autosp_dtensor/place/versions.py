"""Values in the placed graph, each in as many placements as are asked for.

`want` makes the one asked for by the cheapest way: what exists, the same cheap operation done again
on other inputs (so rotary tables are computed for this rank's positions alone), or a redistribute
node. Nothing is redistributed out of sight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..cost import sent_bytes
from ..graph import Facts, facts, set_facts
from ..placement import Partial, Placement, Replicate, Shard
from .rule import Op, Option, Rule, fill

__all__ = ["REPLICATE", "Around", "Homes", "Placing", "Value", "Versions", "redistribute"]

REPLICATE = Replicate()
Homes = tuple[Shard | None, ...]


def redistribute(x: torch.Tensor, source: Placement, target: Placement) -> torch.Tensor:
    """Marks a change of placement; lowering turns it into a collective or a slice."""
    raise AssertionError("a placed graph is not run; lower it first")


@dataclass(eq=False)
class Value:
    """One captured value in the placed graph: the placement it has, and further versions of it."""

    source: Node
    placement: Placement
    home: Shard | None
    versions: dict[Placement, Node] = field(default_factory=dict)
    rule: Rule | None = None
    op: Op | None = None
    inputs: tuple[Node, ...] = ()
    outer: Value | None = None
    free: bool = False

    @property
    def facts(self) -> Facts:
        return facts(self.source)

    @property
    def cheap(self) -> bool:
        """Whether it is better computed twice than sent: pointwise or a view, without gradient."""
        return (
            self.op is not None
            and self.rule is not None
            and self.rule.cheap
            and self.op.single
            and not self.facts.meta.requires_grad
            and not self.facts.random
        )


@dataclass(frozen=True, eq=False)
class Placing:
    """A call about to be placed: what it is, by which rule and option, on which tensors."""

    op: Op
    rule: Rule | None
    option: Option
    tensors: tuple[Node, ...]


@dataclass
class Around:
    """What a block is placed in: the placer of the graph around it, and its inputs' values."""

    placer: Versions
    values: list[Value]


class Versions:
    """The placed graph under construction, and the versions of every captured value in it.

    around: the values outside, where the graph is that of a block. border: for each placeholder of
    a block's graph, which input it takes and in which placement.
    """

    def __init__(self, axis_size: int, around: Around | None) -> None:
        self.n = axis_size
        self.around = around
        self.result = Graph()
        self.values: dict[Node, Value] = {}
        self.border: dict[Node, tuple[int, Placement]] = {}

    def _keep(
        self, node: Node, placed: Node, placement: Placement, home: Shard | None, **how: Any
    ) -> Value:
        value = Value(node, placement, home, {placement: placed}, **how)
        known = facts(node)
        set_facts(placed, known.having(placements=(placement,), homes=(home,)))
        self.values[node] = value
        return value

    def want(self, node: Node, placement: Placement) -> Node:
        """The node that holds `node`'s value as `placement`."""
        value = self.values[node]
        if placement in value.versions:
            return value.versions[placement]
        if self.n == 1:
            value.versions[placement] = value.versions[value.placement]
            return value.versions[placement]
        if value.outer is not None:
            return self._want_from_outside(value, placement)
        option = self._redo_option(value, placement)
        if option is None:
            made = self._redistribute(value, placement)
        else:
            made = self._redo(value, option)
        value.versions[placement] = made
        return made

    def _want_from_outside(self, value: Value, placement: Placement) -> Node:
        """A version of a block's input is made around the block, where the input comes from."""
        held = value.versions[value.placement]
        with self.result.inserting_after(_last_source(held)):
            made = self.result.placeholder(f"{held.name}_{len(value.versions)}")
        set_facts(made, facts(held).having(placements=(placement,)))
        assert value.outer is not None and self.around is not None
        self.border[made] = (self.around.values.index(value.outer), placement)
        value.versions[placement] = made
        return made

    def _redo_option(self, value: Value, placement: Placement) -> Option | None:
        """How the value is computed again as `placement`, where that is better than sending it."""
        if value.rule is None or value.op is None:
            return None
        if isinstance(placement, Replicate) and self._can_redo_whole(value):
            return value.rule.whole(value.op)
        if isinstance(placement, Shard) and self._can_redo(value):
            option = value.rule.from_output(value.op, placement)
            if option is not None and option.outs[0] == placement:
                return option
        return None

    def _can_redo(self, value: Value) -> bool:
        """Cheap, without gradient, computed whole: better redone on a part than sliced."""
        return (
            value.cheap
            and len(value.inputs) > 0  # what is made from numbers alone is sliced
            and REPLICATE in value.versions
            and value.facts.meta.dtype.is_floating_point
        )

    def _can_redo_whole(self, value: Value) -> bool:
        """Cheap, without gradient, and all its inputs can be had whole for nothing."""
        return value.cheap and all(self._free_whole(t) for t in value.inputs)

    def _free_whole(self, node: Node) -> bool:
        value = self.values.get(node)
        return value is not None and (REPLICATE in value.versions or value.free)

    def _redo(self, value: Value, option: Option) -> Node:
        assert value.op is not None
        placed = value.versions[value.placement]
        after = max(
            [placed, *(self.want(t, p) for t, p in zip(value.inputs, option.ins, strict=True))]
        )
        call = Placing(value.op, value.rule, option, value.inputs)
        return self._emit(value.source, call, (value.home,), after=after)

    def _redistribute(self, value: Value, target: Placement) -> Node:
        source = min(
            (p for p in value.versions if not (isinstance(p, Partial) and len(value.versions) > 1)),
            key=lambda p: sent_bytes(value.facts.meta, p, target, self.n),
        )
        held = value.versions[source]
        known = facts(held)
        new = known.having(
            outs=(known.meta,) if known.single else known.outs,
            placements=(target,),
            homes=(value.home,),
            rule=None,
            option=None,
            aten=(),
            random=False,
            bytes=int(sent_bytes(value.facts.meta, source, target, self.n)),
        )
        new = replace(new, outs=(value.facts.meta,), single=True)
        with self.result.inserting_after(_last_source(held)):
            change = cast(tuple[Any, ...], (held, source, target))
            made = self.result.call_function(redistribute, change)
        set_facts(made, new.having(origin=None, note=""))
        return made

    def _emit(self, node: Node, call: Placing, homes: Homes, after: Node | None = None) -> Node:
        """Add the call to the placed graph, at its end or after a node."""
        op, rule, option, tensors = call.op, call.rule, call.option, call.tensors
        nodes = [self.want(t, p) for t, p in zip(tensors, option.ins, strict=True)]
        args, kwargs = fill(op.args, nodes), fill(dict(op.kwargs), nodes)
        if after is None:
            placed = self.result.call_function(op.target, args, dict(kwargs), name=node.name)
        else:
            with self.result.inserting_after(after):
                placed = self.result.call_function(op.target, args, dict(kwargs))
        set_facts(
            placed,
            facts(node).having(placements=option.outs, homes=homes, rule=rule, option=(op, option)),
        )
        return placed

    def _way(self, value: Value, target: Placement) -> float:
        if target in value.versions or self.n == 1:
            return 0.0
        if value.outer is not None and self.around is not None:
            return self.around.placer._way(value.outer, target)
        costs = [sent_bytes(value.facts.meta, p, target, self.n) for p in value.versions]
        if isinstance(target, Replicate):
            # At equal bytes, an exchange leaves less on each rank than a gather.
            costs = [cost * 1.1 for cost in costs]
        if isinstance(target, Replicate) and self._can_redo_whole(value):
            costs.append(0.0)
        return min(costs)


def _last_source(node: Node) -> Node:
    """Placeholders stay together at the top: what is made of one comes after the last."""
    if node.op != "placeholder":
        return node
    last = node
    while last.next.op == "placeholder":
        last = last.next
    return last
