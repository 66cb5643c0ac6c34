"""Small reference kernels: flex_attention, and those of reference_flash.py, in plain torch.

They stand in for the libraries where those do not run (a CPU; flex_attention's backward there). Not
for speed: each makes all scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference_flash import (
    cute_attn_func,
    cute_attn_varlen_func,
    flash_attn_func,
    flash_attn_varlen_func,
    hopper_attn_func,
    install_flash_attn,
    loaded_by_transformers,
    references_here,
    varlen_attn,
)

__all__ = [
    "cute_attn_func",
    "cute_attn_varlen_func",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "hopper_attn_func",
    "install_flash_attn",
    "loaded_by_transformers",
    "references_here",
    "varlen_attn",
]


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
