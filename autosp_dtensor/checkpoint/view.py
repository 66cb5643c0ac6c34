"""How a tensor looks at its memory, apart from the memory: what it takes to make it again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._torch import neg_view

__all__ = ["View"]


@dataclass(frozen=True)
class View:
    """Offset and strides count elements of `dtype` from the start of the memory."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> View:
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return View(tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def seen(self, base: torch.Tensor) -> torch.Tensor:
        """The view, of that memory again."""
        with torch.no_grad():
            if self.dtype == base.dtype:
                view = base.as_strided(self.size, self.stride, self.offset)
            else:
                view = torch.empty(0, dtype=self.dtype, device=base.device)
                view.set_(base.untyped_storage(), self.offset, self.size, self.stride)
            view = neg_view(view) if self.is_neg else view
            return view.conj() if self.is_conj else view
