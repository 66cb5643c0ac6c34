"""What the benchmarks of a step's time share: a small Llama, and the time of one step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

__all__ = ["llama", "seconds"]


def llama(**sizes: Any) -> nn.Module:
    """transformers' Llama with as many key heads as heads; sizes by the names of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = sizes["num_attention_heads"]
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=heads, use_cache=False, **sizes))


def seconds(model: nn.Module, ids: torch.Tensor) -> float:
    """Of the processor, for forward and backward."""
    start = time.process_time()
    model(input_ids=ids, labels=ids).loss.backward()
    taken = time.process_time() - start
    model.zero_grad()
    return taken
