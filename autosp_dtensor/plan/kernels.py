"""Attention takes the memory of a GPU's kernel in a plan, which runs the CPU's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._torch import TorchDispatchMode, TorchFunctionMode
from ..cost import workspace

__all__ = ["KernelDropout", "KernelWorkspace"]


class KernelDropout(TorchFunctionMode):
    """Attention takes no memory for its dropout, as a GPU's kernels take none: they draw again in
    backward. The CPU has no such kernel, and would count all pairs of tokens."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:]), dict(kwargs or {})
            kwargs.pop("dropout_p", None)
        return func(*args, **(kwargs or {}))


class KernelWorkspace(TorchDispatchMode):
    """Attention's backward holds the workspace of a GPU's kernel; the CPU's has next to none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        held = None
        name = func.__name__.partition(".")[0]
        if "attention" in name and name.endswith("_backward"):
            _, query, key, value = args[:4]
            batch, heads, tokens, width = query.shape
            keys, wide = key.shape[2], value.shape[3]
            sizes = heads, key.shape[1], batch * tokens, batch * keys, width, wide
            held = query.new_empty(workspace(*sizes, query.element_size()), dtype=torch.uint8)
        result = func(*args, **(kwargs or {}))
        del held
        return result
