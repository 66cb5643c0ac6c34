"""Losses. Only sums are placed: a mean over tokens is a sum over the count of all ranks' tokens.

`place/losses.py` rewrites reduction="mean" into that form first; DTensor's own rule averages the
ranks' means, which is wrong where valid targets are spread unevenly and NaN where a rank has none
(torch 2.13).
"""

from __future__ import annotations

from ..rule import FactorRule, Factors, Op, Rule, argument

__all__ = ["RULES"]


def class_loss_factors(op: Op) -> Factors:
    """input [N, C], [B, C, ...], target [N], [B, ...] or as input: classes whole, tokens local."""
    rank = len(op.ins[0].shape)
    tokens = [f"t{i}" for i in range(rank - 1)]
    if rank > 1:
        scores: tuple[str | None, ...] = (tokens[0], None, *tokens[1:])
    else:
        scores = (None,)
    same = op.ins[1].shape == op.ins[0].shape and op.ins[1].dtype.is_floating_point
    target = scores if same else tuple(tokens)
    weight = tuple((None,) for _ in op.ins[2:])
    reduction = argument(op, 6, "reduction", "mean")
    summed = reduction == "sum"
    out = () if op.outs[0].shape == () else tuple(tokens)
    local = frozenset(tokens) if reduction in ("sum", "none") else frozenset()
    return Factors((scores, target, *weight), (out,), local, local if summed else frozenset())


def count_factors(op: Op) -> Factors:
    """The count of valid targets: a sum over targets."""
    names = tuple(f"t{i}" for i in range(len(op.ins[0].shape)))
    local = frozenset(names)
    return Factors((names, *((None,) for _ in op.ins[1:])), ((),), local, local)


RULES: dict[str, Rule] = {
    "cross_entropy": FactorRule(class_loss_factors),
    "nll_loss": FactorRule(class_loss_factors),
    "target_weight": FactorRule(count_factors),
}
