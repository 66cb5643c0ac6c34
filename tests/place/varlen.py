"""The references of variable-length kernels in their places, as if those ran here in fp64."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen

from autosp_dtensor.place.masks import tiles, varlen
from tests import reference_attention


@pytest.fixture
def flash_attn_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Gives the windows of the calls that were made so far."""
    windows: list[tuple[int, int]] = []
    monkeypatch.setattr(varlen, "TAKES", {"cpu": (torch.float32, torch.float64)})
    monkeypatch.setattr(tiles, "TILE", 4)
    with reference_attention.references_here():
        module: Any = sys.modules["flash_attn"]
        kernel = module.flash_attn_varlen_func

        def counted(*args, **kwargs):
            windows.append(kwargs["window_size"])
            return kernel(*args, **kwargs)

        module.flash_attn_varlen_func = counted
        yield windows


@pytest.fixture
def torch_varlen_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The same with torch's varlen_attn, where flash-attn cannot be imported."""
    windows: list[tuple[int, int]] = []

    def counted(*args, **kwargs):
        windows.append(kwargs["window_size"])
        return reference_attention.varlen_attn(*args, **kwargs)

    counted.__signature__ = inspect.signature(reference_attention.varlen_attn)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", counted)
    monkeypatch.setattr(varlen, "_flash_attn", lambda: None)
    monkeypatch.setattr(varlen, "TAKES", {"cpu": (torch.float32, torch.float64)})
    monkeypatch.setattr(tiles, "TILE", 4)
    return windows
