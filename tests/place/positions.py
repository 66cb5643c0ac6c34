"""Positions of queries and keys, as masks are made of them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["causal", "k_at", "q_at"]


def q_at(length: int) -> Tensor:
    return torch.arange(length)[:, None]


def k_at(length: int) -> Tensor:
    return torch.arange(length)[None, :]


def causal(length: int) -> Tensor:
    return k_at(length) <= q_at(length)
