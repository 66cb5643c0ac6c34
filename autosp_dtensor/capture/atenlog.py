"""Which ATen operations one torch-level call is made of."""

from __future__ import annotations

from typing import Any

from .._torch import TorchDispatchMode

__all__ = ["AtenLog"]


class AtenLog(TorchDispatchMode):
    """Notes which ATen operations one torch-level call is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim":
            self.ops.append(func)
        return func(*args, **(kwargs or {}))
