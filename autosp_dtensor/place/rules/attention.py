"""Scaled dot product attention: each token reads all others, so sp moves to the heads dim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from ...placement import Cover, PerRank, Placement, Replicate, Shard, balanced_sizes
from ..rule import FactorRule, Factors, Local, Op, Option, Rule, argument

__all__ = ["RULES", "attend", "grouped_heads"]


def attention_factors(op: Op) -> Factors:
    """q [..., H, S, D], k [..., H, T, D], v [..., H, T, E] -> [..., H, S, E].

    A mask is broadcast to [..., H, S, T]. Local on heads and batch dims; on the queries where no
    causal mask counts them and keys are whole.
    """
    rank = len(op.outs[0].shape)
    lead = tuple(f"i{dim}" for dim in range(rank - 2))
    causal = bool(argument(op, 5, "is_causal", False))
    ins: list[tuple[str | None, ...]] = [
        (*lead, "m", None),
        (*lead, "t", None),
        (*lead, "t", None),
    ]
    for meta in op.ins[3:]:
        full = (*lead, "m", None)
        ins.append(full[rank - len(meta.shape) :])
    local = frozenset(lead) | (frozenset() if causal else frozenset({"m"}))
    out = (*lead, "m", None)
    return Factors(tuple(ins), (out,), local, prefer=tuple(reversed(lead)))


def grouped_heads(op: Op) -> int:
    """How many query heads share one key head: 1 unless enable_gqa."""
    shared = (
        op.kwargs.get("enable_gqa")
        if op.name == "tiled_attention"
        else argument(op, 7, "enable_gqa")
    )
    if len(op.outs[0].shape) < 3 or not shared:
        return 1
    return op.ins[0].shape[-3] // op.ins[1].shape[-3]


class AttentionRule(Rule):
    """
    Arrives: q [B, H, S@sp, D]   k, v [B, Hkv, S@sp, D]
    Needs:   q [B, H@sp, S, D]   k, v [B, Hkv@sp, S, D]
    Gives:   out [B, H@sp, S, D]
    Costs:   one all-to-all of q, k, v together before, one of out after; (n-1)/n of each shard is
             sent. Backward: the same.
    Uneven:  n need not divide H: the exchange carries split sizes. A key head that serves query
             heads of several ranks goes to each of them, and its gradients are added.
    Source:  DeepSpeed-Ulysses, arXiv:2309.14509.
    """

    def __init__(self, factors: Callable[[Op], Factors] = attention_factors) -> None:
        self.factors = factors
        self.plain = FactorRule(factors)

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        heads = len(op.ins[i].shape) - 3
        group = grouped_heads(op)
        if group > 1 and shard.dim == heads:
            if i == 0:
                return self._by_query_heads(op, shard)
            return self._by_query_heads(op, shard.scaled(group)) if i in (1, 2) else None
        return self.plain.from_input(op, i, shard, local=local)

    def _by_query_heads(self, op: Op, shard: Shard) -> Option | None:
        """Query heads cut anywhere; each rank gets the key heads that its query heads read."""
        group = grouped_heads(op)
        if shard.outer != 1:
            return None
        keys = _key_heads(shard, group, op.ins[1].shape[-3])
        known = self.factors(op)
        name = known.ins[0][shard.dim]
        masks: list[Placement] = []
        for names, meta in zip(known.ins[3:], op.ins[3:], strict=True):
            at = names.index(name) if name in names else None
            masks.append(Replicate() if at is None or meta.shape[at] == 1 else shard.at(at))
        return Option((shard, keys, keys, *masks), (shard,))

    def fresh(self, op: Op) -> Iterable[Option]:
        if grouped_heads(op) == 1:
            yield from self.plain.fresh(op)
            return
        heads, keys = op.ins[0].shape[-3], op.ins[1].shape[-3]
        if heads >= op.axis_size:
            sizes = balanced_sizes(heads, op.axis_size)
            if keys % op.axis_size == 0:  # whole groups on each rank
                sizes = tuple(heads // op.axis_size for _ in sizes)
            option = self._by_query_heads(op, Shard(len(op.outs[0].shape) - 3, sizes))
            if option is not None:
                yield option
        for option in self.plain.fresh(op):
            first = option.ins[0]
            if isinstance(first, Shard) and first.dim != len(op.outs[0].shape) - 3:
                yield option

    def localize(self, op: Op, option: Option) -> Local:
        """Where query heads do not share a rank's key heads evenly, it says which reads which."""
        queries, keys = option.ins[:2]
        group = grouped_heads(op)
        if isinstance(queries, Shard) and 0 in queries.sizes and op.name != "tiled_attention":
            return Local(attend_if_any, op.args, op.kwargs)
        if not isinstance(keys, Shard) or group == 1 or keys.dim != len(op.ins[1].shape) - 3:
            return super().localize(op, option)
        assert isinstance(queries, Shard)
        reads = [
            tuple((first + i) // group - start for i in range(size))
            for first, size, start in zip(queries.offsets, queries.sizes, keys.offsets, strict=True)
        ]
        even = all(
            size == 0 or each == tuple(i * count // size for i in range(size))
            for each, size, count in zip(reads, queries.sizes, keys.sizes, strict=True)
        )
        if even and all(
            count and size % count == 0
            for size, count in zip(queries.sizes, keys.sizes, strict=True)
        ):
            return super().localize(op, option)
        if op.name == "tiled_attention":
            given = {k: v for k, v in op.kwargs.items() if k != "enable_gqa"}
            return Local(op.target, op.args, {**given, "heads": PerRank(tuple(reads))})
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
        given.pop("enable_gqa", None)
        q, k, v = (given.pop(name) for name in names[:3])
        return Local(attend, (q, k, v, PerRank(tuple(reads))), given)


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


def attend_if_any(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention on a rank that may hold nothing: torch 2.11's CPU kernel divides by its size."""
    if q.numel() and k.numel():
        return F.scaled_dot_product_attention(q, k, v, *args, **kwargs)
    empty = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return empty + q.sum() + k.sum() + v.sum()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    reads: tuple[int, ...],
    **options: Any,
) -> torch.Tensor:
    """Attention in which local query head i reads local key head reads[i]."""
    index = torch.tensor(reads, dtype=torch.int64, device=k.device)
    k, v = k.index_select(-3, index), v.index_select(-3, index)
    return F.scaled_dot_product_attention(q, k, v, **options)


def tiled_factors(op: Op) -> Factors:
    """Heads alone: what the mask is made of counts batch rows and positions of the whole.

    What differs by head (slopes [1, H, 1, 1]) is split with the heads.
    """
    heads = op.ins[0].shape[1]

    def leaf(shape: tuple[int, ...]) -> tuple[str | None, ...]:
        by_head = len(shape) >= 3 and shape[-3] == heads > 1
        return tuple("h" if by_head and d == len(shape) - 3 else None for d in range(len(shape)))

    lead = ("b", "h")
    leaves = tuple(leaf(meta.shape) for meta in op.ins[3:])
    ins = ((*lead, "m", None), (*lead, "t", None), (*lead, "t", None), *leaves)
    return Factors(ins, ((*lead, "m", None),), frozenset("h"), prefer=("h",))


RULES: dict[str, Rule] = {
    "scaled_dot_product_attention": AttentionRule(),
    "tiled_attention": AttentionRule(tiled_factors),
}
