"""Indexing, slicing, writing to a slice. A slice of a sequence stays where it is."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from ...placement import Partial, PerRank, Replicate, Shard
from ..rule import FactorRule, Factors, Local, Op, Option, Rule, Slot, argument

__all__ = ["RULES"]


@dataclass(frozen=True)
class _Entry:
    """One input dim under an index; kind: "full", "slice", "int", "tensor"; out: its result dim."""

    kind: str
    value: Any
    out: int | None
    position: int


@dataclass(frozen=True)
class _Plan:
    entries: tuple[_Entry, ...]
    factors: Factors


def _expanded(op: Op) -> list[Any]:
    """The index as a list, one entry per input dim (None entries kept), Ellipsis spelled out."""
    index = op.args[1]
    items = (
        list(index) if isinstance(index, (tuple, list)) and not _is_list_index(index) else [index]
    )
    used = 0
    for item in items:
        if item is None or item is Ellipsis:
            continue
        used += _consumes(op, item)
    spread = [slice(None)] * (len(op.ins[0].shape) - used)
    if Ellipsis in [i for i in items if not isinstance(i, Slot)]:
        at = next(k for k, i in enumerate(items) if i is Ellipsis)
        return items[:at] + spread + items[at + 1 :]
    return items + spread


def _is_list_index(index: Any) -> bool:
    return isinstance(index, list) and all(isinstance(i, (int, bool)) for i in index)


def _consumes(op: Op, item: Any) -> int:
    if isinstance(item, Slot) and op.ins[item.index].dtype == torch.bool:
        return len(op.ins[item.index].shape)
    return 1


def _plan(op: Op) -> _Plan | None:
    """Names for the dims of the tensor, index tensors and result; None: not understood."""
    items = _expanded(op)
    if any(
        isinstance(item, bool) or _consumes(op, item) != 1 for item in items if item is not None
    ):
        return None
    shape = op.ins[0].shape
    entries: list[_Entry] = []
    out: list[str | None] = []
    tensors = [k for k, item in enumerate(items) if isinstance(item, (Slot, list))]
    adjacent = not tensors or tensors[-1] - tensors[0] == len(tensors) - 1
    if tensors and any(isinstance(item, int) for item in items):
        return None  # an int among index tensors broadcasts with them
    rank = max(
        (
            len(op.ins[i.index].shape) if isinstance(i, Slot) else 1
            for i in items
            if isinstance(i, (Slot, list))
        ),
        default=0,
    )
    indexed = [f"t{k}" for k in range(rank)]
    if tensors and not adjacent:
        out.extend(indexed)
    dim = 0
    for position, item in enumerate(items):
        if item is None:
            out.append(None)
            continue
        if isinstance(item, slice):
            full = item.indices(shape[dim]) == (0, shape[dim], 1)
            entries.append(_Entry("full" if full else "slice", item, len(out), position))
            out.append(f"x{dim}" if full else None)
        elif isinstance(item, int):
            entries.append(_Entry("int", item, None, position))
        else:
            if adjacent and position == tensors[0]:
                out.extend(indexed)
            entries.append(_Entry("tensor", item, None, position))
        dim += 1
    names = tuple(f"x{d}" if e.kind == "full" else None for d, e in enumerate(entries))
    ins: list[tuple[str | None, ...]] = [names]
    for meta in op.ins[1:]:
        ins.append(tuple(indexed[rank - len(meta.shape) :]))
    known = {n for n in out if n and any(n in each for each in ins)}
    return _Plan(tuple(entries), Factors(tuple(ins), (tuple(out),), frozenset(known)))


def _slice_sizes(shard: Shard, start: int, stop: int, step: int) -> tuple[tuple[int, int], ...]:
    """(first local position, count) of a slice on each rank."""
    found = []
    for offset, size in zip(shard.offsets, shard.sizes, strict=True):
        first = max(0, -(-(offset - start) // step))
        last = -(-(min(stop, offset + size) - start) // step)
        count = max(0, last - first)
        found.append((start + first * step - offset if count else 0, count))
    return tuple(found)


class GetitemRule(Rule):
    """x[index].

    A dim taken whole stays sharded; a slice of the sharded dim keeps each rank's part of it; one
    position of the sharded dim is a term that its owner has and others lack (partial); a tensor of
    positions is looked up like an embedding table.
    """

    cheap = True

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        plan = _plan(op)
        if plan is None:
            return None
        if i > 0:
            return FactorRule(lambda _: plan.factors).from_input(op, i, shard)
        entry = plan.entries[shard.dim]
        replicated = (Replicate(),) * (len(op.ins) - 1)
        if entry.kind == "full":
            return FactorRule(lambda _: plan.factors).from_input(op, 0, shard)
        if entry.kind == "slice" and shard.outer == 1:
            parts = _slice_sizes(shard, *entry.value.indices(op.ins[0].shape[shard.dim]))
            assert entry.out is not None
            return Option((shard, *replicated), (Shard(entry.out, tuple(c for _, c in parts)),))
        if (
            entry.kind == "int"
            and shard.outer == 1
            and local
            and op.outs[0].dtype.is_floating_point
        ):
            return Option((shard, *replicated), (Partial(),))
        return None

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        plan = _plan(op)
        return None if plan is None else FactorRule(lambda _: plan.factors).from_output(op, shard)

    def fresh(self, op: Op):
        plan = _plan(op)
        return () if plan is None else FactorRule(lambda _: plan.factors).fresh(op)

    def localize(self, op: Op, option: Option) -> Local:
        placed = option.ins[0]
        plan = _plan(op)
        if not isinstance(placed, Shard) or plan is None:
            return Local(op.target, op.args, op.kwargs)
        entry = plan.entries[placed.dim]
        if entry.kind in ("full", "tensor"):
            return Local(operator.getitem, op.args)
        items = _expanded(op)
        if entry.kind == "slice":
            start, stop, step = entry.value.indices(op.ins[0].shape[placed.dim])
            parts = _slice_sizes(placed, start, stop, step)
            first = PerRank(tuple(f for f, _ in parts))
            last = PerRank(tuple(f + (c - 1) * step + 1 if c else 0 for f, c in parts))
            items[entry.position] = slice(first, last, step)
            return Local(operator.getitem, (Slot(0), tuple(items)))
        position = entry.value % op.ins[0].shape[placed.dim]
        owner = [o <= position < o + s for o, s in zip(placed.offsets, placed.sizes, strict=True)]
        inside = tuple(
            position - o if own else 0 for o, own in zip(placed.offsets, owner, strict=True)
        )
        items[entry.position] = PerRank(inside)
        owned = PerRank(tuple(int(own) for own in owner))
        return Local(pick, (Slot(0), tuple(items), placed.dim, owned))


def pick(x: torch.Tensor, index: tuple[Any, ...], dim: int, owned: int) -> torch.Tensor:
    """x[index] on the position's owner, zeros elsewhere; with a gradient path on every rank."""
    if owned:
        return x[index]
    # Zeros, also where this rank holds no position at all.
    return x.narrow(dim, 0, 0).sum(dim, keepdim=True)[index]


def setitem_factors(op: Op) -> Factors:
    """x[index] = value: dims that the index takes whole are local."""
    read = Op(operator.getitem, "getitem", op.args[:2], {}, op.ins, op.outs, op.axis_size)
    rank = len(op.ins[0].shape)
    plan = _plan(read)
    blank = tuple((None,) * len(meta.shape) for meta in op.ins)
    if plan is None or any(isinstance(item, (Slot, list)) for item in _expanded(read)):
        return Factors(blank, ((None,) * rank,), frozenset())
    names = plan.factors.ins[0]
    result = plan.factors.outs[0]
    value = op.args[2] if len(op.args) > 2 else None
    ins = [names, *blank[1:]]
    if isinstance(value, Slot):
        width = len(op.ins[value.index].shape)
        if width > len(result):
            return Factors(blank, ((None,) * rank,), frozenset())
        ins[value.index] = tuple(result[len(result) - width :])
    return Factors(tuple(ins), (names,), frozenset(n for n in names if n))


def narrow_as_getitem(op: Op) -> Op:
    """select and narrow, said as an index."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 1, "dim") % rank
    if op.name == "select":
        item: Any = argument(op, 2, "index")
    else:
        start, length = argument(op, 2, "start"), argument(op, 3, "length")
        item = slice(start, start + length)
    index = (*(slice(None) for _ in range(dim)), item)
    return Op(
        operator.getitem, "getitem", (Slot(0), index), {}, op.ins, op.outs, op.axis_size, op.single
    )


class NarrowRule(GetitemRule):
    """select and narrow."""

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        return super().from_input(narrow_as_getitem(op), i, shard, local=local)

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        return super().from_output(narrow_as_getitem(op), shard)

    def fresh(self, op: Op):
        return super().fresh(narrow_as_getitem(op))

    def localize(self, op: Op, option: Option) -> Local:
        return super().localize(narrow_as_getitem(op), option)


RULES: dict[str, Rule] = {
    "getitem": GetitemRule(),
    "select": NarrowRule(),
    "narrow": NarrowRule(),
    "narrow_copy": NarrowRule(),
    "setitem": FactorRule(setitem_factors),
}
