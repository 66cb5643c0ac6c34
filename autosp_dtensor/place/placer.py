"""Give every value a placement, node by node: of what an operation's rule allows, the cheapest."""

from __future__ import annotations

import logging
import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from ..cost import sent_bytes
from ..graph import arg, arg_nodes, facts, result_nodes, set_facts, short_name
from ..placement import Partial, Placement, Replicate, Shard, chunk_sizes
from .blocks import Block, PlacedBlock
from .refuse import Refusals
from .rule import Op, Option, Rule, op_of
from .seeds import seed_inputs
from .table import find_rule
from .versions import REPLICATE, Around, Homes, Placing, Value, Versions

__all__ = ["Placer"]

log = logging.getLogger("autosp_dtensor")


class Placer(Versions):
    """Places one captured graph into `result`, whose facts hold placements, rule and option."""

    def __init__(
        self,
        graph: Graph,
        axis_size: int,
        inputs: list[Placement | None],
        seq_dim: int,
        whole_results: frozenset[int] = frozenset(),
        around: Around | None = None,
    ) -> None:
        super().__init__(axis_size, around)
        self.graph = graph
        self.blocks: dict[Any, tuple[PlacedBlock, tuple[Placement, ...], Homes]] = {}
        self.inputs = inputs
        self.seq_dim = seq_dim
        self.whole_results = whole_results
        self.tuples: dict[Node, tuple[Node, Option, tuple[Shard | None, ...]]] = {}
        self.homes = {} if around else seed_inputs(graph, inputs, axis_size, seq_dim)
        self.lengths = {shard.block for shard in self.homes.values()}
        if around:
            outer = around.placer
            assert isinstance(outer, Placer)
            self.blocks, self.lengths = outer.blocks, outer.lengths
        self.refusals = Refusals(axis_size)

    def run(self) -> Graph:
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in inputs:
            self._place_input(node)
        for node in inputs:  # after all of them, so that placeholders stay together
            self._cut_input(node)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self._keep(
                    node,
                    self.result.create_node("get_attr", node.target, name=node.name),
                    REPLICATE,
                    None,
                )
            elif node.op == "output":
                self._place_output(node)
            elif isinstance(node.target, Block):
                self._place_block(node)
            elif node.target is operator.getitem and node.args[0] in self.tuples:
                self._place_element(node)
            else:
                self._place_call(node)
        self.refusals.raise_if_any()
        kept = ("output",) if self.around else ("placeholder", "output")
        self.result.eliminate_dead_code(is_impure_node=lambda n: n.op in kept)
        self.result.lint()
        return self.result

    # -- sources and results --------------------------------------------------------------------

    def _place_input(self, node: Node) -> None:
        placed = self.result.placeholder(node.name)
        known = facts(node)
        assert known.origin is not None
        if self.around is not None:
            number = int(known.origin.name)
            outer = self.around.values[number]
            self._keep(node, placed, outer.placement, outer.home, outer=outer)
            self.border[placed] = (number, outer.placement)
            return
        given = self.inputs[int(known.origin.name)]
        home = self.homes.get(node)
        if isinstance(given, Shard):
            self._keep(node, placed, given, given)
            return
        self._keep(node, placed, REPLICATE, home)

    def _cut_input(self, node: Node) -> None:
        """A float with the sequence dim is cut where it comes in."""
        value = self.values[node]
        if (
            self.around is None
            and value.home is not None
            and value.facts.meta.dtype.is_floating_point
            and value.home != value.placement
        ):
            self.want(node, value.home)
            value.placement = value.home

    def _place_output(self, node: Node) -> None:
        results = []
        for index, each in enumerate(result_nodes(node)):
            whole = index in self.whole_results
            results.append(self.want(each, REPLICATE if whole else self._output_placement(each)))
        placed = self.result.output(tuple(results))
        set_facts(placed, facts(node).having(placements=tuple(facts(r).placement for r in results)))

    def _output_placement(self, node: Node) -> Placement:
        """Chunks of the sequence dim, or whole where a result has none (of pooling, of one token):
        who computes with that need not know how the batch or the classes were split.

        The result of a block stays as it is.
        """
        value = self.values[node]
        placement = value.placement
        if self.around is not None:
            return placement
        shape = value.facts.meta.shape
        if not isinstance(placement, Shard):
            return REPLICATE
        if value.home is None and self._input_lengths().isdisjoint(shape):
            return REPLICATE
        dim = placement.dim if value.home is None else value.home.dim
        return Shard(dim, chunk_sizes(shape[dim], self.n))

    def _input_lengths(self) -> set[int]:
        """Of the sequence, and of others beside it: ids and masks [B, S], features [B, S, D]."""
        found = set(self.lengths)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                meta = facts(node).meta
                least = 3 if meta.dtype.is_floating_point else 2  # dims; not labels [B, classes]
                if len(meta.shape) >= max(least, self.seq_dim + 1):
                    found.add(meta.shape[self.seq_dim])
        return found

    # -- blocks ---------------------------------------------------------------------------------

    def _place_block(self, node: Node) -> None:
        """Place a block once for each way its inputs can come; further calls take the result."""
        values = [self.values[n] for n in arg_nodes(node)]
        ways = tuple(
            (v.placement, v.home, frozenset(v.versions), self._can_redo_whole(v), self._can_redo(v))
            for v in values
        )
        key = (node.target, ways)
        if key not in self.blocks:
            block: Any = node.target
            inner = Placer(block.graph, self.n, [], self.seq_dim, around=Around(self, values))
            inner.refusals = self.refusals
            graph = inner.run()
            border = [inner.border[n] for n in graph.nodes if n.op == "placeholder"]
            output = next(n for n in block.graph.nodes if n.op == "output")
            outs = [inner.values[n] for n in result_nodes(output)]
            placed = PlacedBlock(block, graph, border)
            self.blocks[key] = (
                placed,
                tuple(v.placement for v in outs),
                tuple(v.home for v in outs),
            )
        placed, outs, homes = self.blocks[key]
        args = tuple(self.want(values[k].source, placement) for k, placement in placed.border)
        call = self.result.call_function(placed, args)
        set_facts(call, facts(node).having(placements=outs, homes=homes))
        self.tuples[node] = (call, Option((), outs), homes)

    # -- operations -----------------------------------------------------------------------------

    def _place_call(self, node: Node) -> None:
        op, tensors = op_of(node, self.n)
        values = [self.values[t] for t in tensors]
        rule = find_rule(op.target, op.name, facts(node))
        option = self._choose(node, op, rule, values)
        homes = self._homes(op, rule, values, option)
        gathered = self._to_gather(values, option)
        placed = self._emit(node, Placing(op, rule, option, tensors), homes)
        if op.single:
            value = Value(
                node, option.outs[0], homes[0], {option.outs[0]: placed}, rule, op, tensors
            )
            value.free = self._can_redo_whole(value)
            self.values[node] = value
            self._split_again(node, gathered)
        else:
            self.tuples[node] = (placed, option, homes)

    def _to_gather(self, values: list[Value], option: Option) -> list[Value]:
        """The split values that an option wants whole, and that are not there so."""
        wanted = {
            v.source: v
            for v, placement in zip(values, option.ins, strict=True)
            if isinstance(placement, Replicate) and isinstance(v.placement, Shard)
        }
        return [v for v in wanted.values() if not self._free_whole(v.source)]

    def _split_again(self, node: Node, gathered: list[Value]) -> None:
        """After an operation that every rank computed whole, go on with this rank's part."""
        value = self.values[node]
        if not isinstance(value.placement, Replicate) or value.home is None:
            return
        if not gathered or not value.facts.meta.dtype.is_floating_point:
            return
        log.warning(
            "%s at %s: no dim is left to split it on; every rank gathers %.1f MiB and computes "
            "all of it",
            short_name(node.target),
            facts(node).source,
            sum(v.facts.meta.nbytes for v in gathered) / 2**20,
        )
        self.want(node, value.home)
        value.placement = value.home

    def _place_element(self, node: Node) -> None:
        call, option, homes = self.tuples[arg(node, 0)]
        index = self._tensor_index(node)
        placed = self.result.call_function(operator.getitem, (call, node.args[1]))
        self._keep(node, placed, option.outs[index], homes[index] if index < len(homes) else None)

    def _tensor_index(self, node: Node) -> int:
        """Which of the call's tensors this element is, not counting what is no tensor."""
        call, index = arg(node, 0), cast(int, node.args[1])
        siblings = sorted({cast(int, user.args[1]) for user in call.users})
        return siblings.index(index) if len(siblings) == len(facts(call).outs) else index

    # -- choosing -------------------------------------------------------------------------------

    def _choose(self, node: Node, op: Op, rule: Rule | None, values: list[Value]) -> Option:
        base = rule or _NO_RULE
        whole = base.whole(op)
        all_whole = all(isinstance(v.placement, Replicate) for v in values)
        if rule is None:
            if not all_whole and self.n > 1:
                placed = [(v.facts.meta, v.placement) for v in values]
                self.refusals.add(op.target, op.name, facts(node).source, placed)
            return whole
        unmoved = rule.as_is(op, [v.placement for v in values])
        if unmoved is not None:
            return unmoved
        if all_whole:
            return self._cut(op, rule, values) or whole
        options = _from_inputs(op, rule, values)
        costs = [self._cost(option, values, op) for option in options]
        if not options or min(costs) > 0:
            sharded = any(isinstance(v.placement, Shard) for v in values)
            for option in rule.fresh(op) if sharded else ():  # a sum is owed whole, not in parts
                options.append(option)
                costs.append(self._cost(option, values, op))
            options.append(whole)
            costs.append(self._cost(whole, values, op) * 1.01)
        best = min(range(len(options)), key=lambda k: costs[k])
        return options[best]

    def _cut(self, op: Op, rule: Rule, values: list[Value]) -> Option | None:
        """Where tokens become vectors: integers of the sequence go in, floats come out."""
        if not op.outs or not op.outs[0].dtype.is_floating_point:
            return None
        for i, value in enumerate(values):
            kind = value.facts.meta.dtype
            if (
                value.home is None
                or kind.is_floating_point
                or kind.is_complex
                or kind is torch.bool
            ):
                continue
            option = rule.from_input(op, i, value.home)
            if option is not None and all(isinstance(out, Shard) for out in option.outs):
                return option
        return None

    def _cost(self, option: Option, values: list[Value], op: Op) -> float:
        total = 0.0
        for value, target in zip(values, option.ins, strict=True):
            total += self._way(value, target)
        for meta, out in zip(op.outs, option.outs, strict=True):
            if isinstance(out, Partial):
                total += sent_bytes(meta, out, REPLICATE, self.n)
        return total

    def _homes(
        self, op: Op, rule: Rule | None, values: list[Value], option: Option
    ) -> tuple[Shard | None, ...]:
        """Where the sequence dim is in the results, whether or not they are sharded on it now."""
        if not values and op.name == "arange" and op.outs[0].shape[0] in self.lengths:
            return (Shard(0, chunk_sizes(op.outs[0].shape[0], self.n)),)  # positions, very likely
        if rule is None:
            return (None,) * len(op.outs)
        homes: list[Shard | None] = [None] * len(op.outs)
        for i, value in enumerate(values):
            if value.home is None:
                continue
            moved = rule.from_input(op, i, value.home, local=False)
            for k, out in enumerate(moved.outs if moved is not None else ()):
                if isinstance(out, Shard) and homes[k] is None:
                    homes[k] = out
        return tuple(homes)


def _from_inputs(op: Op, rule: Rule, values: list[Value]) -> list[Option]:
    """Options that take one input where it is, or where its sequence dim is."""
    there = [(i, v.placement) for i, v in enumerate(values)]
    home = [(i, v.home) for i, v in enumerate(values) if v.home != v.placement]
    found = [rule.from_input(op, i, p) for i, p in (*there, *home) if isinstance(p, Shard)]
    return [option for option in found if option is not None]


_NO_RULE = Rule()
