"""The state of autocast for a device, and running again under it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

__all__ = ["AutocastState", "autocast_state", "under"]

AutocastState = tuple[str, bool, torch.dtype] | None


def autocast_state(kind: str) -> AutocastState:
    """(device type, enabled, dtype); None for devices that have no autocast (meta)."""
    try:
        return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    except RuntimeError:
        return None


def under(state: AutocastState) -> Any:
    """A context in which autocast is as it was."""
    if state is None:
        return contextlib.nullcontext()
    kind, enabled, dtype = state
    return torch.autocast(kind, enabled=enabled, dtype=dtype)
