"""Attention by bands of queries, the mask made for one band at a time, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..._torch import once_differentiable
from .runtime import Band, TileMask

__all__ = ["tiled_attention"]


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *leaves: torch.Tensor,
    mask: TileMask,
    heads: tuple[int, ...] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention(q, k, v, mask) without the mask.

    Args:
        q, k, v: [B, H, S, D], [B, Hkv, T, D], [B, Hkv, T, E].
        leaves: what the mask is made of, as `TileMask` lists it.
        heads: local key head of each local query head, where they are not grouped evenly.

    Keys that no query of a band may read are not touched. In backward each band is computed again,
    so that neither scores nor masks are kept. A query that may read nothing gets zeros, as in SDPA.
    """
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # as scaled_dot_product_attention does
        q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
    if heads is not None:
        index = torch.tensor(heads, dtype=torch.int64, device=k.device)
        k, v, enable_gqa = k.index_select(1, index), v.index_select(1, index), False
    return _Tiled.apply(mask, {"scale": scale, "enable_gqa": enable_gqa}, q, k, v, *leaves)


def _without_data(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any) -> Any:
    """The same shapes and the same tensors kept for backward, for tensors without data."""
    heads = given.get("heads")
    if heads is not None:
        index = torch.zeros(len(heads), dtype=torch.int64, device=k.device)
        k, v = k.index_select(1, index), v.index_select(1, index)
    shared = bool(given.get("enable_gqa")) and heads is None
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared)


cast(Any, tiled_attention).without_data = _without_data


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mask: TileMask,
        options: dict[str, Any],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *leaves: torch.Tensor,
    ) -> torch.Tensor:
        ctx.mask, ctx.options = mask, options
        ctx.save_for_backward(q, k, v, *leaves)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        for band in mask.bands(leaves):
            parts = _parts(band, q, k, v)
            if parts is not None:
                _rows(band, out).copy_(_attend(band, mask, options, leaves, *parts))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: torch.Tensor):
        (grad,) = incoming
        q, k, v, *leaves = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        for band in ctx.mask.bands(leaves):
            parts = _parts(band, q, k, v)
            if parts is None:
                continue
            inputs = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                out = _attend(band, ctx.mask, ctx.options, leaves, *inputs)
            found = torch.autograd.grad(out, inputs, _rows(band, grad))
            _rows(band, grads[0]).add_(found[0])
            _columns(band, grads[1]).add_(found[1])
            _columns(band, grads[2]).add_(found[2])
        return (None, None, *grads, *(None for _ in leaves))


def _rows(band: Band, x: torch.Tensor) -> torch.Tensor:
    x = x[..., band.rows[0] : band.rows[1], :]
    return x if band.batch is None else x[band.batch : band.batch + 1]


def _columns(band: Band, x: torch.Tensor) -> torch.Tensor:
    x = x[..., band.columns[0] : band.columns[1], :]
    return x if band.batch is None else x[band.batch : band.batch + 1]


def _parts(
    band: Band, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if band.columns[0] >= band.columns[1] or q.shape[1] == 0:
        return None
    return _rows(band, q), _columns(band, k), _columns(band, v)


def _attend(
    band: Band,
    mask: TileMask,
    options: dict[str, Any],
    leaves: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    allowed = None
    if band.masked:
        allowed = mask.values(leaves, (*band.rows, *band.columns), band.batch)
        if allowed.dtype != torch.bool:
            allowed = allowed.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, allowed, **options)
