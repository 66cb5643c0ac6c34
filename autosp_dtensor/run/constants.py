"""Buffers whose values a program was built on: masks that a model keeps instead of computing."""

from __future__ import annotations

import torch
from torch import nn

from .._torch import FakeTensor
from ..graph import Origin

__all__ = ["Constants"]


class Constants:
    """Reads buffers while a program is built, and knows whether they have changed since."""

    def __init__(self, live: nn.Module | None) -> None:
        self.live = live
        self._read: list[tuple[Origin, torch.Tensor, int]] = []

    def read(self, origin: Origin) -> torch.Tensor | None:
        """The value of a buffer on the CPU; None for anything else, and in a plan, where a buffer
        has no data: a mask in it then counts as any mask, not as the plain one that it may be."""
        buffer = self._buffer(origin)
        if buffer is None or isinstance(buffer, FakeTensor):
            return None
        self._read.append((origin, buffer, buffer._version))
        return buffer.detach().cpu()

    def unchanged(self) -> bool:
        return all(
            self._buffer(origin) is buffer and buffer._version == version
            for origin, buffer, version in self._read
        )

    def _buffer(self, origin: Origin) -> torch.Tensor | None:
        if self.live is None or origin.kind != "buffer":
            return None
        buffer = self.live.get_submodule(origin.module)._buffers.get(origin.name)
        return None if buffer is None or buffer.is_inference() else buffer
