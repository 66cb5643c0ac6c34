"""Calls of flash-attn's entry points, of torch's varlen_attn and of transformers' around them.

Each reads the tensors below by name when it runs, so that a test on a GPU can put others there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

LENGTH, HEADS, SIZE = 12, 6, 2
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# Borders of documents: inside a rank's part, at its end, one of a single token; tail padding.
CUTS = torch.tensor([0, 5, 12, 13, 22], dtype=torch.int32)
MOST = 9
USED = torch.tensor([5, 4, 1, 7], dtype=torch.int32)  # keys that count of each document
SLOPES = torch.linspace(0.1, 0.6, HEADS, dtype=torch.float64)
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
TABLE = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(0)).double()
TABLE.requires_grad_()
DTYPE = torch.float64  # of queries, keys and values

HOPPER, CUTE, TORCH = "flash_attn_interface", "flash_attn.cute", "torch.nn.attention.varlen"


def flash(name: str, module: str = "flash_attn") -> Callable[..., Any]:
    return getattr(sys.modules[module], name)


def packed(x: Tensor) -> Tensor:
    """[B, S, H, D] as one row of tokens."""
    return x.flatten(0, 1)


def rows(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, LENGTH))


def with_lse(out: Tensor, lse: Tensor) -> Tensor:
    """Something made of both; lse [.., H, S], out [.., S, H, D]."""
    return out * torch.sigmoid(lse.to(out.dtype)).transpose(-1, -2)[..., None]


def varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """torch's, on packed rows."""
    cuts = CUTS, CUTS, MOST, MOST
    return flash("varlen_attn", TORCH)(packed(q), packed(k), packed(v), *cuts, **options)


def by_transformers(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Its own function, which takes flash-attn 4; what the caller has besides is dropped there."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    return _flash_attention_forward(
        q, k, v, None, q.shape[1], is_causal=True, attn_implementation="flash_attention_4",
        num_items_in_batch=CUTS, **options,
    )  # fmt: skip


# q [B, S, H, D]; k, v with as many heads, which a call may take fewer of.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flash_attn_func": lambda q, k, v: flash("flash_attn_func")(q, k, v, causal=True),
    "by keyword": lambda q, k, v: flash("flash_attn_func")(v=v, q=q, k=k, softmax_scale=0.3),
    "window and cap": lambda q, k, v: flash("flash_attn_func")(
        q, k, v, causal=True, window_size=(3, 0), softcap=2.0
    ),
    "slopes": lambda q, k, v: flash("flash_attn_func")(q, k, v, alibi_slopes=SLOPES),
    "slopes of each row": lambda q, k, v: flash("flash_attn_func")(
        q, k, v, alibi_slopes=torch.stack([SLOPES, 2 * SLOPES])
    ),
    "three key heads": lambda q, k, v: flash("flash_attn_func")(
        q, k[:, :, :3], v[:, :, :3], causal=True
    ),
    "two key heads": lambda q, k, v: flash("flash_attn_func")(q, k[:, :, :2], v[:, :, :2]),
    "one key head": lambda q, k, v: flash("flash_attn_func")(
        q, k[:, :, :1], v[:, :, :1], alibi_slopes=SLOPES
    ),
    "the same tensor as key and value": lambda q, k, v: flash("flash_attn_func")(q, k, k),
    "other head size of values": lambda q, k, v: flash("flash_attn_func")(q, k, v[..., :1]),
    "qkvpacked": lambda q, k, v: flash("flash_attn_qkvpacked_func")(
        torch.stack([q, k, v], 2), causal=True
    ),
    "kvpacked": lambda q, k, v: flash("flash_attn_kvpacked_func")(
        q, torch.stack([k, v], 2)[:, :, :, :2], causal=True
    ),
    "varlen": lambda q, k, v: rows(
        flash("flash_attn_varlen_func")(
            packed(q), packed(k), packed(v), CUTS, CUTS, MOST, MOST, causal=True
        )
    ),
    "varlen, shared key heads": lambda q, k, v: rows(
        flash("flash_attn_varlen_func")(
            packed(q), packed(k[:, :, :2]), packed(v[:, :, :2]), CUTS, CUTS, MOST, MOST,
            causal=True, alibi_slopes=SLOPES,
        )
    ),
    "varlen qkvpacked": lambda q, k, v: rows(
        flash("flash_attn_varlen_qkvpacked_func")(
            packed(torch.stack([q, k, v], 2)), CUTS, MOST, causal=True
        )
    ),
    "varlen kvpacked": lambda q, k, v: rows(
        flash("flash_attn_varlen_kvpacked_func")(
            packed(q), packed(torch.stack([k, v], 2)), CUTS, CUTS, MOST, MOST
        )
    ),
    "flash-attn 3": lambda q, k, v: flash("flash_attn_func", HOPPER)(
        q, k[:, :, :3], v[:, :, :3], causal=True, window_size=(4, 0), num_splits=1, pack_gqa=False
    ),
    "flash-attn 3 under its other path": lambda q, k, v: flash(
        "flash_attn_func", "flash_attn_3.flash_attn_interface"
    )(q, k[:, :, :2], v[:, :, :2], softcap=2.0),
    "flash-attn 3 qkvpacked": lambda q, k, v: flash("flash_attn_qkvpacked_func", HOPPER)(
        torch.stack([q, k, v], 2), causal=True
    ),
    "flash-attn 3 varlen": lambda q, k, v: rows(
        flash("flash_attn_varlen_func", HOPPER)(
            packed(q), packed(k[:, :, :2]), packed(v[:, :, :2]), CUTS, CUTS, MOST, MOST,
            causal=True, window_size=(2, 0),
        )
    ),
    "flash-attn 3 varlen, keys that are not used": lambda q, k, v: rows(
        flash("flash_attn_varlen_func", HOPPER)(
            packed(q), packed(k), packed(v), CUTS, CUTS, MOST, MOST, seqused_k=USED
        )
    ),
    "flash-attn 4": lambda q, k, v: flash("flash_attn_func", CUTE)(
        q, k[:, :, :1], v[:, :, :1], window_size=(3, None), score_mod=None, aux_tensors=None
    )[0],
    "flash-attn 4 with sinks and log-sum-exp": lambda q, k, v: with_lse(
        *flash("flash_attn_func", CUTE)(
            q, k[:, :, :3], v[:, :, :3], causal=True, learnable_sink=SINKS, return_lse=True
        )
    ),
    "flash-attn 4 varlen with sinks and log-sum-exp": lambda q, k, v: rows(
        with_lse(
            *flash("flash_attn_varlen_func", CUTE)(
                packed(q), packed(k[:, :, :2]), packed(v[:, :, :2]), cu_seqlens_q=CUTS,
                cu_seqlens_k=CUTS, max_seqlen_q=MOST, max_seqlen_k=MOST, causal=True,
                learnable_sink=SINKS, return_lse=True,
            )
        )
    ),
    "torch's varlen_attn": lambda q, k, v: rows(varlen(q, k, v, scale=0.3)),
    "torch's varlen_attn, causal": lambda q, k, v: rows(varlen(q, k, v, window_size=(-1, 0))),
    "torch's varlen_attn, window": lambda q, k, v: rows(varlen(q, k, v, window_size=(2, 1))),
    "torch's varlen_attn, two key heads": lambda q, k, v: rows(
        varlen(q, k[:, :, :2], v[:, :, :2], window_size=(3, 0), enable_gqa=True)
    ),
    "torch's varlen_attn with log-sum-exp": lambda q, k, v: rows(
        with_lse(*varlen(q, k, v, window_size=(-1, 0), return_aux=AuxRequest(lse=True)))
    ),
    "transformers with sinks": lambda q, k, v: by_transformers(
        q, k[:, :, :3], v[:, :, :3], s_aux=SINKS
    ),
}  # fmt: skip
WITH_LSE = {name for name in CALLS if "flash-attn 4" in name or "log-sum-exp" in name}


def model(call: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def run(ids: Tensor) -> Tensor:
        x = F.embedding(ids, TABLE).to(DTYPE).unflatten(-1, (HEADS, SIZE))
        return call(x * 1.3, x * 0.7, x * -0.9).flatten(2)

    return run
