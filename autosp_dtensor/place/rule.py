"""What a placement rule is: pure, metadata in, placements out.

Most operations are described by *factors*: a name for each dim of each tensor, as in einsum.
Tensors that share a factor are sharded together on it. A factor on which the operation is not local
(softmax's dim) may not be sharded, but is still known, so that it can be seen where the sequence
dim went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from ..graph import Meta, callee, facts, short_name
from ..placement import Partial, PerRank, Placement, Replicate, Shard, even_shard

__all__ = [
    "FactorRule",
    "Factors",
    "Local",
    "Op",
    "Option",
    "Rule",
    "Slot",
    "argument",
    "bound",
    "fill",
    "local_shape",
    "op_of",
]

REPLICATE = Replicate()


@dataclass(frozen=True)
class Slot:
    """Stands for the i-th tensor in an operation's arguments."""

    index: int


@dataclass(frozen=True, eq=False)
class Op:
    """One call, as rules see it: `args` and `kwargs` hold a Slot for each tensor."""

    target: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ins: tuple[Meta, ...]
    outs: tuple[Meta, ...]
    axis_size: int
    single: bool = True
    source: str = ""


def op_of(node: Node, axis_size: int) -> tuple[Op, tuple[Node, ...]]:
    """A node's call on so many ranks, and its tensors in the order of their slots."""
    tensors: list[Node] = []

    def slot(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        tensors.append(value)
        return Slot(len(tensors) - 1)

    args, kwargs = map_aggregate((node.args, node.kwargs), slot)
    known = facts(node)
    op = Op(
        callee(node),
        short_name(node.target),
        args,
        kwargs,
        tuple(facts(t).meta for t in tensors),
        known.outs,
        axis_size,
        known.single,
        known.source,
    )
    return op, tuple(tensors)


@dataclass(frozen=True)
class Option:
    """One legal way to run an operation: where its tensors must be, and where its results are."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]


@dataclass(frozen=True)
class Local:
    """The call that one rank makes: like `Op`, on local tensors."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Rule:
    """Base of all rules. `i` counts tensor arguments, `shard` is a placement one could have.

    cheap: whether the result is better computed twice than sent.
    """

    cheap: bool = False

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        """The option for input i as `shard`; local=False: where its elements go, legal or not."""
        return None

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        """The option that gives output 0 as `shard`."""
        return None

    def as_is(self, op: Op, placements: Sequence[Placement]) -> Option | None:
        """The option that takes all tensors as they are, for operations that do not care."""
        return None

    def fresh(self, op: Op) -> Iterable[Option]:
        """Options on dims that no input is sharded on yet, the preferred ones first."""
        return ()

    def whole(self, op: Op) -> Option:
        return Option((REPLICATE,) * len(op.ins), (REPLICATE,) * len(op.outs))

    def localize(self, op: Op, option: Option) -> Local:
        """The local call; by default the same call."""
        return Local(op.target, op.args, op.kwargs)


@dataclass(frozen=True)
class Factors:
    """Names for each dim of each tensor; None: a dim that no other tensor shares, kept whole.

    local: factors on which the op may be sharded. sums: local factors that no output has; sharding
    them leaves a partial sum. prefer: the factors to shard on when the input's own cannot be, in
    this order.
    """

    ins: tuple[tuple[str | None, ...], ...]
    outs: tuple[tuple[str | None, ...], ...]
    local: frozenset[str]
    sums: frozenset[str] = frozenset()
    prefer: tuple[str, ...] = ()


class FactorRule(Rule):
    """A rule made of a function from an operation to its factors."""

    def __init__(
        self,
        factors: Callable[[Op], Factors],
        localize: Callable[[Op, Option], Local] | None = None,
        *,
        cheap: bool = False,
    ) -> None:
        self.factors = factors
        self._localize = localize
        self.cheap = cheap

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        known = self.factors(op)
        name = known.ins[i][shard.dim] if shard.dim < len(known.ins[i]) else None
        if name is None or (local and name not in known.local):
            return None
        return _on_factor(op, known, name, shard)

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        known = self.factors(op)
        name = known.outs[0][shard.dim] if shard.dim < len(known.outs[0]) else None
        if name is None or name not in known.local:
            return None
        return _on_factor(op, known, name, shard)

    def fresh(self, op: Op) -> Iterable[Option]:
        known = self.factors(op)
        order = known.prefer or tuple(
            name for out in known.outs[:1] for name in out if name is not None
        )
        for name in order:
            size = _factor_size(op, known, name)
            if name in known.local and size is not None and size >= op.axis_size:
                option = _on_factor(op, known, name, even_shard(0, size, op.axis_size))
                if option is not None:
                    yield option

    def localize(self, op: Op, option: Option) -> Local:
        if self._localize is None or not any(
            isinstance(p, (Shard, Partial)) for p in (*option.ins, *option.outs)
        ):
            return super().localize(op, option)
        return self._localize(op, option)


def _factor_size(op: Op, known: Factors, name: str) -> int | None:
    for names, meta in zip((*known.outs, *known.ins), (*op.outs, *op.ins), strict=True):
        for dim, each in enumerate(names):
            if each == name and meta.shape[dim] != 1:
                return meta.shape[dim]
    return None


def _on_factor(op: Op, known: Factors, name: str, shard: Shard) -> Option | None:
    length = shard.outer * shard.block
    ins: list[Placement] = []
    for names, meta in zip(known.ins, op.ins, strict=True):
        placed = _on_tensor(names, meta, name, shard, length)
        if placed is None:
            return None
        ins.append(placed)
    outs: list[Placement] = []
    for names, meta in zip(known.outs, op.outs, strict=True):
        if name not in names:
            if name not in known.sums:
                return None
            outs.append(Partial())
            continue
        placed = _on_tensor(names, meta, name, shard, length)
        if not isinstance(placed, Shard):
            return None
        outs.append(placed)
    return Option(tuple(ins), tuple(outs))


def _on_tensor(
    names: tuple[str | None, ...], meta: Meta, name: str, shard: Shard, length: int
) -> Placement | None:
    if name not in names:
        return REPLICATE
    dim = names.index(name)
    if names.count(name) > 1:
        return None
    if meta.shape[dim] == length:
        return shard.at(dim)
    return REPLICATE if meta.shape[dim] == 1 else None  # 1: broadcast


def argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword, as torch's own signatures allow both."""
    if len(op.args) > position:
        return op.args[position]
    if name not in op.kwargs and name in _NUMPY_NAMES:
        name = _NUMPY_NAMES[name]
    return op.kwargs.get(name, default)


_NUMPY_NAMES = {"dim": "axis", "dims": "axis", "keepdim": "keepdims"}  # torch takes both


def dims_of(value: Any, rank: int) -> tuple[int, ...]:
    """Normalized dims of a `dim=` argument; None and () mean all."""
    if value is None or value == ():
        return tuple(range(rank))
    many = (value,) if isinstance(value, int) else tuple(value)
    return tuple(dim % rank for dim in many) if rank else ()


def local_shape(meta: Meta, placement: Placement) -> tuple[int | PerRank, ...]:
    """The shape that each rank holds."""
    shape: list[int | PerRank] = list(meta.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] = placement.length()
    return tuple(shape)


def fill(value: Any, tensors: tuple[Any, ...] | list[Any]) -> Any:
    """Put tensors (or nodes) in the place of slots."""

    def filled(each: Any) -> Any:
        return tensors[each.index] if isinstance(each, Slot) else each

    return map_aggregate(value, filled)


def bound(value: Any, rank: int) -> Any:
    """PerRank integers become this rank's."""

    def here(each: Any) -> Any:
        return each.values[rank] if isinstance(each, PerRank) else each

    return map_aggregate(value, here)
