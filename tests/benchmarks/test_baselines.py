"""What the library is compared with is right itself: each baseline on real ranks against the plain
model in one process, in fp64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Rank, run_on_ranks
from tests.upcasts import upcasts_stay_in_fp64

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
KINDS = ("FSDP2", "Ulysses by hand", "gathered keys and values")
NAMES = [
    f"{kind}{full}{compiled}"
    for kind in KINDS
    for full in ("", " + full checkpointing")
    for compiled in ("", ", compiled")
]


def small(heads: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(64, (2, 16))
    labels = ids.clone()
    labels[0, 3:9] = -100
    labels[1, 12:] = -100
    return ids, labels


def grads_of(model: nn.Module, **inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def compare(rank: Rank, name: str) -> None:
    sys.path.insert(0, BENCHMARKS)
    from baselines import BASELINES

    ids, labels = batch()
    baseline, mesh = BASELINES[name], rank.mesh(dp=1, sp=rank.world_size)
    with upcasts_stay_in_fp64():
        loss, grads = grads_of(small(), input_ids=ids, labels=labels)
        model: Any = small()
        inputs = baseline(model, mesh, ids, labels)
        found, parts = grads_of(model, **inputs)
    if baseline.splits:
        for each in (found, *parts):
            dist.all_reduce(each)
    # Tracing makes the loss's own upcast to fp32 one (its tensors have a float() of their own):
    # compiled baselines are as close as fp32 logits allow.
    rtol = 1e-5 if baseline.compiled else 1e-10
    torch.testing.assert_close(found.double(), loss, rtol=rtol, atol=0)
    for a, b in zip(parts, grads, strict=True):
        assert (a - b).norm() <= rtol * b.norm()


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_baseline_equals_one_process(name: str) -> None:
    run_on_ranks(compare, name, n=2)


def test_every_baseline_is_tested() -> None:
    from baselines import BASELINES

    assert list(BASELINES) == NAMES
