"""A placed graph -> a flat graph of local calls and collectives. Sizes that differ are PerRank."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ..capture.tap import Tap
from ..graph import Facts, arg, arg_nodes, facts, result_nodes, set_facts
from ..place import PlacedBlock, redistribute
from ..place.attention.rule import AttentionRule
from ..place.rule import Local, fill
from ..placement import Partial, Replicate, Shard

__all__ = ["Collective", "Drawn", "flatten_exchanges", "localize"]


@dataclass(frozen=True)
class Collective:
    """A change of placement still to be bound to a group and a rank.

    kind: "all_to_all" (args: one tensor per move), "relayout", "all_gather", "reduce_scatter",
    "all_reduce", "slice", "scale_grad", "mean_grad".
    tokens: of an all_to_all, for each move, the dim that counts tokens, if one does.
    contiguous: of an all_to_all, which results come in the order of their dims in memory.
    """

    kind: str
    moves: tuple[tuple[Any, Any], ...] = ()
    factor: float = 1.0
    tokens: tuple[int | None, ...] = ()
    contiguous: tuple[bool, ...] = ()

    @property
    def __name__(self) -> str:  # what fx and explain print
        return self.kind

    @property
    def sends(self) -> bool:
        return self.kind not in ("slice", "scale_grad")

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a collective of the lowered graph is bound to a rank before it runs")


@dataclass(frozen=True)
class Drawn:
    """A random call still to be bound to a rank and given the call's seed."""

    target: Callable[..., Any]
    sharded: bool

    @property
    def __name__(self) -> str:
        return getattr(self.target, "__name__", "random")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a random call of the lowered graph is bound to a rank before it runs")


def localize(
    placed: Graph,
    axis_size: int,
    blocks: dict[PlacedBlock, Any] | None = None,
    *,
    whole_border: bool = False,
    by_head: bool = True,
) -> Graph:
    """Each node becomes the same call on local tensors, each redistribute a collective or a slice.

    Sharded results multiply the gradient that comes in by n, whole float inputs that ask for a
    gradient get the mean of all ranks' shares, so that gradients at the program's border are those
    of one device. Factors that cancel are left out, unless `whole_border` asks for all of them.

    blocks: what each block became, when this is the graph of a whole program; None for a block's
    own graph.
    by_head: what attention reads comes as a CPU's kernel reads it best, where it is one.
    """
    lowered = Graph()
    made: dict[Node, Node] = {}
    has_border = blocks is not None and (whole_border or not _cancels(placed))

    def add(
        like: Node, target: Any, args: tuple[Any, ...], kwargs: Any = None, **changes: Any
    ) -> Node:
        node = lowered.call_function(target, args, dict(kwargs or {}))
        set_facts(node, facts(like).having(**changes))
        return node

    for node in placed.nodes:
        known: Facts = facts(node)
        if node.op in ("placeholder", "get_attr"):
            made[node] = lowered.create_node(node.op, node.target, name=node.name)
            set_facts(made[node], known)
        elif node.op == "output":
            factor = float(axis_size) if has_border else 1.0
            results = [_result(each, made[each], factor, add) for each in result_nodes(node)]
            set_facts(lowered.output(tuple(results)), known)
        elif isinstance(node.target, PlacedBlock):
            assert blocks is not None
            made[node] = add(node, blocks[node.target], tuple(made[a] for a in arg_nodes(node)))
        elif node.target is redistribute:
            source, target = node.args[1:]
            collective = _collective(source, target, known.home)
            if collective.kind == "all_to_all":
                together = by_head and _read_by_head(node, source, target)
                collective = replace(collective, contiguous=(together,))
            made[node] = add(node, collective, (made[arg(node, 0)],))
        elif node.target is operator.getitem and known.option is None:
            made[node] = add(node, operator.getitem, (made[arg(node, 0)], node.args[1]))
        else:
            made[node] = _call(node, known, made, add)
    if has_border:
        _border_gradients(lowered, axis_size)
    lowered.lint()
    return lowered


def _cancels(placed: Graph) -> bool:
    """Whether every gradient comes in times n and goes out over n: attention alone, on DTensors.

    Backward is linear in the gradient, so both may go. Not where a parameter or a whole value gets
    a gradient, nor where hooks see one on the way.
    """
    ends: list[Node] = []
    for node in placed.nodes:
        target: Any = node.target
        if isinstance(target, PlacedBlock) or isinstance(getattr(target, "func", None), Tap):
            return False
        if node.op in ("placeholder", "get_attr"):
            ends.append(node)
        elif node.op == "output":
            ends.extend(result_nodes(node))
    known = [facts(node) for node in ends]
    return all(isinstance(f.placement, Shard) for f in known if f.meta.requires_grad)


def _result(node: Node, held: Node, factor: float, add: Callable[..., Node]) -> Node:
    """What is given back for a result: `held`, with the gradient of a sharded one multiplied."""
    known = facts(node)
    if factor == 1.0 or not isinstance(known.placement, Shard) or not known.meta.requires_grad:
        return held
    scale = Collective("scale_grad", factor=factor)
    return add(node, scale, (held,), scope=(), rule=None, option=None)


def _call(node: Node, known: Facts, made: dict[Node, Node], add: Callable[..., Node]) -> Node:
    op, option = known.option
    local = (
        Local(op.target, op.args, op.kwargs)
        if known.rule is None
        else known.rule.localize(op, option)
    )
    tensors = _tensors(node)
    args = fill(local.args, [made[t] for t in tensors])
    kwargs = fill(dict(local.kwargs), [made[t] for t in tensors])
    target = local.target
    if known.random:
        target = Drawn(target, any(isinstance(p, Shard) for p in option.outs))
    return add(node, target, args, kwargs)


def _read_by_head(node: Node, source: Shard, target: Shard) -> bool:
    """Whether attention on a CPU reads keys or values, so that a head's rows are to lie together.

    Torch's kernel there is slower the further apart they are: 1.02 to 1.05 of [S, H, D] for q, k
    and v side by side, 0.95 to 0.97 for [H, S, D]; one more copy costs less from 1,024 tokens on.
    Queries are read once; the result lies as they do, and is to come as the model makes it.
    """
    known = facts(node)
    return (
        known.meta.device.type == "cpu"
        and target.dim < source.dim == (known.home.dim if known.home is not None else None)
        and all(_takes_keys(user, node) for user in node.users)
    )


def _takes_keys(user: Node, value: Node) -> bool:
    """Whether a value is nothing but keys or values of attention."""
    rule = facts(user).rule
    if not isinstance(rule, AttentionRule):
        return False
    keys = rule.form(facts(user).option[0]).read_again
    return all(i in keys for i, each in enumerate(_tensors(user)) if each is value)


def _tensors(node: Node) -> list[Node]:
    """What an operation takes, as often as it does, in the order of its rule's tensors."""
    tensors: list[Node] = []
    map_aggregate(
        (node.args, node.kwargs), lambda v: tensors.append(v) if isinstance(v, Node) else None
    )
    return tensors


def _collective(source: Any, target: Any, home: Shard | None) -> Collective:
    match source, target:
        case Replicate(), Shard():
            return Collective("slice", ((source, target),))
        case Shard(), Shard() if source.dim == target.dim:
            return Collective("relayout", ((source, target),))
        case Shard(), Shard():
            tokens = (home.dim if home is not None else None,)
            return Collective("all_to_all", ((source, target),), tokens=tokens)
        case Shard(), Replicate():
            return Collective("all_gather", ((source, target),))
        case Partial(), Shard():
            return Collective("reduce_scatter", ((source, target),))
        case Partial(), Replicate():
            return Collective("all_reduce", ((source, target),))
    raise AssertionError(f"no way from {source} to {target}")


def _border_gradients(graph: Graph, axis_size: int) -> None:
    """The gradient of a whole input is the mean over ranks, of a DTensor's part its own n-th."""
    if axis_size == 1:
        return
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if not inputs:
        return
    after = inputs[-1]
    for node in inputs:
        known = facts(node)
        if not known.meta.requires_grad:
            continue
        sharded = isinstance(known.placement, Shard)
        target = (
            Collective("scale_grad", factor=1.0 / axis_size)
            if sharded
            else Collective("mean_grad", factor=axis_size)
        )
        users = list(node.users)
        with graph.inserting_after(after):
            bordered = graph.call_function(target, (node,))
        set_facts(bordered, known.having(origin=None))
        for user in users:
            user.replace_input_with(node, bordered)
        after = bordered


def flatten_exchanges(graph: Graph) -> Graph:
    """Exchanges that feed one operation become one (q, k and v together). Values stay bit-equal.

    Not those of several groups of heads: each goes as soon as its group is done.
    """
    for node in list(graph.nodes):
        if _is_exchange(node) and facts(node).turn is not None:
            arg(node, 0).append(node)
    for node in list(graph.nodes):
        if node.op != "call_function" or isinstance(node.target, Collective):
            continue
        moves = [a for a in node.all_input_nodes if _is_exchange(a) and len(a.users) == 1]
        moves = [a for a in moves if _together(facts(a), facts(moves[0]))]
        if len(moves) < 2 or len({facts(a).meta.dtype for a in moves}) > 1:
            continue
        pairs = tuple(move.target.moves[0] for move in moves)
        tokens = tuple(move.target.tokens[0] for move in moves)
        contiguous = tuple(move.target.contiguous[0] for move in moves)
        with graph.inserting_after(max(moves)):
            fused = graph.call_function(
                Collective("all_to_all", pairs, tokens=tokens, contiguous=contiguous),
                tuple(m.args[0] for m in moves),
            )
        first = facts(moves[0])
        set_facts(
            fused,
            first.having(
                outs=tuple(facts(m).meta for m in moves),
                placements=tuple(facts(m).placement for m in moves),
                homes=tuple(facts(m).home for m in moves),
                single=False,
                bytes=sum(facts(m).bytes for m in moves),
            ),
        )
        after = fused
        for index, move in enumerate(moves):
            with graph.inserting_after(after):
                after = graph.call_function(operator.getitem, (fused, index))
            set_facts(after, facts(move).having(bytes=0))
            move.replace_all_uses_with(after)
            graph.erase_node(move)
    graph.lint()
    return graph


def _together(a: Facts, b: Facts) -> bool:
    return (a.scope, a.turn) == (b.scope, b.turn)


def _is_exchange(node: Node) -> bool:
    return (
        isinstance(node.target, Collective)
        and node.target.kind == "all_to_all"
        and len(node.target.moves) == 1
    )


def local_meta(known: Facts, index: int, rank: int) -> tuple[int, ...]:
    """The shape that a rank holds of one result."""
    shape = list(known.outs[index].shape)
    placement = known.placements[index]
    if isinstance(placement, Shard):
        shape[placement.dim] = placement.local(rank)
    return tuple(shape)
