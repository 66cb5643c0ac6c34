"""Each rank takes the whole sequence of some heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.fx.node import map_aggregate

from ...placement import Cover, PerRank, Placement, Replicate, Shard, balanced_sizes
from ..rule import Local, Op
from .form import HEADS, KEY_HEADS, Form
from .strategy import AttentionOption, Strategy

__all__ = ["Heads", "attend", "query_heads"]


class Heads(Strategy):
    """
    Arrives: q [B, H, S@sp, D]   k, v [B, Hkv, S@sp, D]   (or any other order of dims)
    Needs:   q [B, H@sp, S, D]   k, v [B, Hkv@sp, S, D]
    Gives:   out [B, H@sp, S, D]
    Costs:   one all-to-all of q, k, v together before, one of out after; (n-1)/n of each shard is
             sent. Backward: the same.
    Uneven:  n need not divide H: the exchange carries split sizes. A key head that serves query
             heads of several ranks goes to each of them, and its gradients are added.
    """

    def from_input(self, op: Op, form: Form, i: int, shard: Shard) -> AttentionOption | None:
        if shard.dim == form.dim_of(i, HEADS):
            return self._by_query_heads(op, form, shard)
        if shard.dim == form.dim_of(i, KEY_HEADS):
            return self._by_query_heads(op, form, shard.scaled(form.group))
        return None

    def fresh(self, op: Op, form: Form) -> Iterable[AttentionOption]:
        heads = query_heads(op, form)
        if heads < op.axis_size:
            return
        sizes = balanced_sizes(heads, op.axis_size)
        if form.group > 1 and heads // form.group % op.axis_size == 0:
            sizes = (heads // op.axis_size,) * op.axis_size  # whole groups on each rank
        option = self._by_query_heads(op, form, Shard(0, sizes))
        if option is not None:
            yield option

    def _by_query_heads(self, op: Op, form: Form, shard: Shard) -> AttentionOption | None:
        """Query heads cut anywhere; each rank gets the key heads that its query heads read."""
        if shard.outer != 1:
            return None
        heads = query_heads(op, form)
        if sum(shard.sizes) != heads:
            return None
        keys = _key_heads(shard, form.group, heads // form.group)
        ins: list[Placement] = []
        for i, meta in enumerate(op.ins):
            own, shared = form.dim_of(i, HEADS), form.dim_of(i, KEY_HEADS)
            if shared is not None:
                ins.append(keys.at(shared))
            elif own is not None and meta.shape[own] > 1:
                ins.append(shard.at(own))
            else:
                ins.append(Replicate())
        outs = tuple(shard.at(names.index(HEADS)) for names in form.factors.outs)
        return AttentionOption(tuple(ins), outs, self)

    def localize(self, op: Op, form: Form, option: AttentionOption) -> Local:
        """Where query heads do not share a rank's key heads evenly, it says which reads which."""
        shard = option.outs[0]
        assert isinstance(shard, Shard)
        target, kwargs = op.target, dict(op.kwargs)
        if form.own:
            ends = [(at, at + size) for at, size in zip(shard.offsets, shard.sizes, strict=True)]
            kwargs["own"] = PerRank(tuple(ends))
        empty = form.empty if 0 in shard.sizes else None
        reads = _reads(form, shard, option)
        if reads is None and empty is None:
            return Local(target, op.args, kwargs)
        where = ()
        if reads is not None:
            where = tuple((i, form.dim_of(i, KEY_HEADS)) for i in form.key_tensors)
            kwargs.pop("enable_gqa", None)
        return Local(attend, (target, empty, reads, where, *op.args), kwargs)


def query_heads(op: Op, form: Form) -> int:
    """Query heads of the whole; 0 where a call has none."""
    names = form.factors.outs[0]
    return op.outs[0].shape[names.index(HEADS)] if HEADS in names else 0


def _key_heads(queries: Shard, group: int, count: int) -> Shard:
    """The key heads that each rank's query heads read: a plain shard where none is shared."""
    starts, sizes = [], []
    for first, size in zip(queries.offsets, queries.sizes, strict=True):
        start = first // group
        starts.append(min(start, count))
        sizes.append(-(-(first + size) // group) - start if size else 0)
    if sum(sizes) == count:
        return Shard(queries.dim, tuple(sizes))
    return Cover(queries.dim, tuple(sizes), 1, tuple(starts), count)


def _reads(form: Form, queries: Shard, option: AttentionOption) -> PerRank | None:
    """The local key head of each local query head; None where they are shared evenly."""
    if form.group == 1:
        return None
    keys = option.ins[form.key_tensors[0]]
    assert isinstance(keys, Shard)
    reads = [
        tuple((first + i) // form.group - start for i in range(size))
        for first, size, start in zip(queries.offsets, queries.sizes, keys.offsets, strict=True)
    ]
    even = all(
        size == 0 or (size % count == 0 and each == tuple(i * count // size for i in range(size)))
        for each, size, count in zip(reads, queries.sizes, keys.sizes, strict=True)
    )
    return None if even else PerRank(tuple(reads))


def attend(
    target: Callable[..., Any],
    empty: Callable[..., Any] | None,
    reads: tuple[int, ...] | None,
    where: tuple[tuple[int, int], ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `target` on a rank's heads.

    Local query head i reads local key head reads[i]: `where` has the tensors (in the order of the
    arguments) and dims that hold key heads. `empty` is called instead on a rank without heads.
    """
    tensors: list[torch.Tensor] = []
    map_aggregate(
        (args, kwargs), lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None
    )
    if empty is not None and (tensors[0].numel() == 0 or tensors[1].numel() == 0):
        return empty(*args, **kwargs)
    if reads is not None:
        picked: dict[int, torch.Tensor] = {}
        for i, dim in where:
            index = torch.tensor(reads, dtype=torch.int64, device=tensors[i].device)
            picked[id(tensors[i])] = tensors[i].index_select(dim, index)
        args, kwargs = map_aggregate((args, kwargs), lambda x: picked.get(id(x), x))
    return target(*args, **kwargs)


def _without_data(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return attend(getattr(target, "without_data", target), *args, **kwargs)


cast(Any, attend).without_data = _without_data
