"""The forms of torch's own attention, and of attention by tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..rule import Factors, Op, argument
from .form import HEADS, KEY_HEADS, Form

__all__ = ["FORMS"]


def _kernel(op: Op) -> Form:
    """scaled_dot_product_attention: q [..., H, S, D], k [..., Hkv, T, D], v [..., Hkv, T, E].

    A mask is broadcast to [..., H, S, T]. Local on heads and batch dims; on the queries where no
    causal mask counts them and keys are whole.
    """
    rank = len(op.outs[0].shape)
    causal = bool(argument(op, 5, "is_causal", False))
    group = _group(op, bool(argument(op, 7, "enable_gqa")))
    lead, keys = _lead(rank, group)
    ins: list[tuple[str | None, ...]] = [(*lead, "m", None), (*keys, "t", None), (*keys, "t", None)]
    for meta in op.ins[3:]:
        ins.append((*lead, "m", None)[rank - len(meta.shape) :])
    shared = {HEADS} if group > 1 else set()
    local = frozenset(lead) - shared | (frozenset() if causal else frozenset({"m"}))
    prefer = tuple(name for name in reversed(lead) if name not in shared)
    return Form(Factors(tuple(ins), ((*lead, "m", None),), local, prefer=prefer), group, _nothing)


def _tiled(op: Op) -> Form:
    """tiled_attention: heads alone; what its mask is made of counts rows and positions of all."""
    rank = len(op.ins[0].shape)
    group = _group(op, bool(op.kwargs.get("enable_gqa")))
    lead, keys = _lead(rank, group)
    leaves = tuple((None,) * len(meta.shape) for meta in op.ins[3:])
    ins = ((*lead, "m", None), (*keys, "t", None), (*keys, "t", None), *leaves)
    stats = ((*lead, "m"),) * (len(op.outs) - 1)
    return Form(Factors(ins, ((*lead, "m", None), *stats), frozenset()), group, None, own=True)


def _weights(op: Op) -> Form:
    """flex_weights: scores [B, H, S, T], value [B, H, T, E]; local on all that softmax is."""
    lead = ("i0", HEADS)
    outs = ((*lead, "m", None), *((*lead, "m") for _ in op.outs[1:]))
    local = frozenset((*lead, "m"))
    return Form(Factors(((*lead, "m", "t"), (*lead, "t", None)), outs, local, prefer=(HEADS,)))


def _lead(rank: int, group: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what stands before [S, D], in queries and in keys."""
    if rank < 3:
        return (), ()
    batch = tuple(f"i{dim}" for dim in range(rank - 3))
    return (*batch, HEADS), (*batch, KEY_HEADS if group > 1 else HEADS)


def _group(op: Op, shared: bool) -> int:
    """How many query heads share one key head: 1 unless enable_gqa."""
    if len(op.outs[0].shape) < 3 or not shared:
        return 1
    return op.ins[0].shape[-3] // op.ins[1].shape[-3]


def _nothing(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Any:
    """Attention on a rank that holds no head or no query: torch 2.11's CPU kernel divides by its
    size, and none of torch's gives the mask a gradient. Without one this rank would leave out
    collectives that the others wait in."""
    empty = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    if attn_mask is not None and attn_mask.requires_grad:
        empty = empty + attn_mask.sum()
    return empty + q.sum() + k.sum() + v.sum()


FORMS: dict[str, Callable[[Op], Form]] = {
    "scaled_dot_product_attention": _kernel,
    "tiled_attention": _tiled,
    "flex_weights": _weights,
}
