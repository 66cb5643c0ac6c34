"""Ulysses attention as one writes it by hand: the baseline of the benchmarks.

Source of the scheme: DeepSpeed-Ulysses, arXiv:2309.14509. Heads and lengths must divide by the
group's size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ["ulysses_attention"]


class _Exchange(torch.autograd.Function):
    """[B, S/n, H, D] -> [B, S, H/n, D] (to_heads), or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: torch.Tensor, group: Any, to_heads: bool) -> torch.Tensor:
    n = dist.get_world_size(group)
    b, s, h, d = x.shape
    if to_heads:
        sent = x.reshape(b, s, n, h // n, d).permute(2, 0, 1, 3, 4).contiguous()
    else:
        sent = x.reshape(b, n, s // n, h, d).permute(1, 0, 2, 3, 4).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if to_heads:
        return received.permute(1, 0, 2, 3, 4).reshape(b, n * s, h // n, d)
    return received.permute(1, 2, 0, 3, 4).reshape(b, s // n, n * h, d)


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Local parts [B, S/n, H, D] in, the same out; causal unless a mask [.., S, S] is given."""
    q, k, v = (_Exchange.apply(x, group, True).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    return _Exchange.apply(out.transpose(1, 2), group, False)
