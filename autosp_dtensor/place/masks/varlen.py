"""flash-attn's variable-length kernel for attention whose mask is made of runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...graph import Meta
from ..refuse import first_gradient_alone
from .runs import Pass

__all__ = ["attend_runs", "why_not"]

# What flash-attn 2.8 runs on, and the largest head that it takes.
TAKES: dict[str, tuple[torch.dtype, ...]] = {"cuda": (torch.float16, torch.bfloat16)}
_LARGEST = 256


def _kernel() -> Callable[..., torch.Tensor] | None:
    try:
        return importlib.import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError):
        return None


def why_not(query: Meta, key: Meta, value: Meta, dtype: torch.dtype) -> str:
    """Why the kernel cannot run attention of these; empty where it can.

    dtype: that attention is computed in, which autocast may have changed.
    """
    kind, sizes = query.device.type, {query.shape[-1], key.shape[-1], value.shape[-1]}
    if kind not in TAKES:
        return f"flash-attn does not run on {kind}"
    if dtype not in TAKES[kind]:
        return f"flash-attn does not take {str(dtype).removeprefix('torch.')}"
    if len(sizes) > 1:
        return "heads of values are of another size than those of keys"
    if max(sizes) > _LARGEST:
        return f"flash-attn takes heads up to {_LARGEST}"
    if _kernel() is None:
        return "flash-attn cannot be imported"
    if kind == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "flash-attn needs compute capability 8.0"
    return ""


def attend_runs(
    passes: list[Pass],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """Attention of q [B, H, S, D] to k, v [B, Hkv, T, D] by runs; zeros for queries in none."""
    kernel = _kernel()
    assert kernel is not None, "the program was built where flash-attn can be imported"
    rows, length = q.shape[0], q.shape[2]
    tokens, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = None
    for each in passes:
        part = kernel(
            _taken(tokens, each.queries),
            _taken(keys, each.keys),
            _taken(values, each.keys),
            each.query_cuts,
            each.key_cuts,
            each.most_queries,
            each.most_keys,
            dropout_p=dropout_p,
            softmax_scale=scale,
            causal=each.window[1] == 0,
            window_size=each.window,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        if each.queries is None:
            out = part
        else:
            out = torch.zeros_like(tokens) if out is None else out
            out = out.index_copy(0, each.queries, part)
    return _Once.apply(out.unflatten(0, (rows, length)).transpose(1, 2))


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)


class _Once(torch.autograd.Function):
    """The same, for a kernel whose backward autograd takes for a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    @first_gradient_alone(
        "attention by flash-attn",
        "take such a gradient (a penalty on gradients) without parallelize",
        "the kernel's backward has no derivative",
    )
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
