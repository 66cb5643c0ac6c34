"""Small reference kernels: flash-attn's functions and flex_attention, in plain torch.

They stand in for the libraries where those do not run (a CPU; flex_attention's backward there). Not
for speed: each makes all scores.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """[S, H, D], [T, Hkv, D], [T, Hkv, E] -> [S, H, E]; masks count from the bottom right."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("shd,thd->hst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    away = torch.arange(k.shape[0], device=q.device)[None] - at
    if slopes is not None:
        scores = scores - slopes[:, None, None] * away.abs()
    allowed = torch.ones_like(away, dtype=torch.bool)
    if causal:
        allowed &= away <= 0
    if window[0] >= 0:
        allowed &= away >= -window[0]
    if window[1] >= 0:
        allowed &= away <= window[1]
    none = ~allowed.any(-1)[:, None]
    weights = scores.masked_fill(~allowed, -torch.inf).masked_fill(none, 0.0).softmax(-1)
    weights = torch.dropout(weights.masked_fill(none, 0.0), dropout_p, dropout_p > 0)
    return torch.einsum("hst,the->she", weights, v)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    rows = []
    for row, (a, b, c) in enumerate(zip(q, k, v, strict=True)):
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[row]
        rows.append(
            _attend(a, b, c, softmax_scale, causal, window_size, softcap, slopes, dropout_p)
        )
    return torch.stack(rows)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return flash_attn_func(q, *kv.unbind(2), *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    cuts_q, cuts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    parts = [
        _attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size, softcap,
                alibi_slopes, dropout_p)
        for a, b, c, d in zip(cuts_q, cuts_q[1:], cuts_k, cuts_k[1:], strict=False)
    ]  # fmt: skip
    rest = out[cuts_q[-1] :]
    return torch.cat([out[: cuts_q[0]], *parts, rest])


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Tensor:
    cuts = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *cuts, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    cuts = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, *kv.unbind(1), *cuts, *args, **kwargs)


def hopper_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
) -> Tensor:
    """flash-attn 3's flash_attn_func."""
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size, softcap)


def cute_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """flash-attn 4's flash_attn_func: (out, log-sum-exp [B, H, S])."""
    group = q.shape[2] // k.shape[2]
    keys, values = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, keys) * (
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    )
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
            scores.shape[-1] - q.shape[1] + 1
        )
        scores = scores.masked_fill(above, -torch.inf)
    if learnable_sink is not None:
        sink = learnable_sink[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhst,bthe->bshe", weights, values), scores.logsumexp(-1).float()


def install_flash_attn() -> list[str]:
    """Put the references in flash-attn's places in sys.modules; gives their names."""
    named = {
        "flash_attn": (
            flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
            flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func,
            flash_attn_varlen_kvpacked_func,
        ),
        "flash_attn_interface": (hopper_attn_func,),
        "flash_attn.cute": (cute_attn_func,),
    }  # fmt: skip
    for name, functions in named.items():
        module = types.ModuleType(name)
        for function in functions:
            public = function.__name__.replace("hopper", "flash").replace("cute", "flash")
            setattr(module, public, function)
        sys.modules[name] = module
    sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]  # type: ignore[attr-defined]
    return list(named)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """flex_attention by torch.vmap over all positions, differentiable on a CPU."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    places = [torch.arange(size, device=query.device) for size in scores.shape]

    def over_all(mod: Any, first: bool) -> Any:
        for dims in ((3,), (2,), (1,), (0,)):
            axes = tuple(0 if at == dims[0] else None for at in range(4))
            mod = torch.vmap(mod, in_dims=((0, *axes) if first else axes))
        return mod

    if score_mod is not None:
        scores = over_all(score_mod, True)(scores, *places)
    if block_mask is not None:
        allowed = over_all(block_mask.mask_mod, False)(*places)
        scores = scores.masked_fill(~allowed, -torch.inf)
    none = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    out = weights @ value
    return (out, scores.logsumexp(-1)) if return_lse else out
