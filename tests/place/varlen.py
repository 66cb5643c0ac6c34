"""flash-attn's reference in its place, as if it ran here in fp64."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from autosp_dtensor.place.masks import tiles, varlen
from tests import reference_attention


@pytest.fixture
def flash_attn_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Gives the windows of the calls that were made so far."""
    windows: list[tuple[int, int]] = []
    names = reference_attention.install_flash_attn()
    module = sys.modules["flash_attn"]
    kernel = module.flash_attn_varlen_func

    def counted(*args, **kwargs):
        windows.append(kwargs["window_size"])
        return kernel(*args, **kwargs)

    monkeypatch.setattr(module, "flash_attn_varlen_func", counted)
    monkeypatch.setattr(varlen, "TAKES", {"cpu": (torch.float32, torch.float64)})
    monkeypatch.setattr(tiles, "TILE", 4)
    yield windows
    for name in names:
        del sys.modules[name]
