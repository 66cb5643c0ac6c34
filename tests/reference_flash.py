"""Small reference kernels: flash-attn's functions and torch's varlen_attn, in plain torch.

They stand in for the libraries where those do not run (a CPU). Not for speed: each makes all
scores.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int | None, int | None],
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[S, H, D], [T, Hkv, D], [T, Hkv, E] -> [S, H, E], log-sum-exp [H, S]; masks count from the
    bottom right. A query that may read nothing gets zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("shd,thd->hst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    away = torch.arange(k.shape[0], device=q.device)[None] - at
    if slopes is not None:
        scores = scores - (slopes[:, None, None] * away.abs()).to(scores.dtype)
    allowed = torch.ones_like(away, dtype=torch.bool)
    before, after = (-1 if side is None else side for side in window)
    if causal:
        allowed &= away <= 0
    if before >= 0:
        allowed &= away >= -before
    if after >= 0:
        allowed &= away <= after
    none = ~allowed.any(-1)[:, None]
    scores = scores.masked_fill(~allowed, -torch.inf).masked_fill(none, 0.0)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    weights = torch.dropout(weights.masked_fill(none, 0.0), dropout_p, dropout_p > 0)
    lse = scores.logsumexp(-1).masked_fill(none[:, 0], -torch.inf).float()
    return torch.einsum("hst,the->she", weights, v), lse


def _rows(q: Tensor, k: Tensor, v: Tensor, *options: Any, slopes: Any = None, **more: Any) -> Any:
    """[B, S, H, E] and log-sum-exp [B, H, S]."""
    each = slopes if slopes is not None and slopes.dim() == 2 else [slopes] * len(q)
    rows = [
        _attend(a, b, c, *options, slopes=s, **more)
        for a, b, c, s in zip(q, k, v, each, strict=True)
    ]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def _documents(
    q: Tensor, k: Tensor, v: Tensor, cuts_q: Any, cuts_k: Any, *options: Any,
    used_q: Any = None, used_k: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """[T, H, E] and log-sum-exp [H, T]; zeros for what is in no document. used: of each."""
    cuts_q, cuts_k = cuts_q.tolist(), cuts_k.tolist()
    out, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[1::-1]).float()
    for i, (a, c) in enumerate(zip(cuts_q[:-1], cuts_k[:-1], strict=True)):
        b = cuts_q[i + 1] if used_q is None else a + int(used_q[i])
        d = cuts_k[i + 1] if used_k is None else c + int(used_k[i])
        part, sums = _attend(q[a:b], k[c:d], v[c:d], *options, **more)
        out = torch.cat([out[:a], part, out[b:]])
        lse = torch.cat([lse[:, :a], sums, lse[:, b:]], 1)
    return out, lse


def _without(*given: Any) -> None:
    """What these references do not compute; the library refuses it before it comes here."""
    if any(each is not None for each in given):
        raise NotImplementedError


# -- flash-attn 2 -------------------------------------------------------------------------------


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
    options = softmax_scale, causal, window_size, softcap
    return _rows(q, k, v, *options, slopes=alibi_slopes, dropout_p=dropout_p)[0]


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
    _without(block_table)
    options = softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p
    return _documents(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)[0]


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


# -- flash-attn 3 -------------------------------------------------------------------------------


def hopper_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    _without(qv, q_descale, k_descale, v_descale, attention_chunk or None)
    return _rows(q, k, v, softmax_scale, causal, window_size, softcap)[0]


def hopper_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    """qkv: [B, S, 3, H, D], or [B, S, H + 2 Hkv, D] with num_heads_q."""
    _without(q_descale, k_descale, v_descale, attention_chunk or None)
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        shared = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, shared, shared], 2)
    return _rows(q, k, v, softmax_scale, causal, window_size, softcap)[0]


def hopper_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor:
    _without(qv, q_descale, k_descale, v_descale, attention_chunk or None)
    options = softmax_scale, causal, window_size, softcap
    used = {"used_q": seqused_q, "used_k": seqused_k}
    return _documents(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, **used)[0]


# -- flash-attn 4: (out, log-sum-exp [B, H, S]) ---------------------------------------------------


def cute_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    _without(qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars)
    _without(block_sparse_tensors, block_sparse_tensors_bwd)
    return _rows(q, k, v, softmax_scale, causal, window_size, softcap, sink=learnable_sink)


def cute_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    _without(qv, gather_kv_indices, page_table, score_mod, score_mod_bwd, mask_mod)
    _without(block_sparse_tensors, aux_tensors, aux_scalars)
    options = softmax_scale, causal, window_size, softcap
    used = {"used_q": seqused_q, "used_k": seqused_k}
    cuts = cu_seqlens_q, cu_seqlens_k
    return _documents(q, k, v, *cuts, *options, sink=learnable_sink, **used)


# -- torch ---------------------------------------------------------------------------------------


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """torch.nn.attention.varlen's. Its log-sum-exp, [H, T], has no gradient."""
    _without(block_table)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    out, lse = _documents(
        query, key, value, cu_seq_q, cu_seq_k, scale, False, window_size, used_k=seqused_k
    )
    return (out, lse.detach()) if return_aux is not None and return_aux.lse else out


def install_flash_attn() -> list[str]:
    """Put the references in flash-attn's places in sys.modules; gives their names."""
    hopper = hopper_attn_func, hopper_attn_qkvpacked_func, hopper_attn_varlen_func
    named = {
        "flash_attn": (
            flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
            flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func,
            flash_attn_varlen_kvpacked_func,
        ),
        "flash_attn_interface": hopper,
        "flash_attn_3.flash_attn_interface": hopper,
        "flash_attn.cute": (cute_attn_func, cute_attn_varlen_func),
    }  # fmt: skip
    for name, functions in named.items():
        module = types.ModuleType(name)
        for function in functions:
            public = function.__name__.replace("hopper", "flash").replace("cute", "flash")
            setattr(module, public, _as_in(name, function))
        sys.modules[name] = module
    sys.modules["flash_attn"].cute = sys.modules["flash_attn.cute"]  # type: ignore[attr-defined]
    return list(named)


@contextlib.contextmanager
def references_here() -> Iterator[None]:
    """The references stand in flash-attn's places and in torch's, as long as it lasts."""
    before, own = dict(sys.modules), torch_varlen.varlen_attn
    names = install_flash_attn()
    torch_varlen.varlen_attn = varlen_attn
    try:
        yield
    finally:
        torch_varlen.varlen_attn = own
        for name in names:
            del sys.modules[name]
            if name in before:
                sys.modules[name] = before[name]


def _as_in(module: str, function: Any) -> Any:
    """The same under another path is a function of its own, as in a package that is built alone."""
    if module != "flash_attn_3.flash_attn_interface":
        return function
    copied = types.FunctionType(function.__code__, globals(), function.__name__)
    copied.__defaults__ = function.__defaults__
    return copied


def loaded_by_transformers(version: int = 2) -> dict[str, Any]:
    """What its module of flash-attn holds once it has imported a version, which needs a GPU."""
    from transformers import modeling_flash_attention_utils as utils

    two, four = (flash_attn_func, flash_attn_varlen_func), (cute_attn_func, cute_attn_varlen_func)
    functions = {2: two, 4: four}[version]
    return {
        "_loaded_implementation": f"flash_attention_{version}",
        **dict(zip(("_flash_fn", "_flash_varlen_fn"), functions, strict=True)),
        **{"_pad_fn": utils._pad_input, "_unpad_fn": utils._unpad_input},
        "_process_flash_kwargs_fn": utils._lazy_define_process_function(functions[1]),
    }
