"""Attention over sequences that are split over a group's ranks, as functions that transformers'
models call. q, k, v: [B, H, S/n, D] on each rank; the result: [B, S/n, H, D].

Heads and lengths must divide by the group's size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

__all__ = ["NAMES", "use_group"]

_groups: dict[str, Any] = {}
_wire = torch.ops._c10d_functional  # what torch.compile can trace
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def use_group(group: Any) -> None:
    """The ranks that share a sequence, for the models that run from now on."""
    _groups["sp"] = group


def plain(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> Any:
    """On a whole sequence."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=_grouped(q, k))
    return out.transpose(1, 2), None


def ulysses(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> Any:
    """DeepSpeed-Ulysses, arXiv:2309.14509: an exchange each for q, k, v and the result."""
    q, k, v = (_to_heads(x) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=_grouped(q, k))
    return _to_sequence(out), None


def gathered(module: Any, q: Any, k: Any, v: Any, mask: Any = None, **_: Any) -> Any:
    """Keys and values of the whole sequence on each rank, gathered again in backward."""
    return _Gathered.apply(q, k, v, _groups["sp"]).transpose(1, 2), None


NAMES = {"plain": plain, "ulysses": ulysses, "gathered": gathered}
for _name, _function in NAMES.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, lambda *_, **__: None)  # causal, and nothing else


def _grouped(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[1] != k.shape[1]


class _Exchange(torch.autograd.Function):
    """Part r of dim 0 goes to rank r; so does its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _sent(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _sent(grads[0].contiguous(), ctx.group), None


def _sent(x: torch.Tensor, group: Any) -> torch.Tensor:
    n = dist.get_world_size(group)
    sizes = [x.shape[0] // n] * n
    return _wire.wait_tensor(_wire.all_to_all_single(x, sizes, sizes, group.group_name))


def _to_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S/n, D] -> [B, H/n, S, D]"""
    group = _groups["sp"]
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    sent = x.reshape(b, n, h // n, s, d).transpose(0, 1).flatten(0, 1).contiguous()
    got = _Exchange.apply(sent, group).unflatten(0, (n, b))
    return got.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * s, d)


def _to_sequence(x: torch.Tensor) -> torch.Tensor:
    """[B, H/n, S, D] -> [B, S/n, H, D]"""
    group = _groups["sp"]
    n = dist.get_world_size(group)
    b, h, s, d = x.shape
    sent = x.reshape(b, h, n, s // n, d).permute(2, 0, 3, 1, 4).flatten(0, 1).contiguous()
    got = _Exchange.apply(sent, group).unflatten(0, (n, b))
    return got.permute(1, 2, 0, 3, 4).reshape(b, s // n, n * h, d)


class _Gathered(torch.autograd.Function):
    """A rank's queries read earlier ranks' keys whole and its own causally; the two parts are
    joined by their log-sum-exp, as in ring attention (arXiv:2310.01889)."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, group: Any) -> Any:
        rank, length = dist.get_rank(group), q.shape[2]
        out, lse = _flash(q, k, v, 0.0, True)
        whole_k, whole_v = _all(k, group), _all(v, group)
        if rank:
            early = (x[:, :, : rank * length] for x in (whole_k, whole_v))
            more, more_lse = _flash(q, *early, 0.0, False)
            both = torch.logaddexp(lse, more_lse)
            shares = ((each - both).exp().unsqueeze(-1).to(q.dtype) for each in (lse, more_lse))
            out = sum(x * share for x, share in zip((out, more), shares, strict=True))
            lse = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        q, k, v, out, lse = ctx.saved_tensors
        group, rank, length = ctx.group, dist.get_rank(ctx.group), q.shape[2]
        grad = grads[0].contiguous()
        dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, True)
        whole_k, whole_v = _all(k, group), _all(v, group)
        sums = torch.zeros_like(whole_k), torch.zeros_like(whole_v)
        if rank:
            early = slice(0, rank * length)
            parts = (x[:, :, early] for x in (whole_k, whole_v))
            more = _flash_backward(grad, q, *parts, out, lse, 0.0, False)
            dq = dq + more[0]
            for each, part in zip(sums, more[1:], strict=True):
                each[:, :, early] = part
        for each, part in zip(sums, (dk, dv), strict=True):
            each[:, :, rank * length : (rank + 1) * length] = part
        return dq, *(_scattered(each, group) for each in sums), None


def _all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[B, H, S/n, D] -> [B, H, S, D]"""
    n = dist.get_world_size(group)
    sent = x.movedim(2, 0).contiguous()
    got = _wire.wait_tensor(_wire.all_gather_into_tensor(sent, n, group.group_name))
    return got.movedim(0, 2)


def _scattered(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks of [B, H, S, D], this rank's [B, H, S/n, D] of it."""
    n = dist.get_world_size(group)
    sent = x.movedim(2, 0).contiguous()
    got = _wire.wait_tensor(_wire.reduce_scatter_tensor(sent, "sum", n, group.group_name))
    return got.movedim(0, 2)
