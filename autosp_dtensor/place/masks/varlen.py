"""Variable-length kernels for attention whose mask is made of runs: flash-attn's, torch's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...graph import Meta
from ..refuse import first_gradient_alone
from .runs import FLASH_ATTN, Pass

__all__ = ["attend_runs", "kernel_for"]

# What flash-attn 2.8 and torch's copy of it run on, and the largest head that they take.
TAKES: dict[str, tuple[torch.dtype, ...]] = {"cuda": (torch.float16, torch.bfloat16)}
_LARGEST = 256
TORCH = "torch's varlen_attn"
# The largest head whose backward has room on GPUs of compute capability 8.6 to 8.9, and 12.
_SMALL_GPU = 192
_TORCH_HEADS = 8  # its heads are a multiple of; flash-attn's function pads them


def _flash_attn() -> Callable[..., torch.Tensor] | None:
    return _found("flash_attn", "flash_attn_varlen_func")


def _torch() -> Callable[..., torch.Tensor] | None:
    return _found("torch.nn.attention.varlen", "varlen_attn")


def _found(module: str, name: str) -> Callable[..., torch.Tensor] | None:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None


def kernel_for(
    query: Meta, key: Meta, value: Meta, dtype: torch.dtype, dropout: bool
) -> tuple[str, str]:
    """The kernel that runs attention of these, flash-attn's first; else "" and why there is none.

    dtype: that attention is computed in, which autocast may have changed.
    """
    kind, sizes = query.device.type, {query.shape[-1], key.shape[-1], value.shape[-1]}
    if kind not in TAKES:
        return "", f"flash-attn does not run on {kind}"
    if dtype not in TAKES[kind]:
        return "", f"flash-attn does not take {str(dtype).removeprefix('torch.')}"
    if len(sizes) > 1:
        return "", "heads of values are of another size than those of keys"
    if max(sizes) > _LARGEST:
        return "", f"flash-attn takes heads up to {_LARGEST}"
    if kind == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "", "flash-attn needs compute capability 8.0"
    if _flash_attn() is not None:
        return FLASH_ATTN, ""
    why = _why_not_torch(query, key, dropout)
    return ("", f"flash-attn cannot be imported, and {TORCH} {why}") if why else (TORCH, "")


def _why_not_torch(query: Meta, key: Meta, dropout: bool) -> str:
    kernel = _torch()
    takes = inspect.signature(kernel).parameters if kernel is not None else {}
    if "window_size" not in takes or "scale" not in takes:
        return "is not in this release"
    if "enable_gqa" not in takes and query.shape[-3] != key.shape[-3]:
        return "does not share key heads in this release"
    if dropout:
        return "has no dropout"
    if query.shape[-1] % _TORCH_HEADS:
        return f"takes heads of a multiple of {_TORCH_HEADS}"
    if query.device.type != "cuda":
        return ""
    if torch.version.hip is not None or not torch.backends.cuda.is_flash_attention_available():
        return "is not built in here"
    major, minor = torch.cuda.get_device_capability(query.device)
    small = major == 12 or (major == 8 and minor > 0)  # as scaled_dot_product_attention asks
    if small and query.shape[-1] > _SMALL_GPU:
        return f"takes heads up to {_SMALL_GPU} on this GPU"
    return ""


def attend_runs(
    passes: list[Pass],
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """Attention of q [B, H, S, D] to k, v [B, Hkv, T, D] by runs; zeros for queries in none."""
    call = _by_flash_attn if kernel == FLASH_ATTN else _by_torch
    rows, length = q.shape[0], q.shape[2]
    tokens, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out: Any = None
    for each in passes:
        part = call(
            _taken(tokens, each.queries),
            _taken(keys, each.keys),
            _taken(values, each.keys),
            each,
            scale,
            dropout_p,
        )
        if each.queries is None:
            out = part
        else:
            out = torch.zeros_like(tokens) if out is None else out
            out = out.index_copy(0, each.queries, part)
    return _Once.apply(out.unflatten(0, (rows, length)).transpose(1, 2))


def _by_flash_attn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: Pass, scale: float, dropout_p: float
) -> torch.Tensor:
    kernel = _flash_attn()
    assert kernel is not None, "the program was built where flash-attn can be imported"
    return kernel(
        q,
        k,
        v,
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


def _by_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, each: Pass, scale: float, dropout_p: float
) -> torch.Tensor:
    """It reads by itself whether it is to be deterministic; a head's numbers lie side by side."""
    kernel = _torch()
    assert kernel is not None and not dropout_p, "the program was built for this kernel"
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    cuts = each.query_cuts, each.key_cuts, each.most_queries, each.most_keys
    return kernel(q, k, v, *cuts, scale=scale, window_size=each.window, **shared)


def _taken(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)


class _Once(torch.autograd.Function):
    """The same, for a kernel whose backward autograd takes for a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    @first_gradient_alone(
        "attention by flash-attn or torch's varlen_attn",
        "take such a gradient (a penalty on gradients) without parallelize",
        "the kernel's backward has no derivative",
    )
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad
