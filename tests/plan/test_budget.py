"""What "auto" counts with is never below what a step takes, and close to it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from autosp_dtensor._torch import backward_under_modes
from autosp_dtensor.plan.configs import model_maker
from autosp_dtensor.plan.measure import Setting, fake_group, measure
from autosp_dtensor.run import budget

pytest.importorskip("transformers")
Measured = sys.modules[measure.__module__]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SIZES = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "tied": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "model_type": "qwen3", "head_dim": 64},
    "phi3": {**SIZES, "model_type": "phi3"},
    "olmo2": {**SIZES, "model_type": "olmo2"},
    "gpt2": {"model_type": "gpt2", "vocab_size": 4096, "n_embd": 512, "n_layer": 3, "n_head": 8,
             "n_positions": 1 << 15, "resid_pdrop": 0, "attn_pdrop": 0, "embd_pdrop": 0,
             "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLMLoss"},
}  # fmt: skip


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Filled while a program is made: bytes that regions may keep, and that they do."""
    seen: dict[str, int] = {}
    real = budget.policy_of

    def policy_of(regions: Any, mode: Any, device: Any, room: int, **options: Any) -> Any:
        policy = real(regions, mode, device, room, **options)
        kept = sum(n * each.bytes for r in regions for n, each in policy.of(r, regions[r]))
        seen.update(room=room, kept=kept, all=not policy.choices)
        return policy

    monkeypatch.setattr(budget, "policy_of", policy_of)
    return seen


def step_that_holds(
    held: list[Any], model: Any, optimizer: Any, inputs: dict[str, torch.Tensor]
) -> None:
    out = model(**inputs)
    held[:] = [out]
    backward_under_modes(out.loss)
    held.clear()
    del out
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "length", "tile", "above"),
    [*((kind, 12288, "none", 1.01) for kind in KINDS), ("llama", 2048, "none", 1.15)]
    + [(kind, 12288, 512, 1.12) for kind in ("tied", "gpt2")],
)
def test_budget_is_close_to_the_peak_and_never_below(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int, tile: str | int, above: float
) -> None:
    """Of a step that finds gradients of an earlier one: the fullest that a step can be. At 12k
    tokens that is the moment of the loss, whose parts are exact; at 2k, and by tiles, the last
    block's backward, for which what it keeps itself is counted twice. Results are held, as a loop
    may that logs them.
    """
    held: list[Any] = []
    monkeypatch.setattr(Measured, "_step", lambda *given: step_that_holds(held, *given))
    _, make = model_maker(KINDS[kind])
    rest: dict[str, Any] = {"tile": tile, "accumulated": True}
    with fake_group(4):
        least = measure(Setting(make, 1, 4, "full", **rest), length).peak
        seen = counted(monkeypatch)
        given = int(least * 1.2)
        step = measure(Setting(make, 1, 4, "auto", budget=given, **rest), length)
    assert seen["kept"] and not seen["all"]
    assert step.peak <= given - seen["room"] + seen["kept"] <= above * step.peak
