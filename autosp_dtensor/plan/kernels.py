"""Attention takes the memory of a GPU's kernel in a plan, which runs the CPU's."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .._torch import TorchDispatchMode, TorchFunctionMode

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
    """Attention's backward holds sums of the queries' gradients in fp32, and, where several query
    heads share a key head, the gradients of keys and values of each. Source: flash-attention 2,
    csrc/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded, dv_expanded."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        workspace = []
        if "attention" in func.__name__ and func.__name__.partition(".")[0].endswith("_backward"):
            _, query, key, value = args[:4]
            batch, heads, length, _ = query.shape
            workspace = [torch.empty_like(query, dtype=torch.float32)]
            workspace += [query.new_empty(batch, heads, length, dtype=torch.float32)]
            if key.shape[1] != heads:
                sizes = [(*query.shape[:2], *each.shape[2:]) for each in (key, value)]
                workspace += [query.new_empty(size) for size in sizes]
        result = func(*args, **(kwargs or {}))
        del workspace
        return result
