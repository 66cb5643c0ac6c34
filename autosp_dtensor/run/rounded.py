"""Positions that mixed precision has rounded before a call reaches the library."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch import FakeTensor, fsdp_policy
from ..capture import Call

__all__ = ["warn_of_rounded"]

log = logging.getLogger("autosp_dtensor")

# From here on, neighbouring integers are the same number.
_EXACT = {torch.bfloat16: 256, torch.float16: 2048}


def warn_of_rounded(call: Call, live: nn.Module | None) -> None:
    """Say so where FSDP2's MixedPrecisionPolicy has cast an input that looks like positions.

    Only `fully_shard` on the model itself casts what the user passes. Features are not taken for
    positions: those are integers, [S] or [B, S], some of them larger than the dtype tells apart.
    """
    policy = fsdp_policy(live) if live is not None else None
    if policy is None or not policy.cast_forward_inputs or policy.param_dtype not in _EXACT:
        return
    for number, tensor in enumerate(call.tensors):
        if tensor.dtype != policy.param_dtype or isinstance(tensor, (FakeTensor, DTensor)):
            continue
        if tensor.dim() <= 2 and tensor.numel() and _counts(tensor.detach()):
            log.warning(
                "tensor %d of %s(%s) holds integers above %d in %s, which rounds them: FSDP2 has "
                "cast it before forward. Pass positions as integers, or MixedPrecisionPolicy("
                "cast_forward_inputs=False)",
                number,
                call.name,
                call.describe(),
                _EXACT[tensor.dtype],
                str(tensor.dtype).removeprefix("torch."),
            )


def _counts(tensor: torch.Tensor) -> bool:
    whole = (tensor == tensor.round()).all() & (tensor.abs().amax() > _EXACT[tensor.dtype])
    return bool(whole)
