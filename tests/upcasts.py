"""Keeps what transformers casts to fp32 (norms, rotary angles, softmax, logits) in fp64, so that
1e-10 can be asked.

The code of the models runs as it is; only the names `torch.float32`, `torch.float` and
`Tensor.float` mean fp64 inside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_PARTS = ("modeling_", "loss", "rope", "attention")


class _TorchIn64(ModuleType):
    """torch, but for the names of fp32. Looked up at each use, so that a patch of torch is seen
    through it."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def upcasts_stay_in_fp64() -> Iterator[None]:
    """While it is on. Models must be imported before, and built and called inside."""
    stand_in = _TorchIn64("torch")
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.")
        and any(part in name for part in _PARTS)
        and vars(module).get("torch") is torch
    ]
    real_float = torch.Tensor.float
    try:
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        for module in modules:
            vars(module)["torch"] = stand_in
        yield
    finally:
        torch.Tensor.float = real_float  # type: ignore[method-assign]
        for module in modules:
            vars(module)["torch"] = torch
