"""Scaled dot product attention: every token reads every other, so sp leaves the sequence dim for
the heads dim.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...placement import Shard, balanced_sizes
from ..rule import FactorRule, Factors, Op, Option, Rule, argument

__all__ = ["RULES", "grouped_heads"]


def attention_factors(op: Op) -> Factors:
    """q [..., H, S, D], k [..., H, T, D], v [..., H, T, E], mask broadcast to [..., H, S, T] ->
    [..., H, S, E].

    Local on heads and batch dims; on the queries where no causal mask counts them and keys are
    whole.
    """
    rank = len(op.outs[0].shape)
    lead = tuple(f"i{dim}" for dim in range(rank - 2))
    causal = bool(argument(op, 5, "is_causal", False))
    ins = [(*lead, "m", None), (*lead, "t", None), (*lead, "t", None)]
    for meta in op.ins[3:]:
        full = (*lead, "m", None)
        ins.append(full[rank - len(meta.shape) :])
    local = frozenset(lead) | (frozenset() if causal else frozenset({"m"}))
    return Factors(tuple(ins), ((*lead, "m", None),), local, prefer=tuple(reversed(lead)))


def grouped_heads(op: Op) -> int:
    """How many query heads share one key head: 1 unless enable_gqa."""
    if len(op.outs[0].shape) < 3 or not argument(op, 7, "enable_gqa", False):
        return 1
    return op.ins[0].shape[-3] // op.ins[1].shape[-3]


class AttentionRule(Rule):
    """
    Arrives: q [B, H, S@sp, D]   k, v [B, Hkv, S@sp, D]
    Needs:   q [B, H@sp, S, D]   k, v [B, Hkv@sp, S, D]
    Gives:   out [B, H@sp, S, D]
    Costs:   one all-to-all of q, k, v together before, one of out after; (n-1)/n of each shard is
    sent. Backward: the same.
    Uneven:  n need not divide H: the exchange carries split sizes.
    Source:  DeepSpeed-Ulysses, arXiv:2309.14509.
    """

    plain = FactorRule(attention_factors)

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        heads = len(op.ins[i].shape) - 3
        group = grouped_heads(op)
        if group > 1 and shard.dim == heads:
            if i == 0:
                return self._by_query_heads(op, shard)
            if i in (1, 2):
                return self._by_query_heads(op, shard.scaled(group))
        return self.plain.from_input(op, i, shard, local=local)

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        return None

    def _by_query_heads(self, op: Op, shard: Shard) -> Option | None:
        """Query heads cut at borders of groups; key heads accordingly."""
        group = grouped_heads(op)
        if shard.outer != 1 or any(size % group for size in shard.sizes):
            return None
        keys = Shard(shard.dim, tuple(size // group for size in shard.sizes))
        known = attention_factors(op)
        name = known.ins[0][shard.dim]
        masks = [
            shard.at(names.index(name))
            if name in names and meta.shape[names.index(name)] > 1
            else self.whole(op).ins[0]
            for names, meta in zip(known.ins[3:], op.ins[3:], strict=True)
        ]
        return Option((shard, keys, keys, *masks), (shard,))

    def fresh(self, op: Op) -> Iterable[Option]:
        group = grouped_heads(op)
        if group == 1:
            yield from self.plain.fresh(op)
            return
        keys = op.ins[1].shape[-3]
        if keys >= op.axis_size:
            sizes = tuple(size * group for size in balanced_sizes(keys, op.axis_size))
            option = self._by_query_heads(op, Shard(len(op.outs[0].shape) - 3, sizes))
            if option is not None:
                yield option
        for option in self.plain.fresh(op):
            first = option.ins[0]
            if isinstance(first, Shard) and first.dim != len(op.outs[0].shape) - 3:
                yield option


RULES: dict[str, Rule] = {"scaled_dot_product_attention": AttentionRule()}
