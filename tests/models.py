"""The model zoo: `build(name)` gives a small fp64 model, `batch(name, variant)` what its forward
takes.

All have two layers, width 32, vocabulary 64, four query heads and, where the family has groups, two
KV heads. Weights are drawn large enough for attention to matter: with the usual 0.02 a wrong mask
would hardly move the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import models_handwritten as handwritten
from tests.model_t import IGNORED, ModelT, TConfig

VOCABULARY = 64
LENGTH = 16
WINDOW = 5  # smaller than the length, and over every cut

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_BOTH_KINDS = ["sliding_attention", "full_attention"]
_GEMMA = {
    **_GROUPED,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": WINDOW,
    "layer_types": _BOTH_KINDS,
}

# family -> (config class, model class, arguments of the config)
_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        {**_GROUPED, "sliding_window": WINDOW, "head_dim": 8},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES),
}
TRANSFORMERS = tuple(_FAMILIES)

# Gemma 2 caps its scores, so transformers itself refuses sdpa for it.
TRANSFORMERS_SDPA = tuple(family for family in TRANSFORMERS if family != "gemma2")


def build_transformers(family: str, attention: str = "sdpa", **overrides: Any) -> nn.Module:
    import transformers

    config_class, model_class, arguments = _FAMILIES[family]
    config = getattr(transformers, config_class)(
        **{**arguments, "attn_implementation": attention, "use_cache": False, **overrides}
    )
    model = getattr(transformers, model_class)(config).double()
    fill(model)
    return model.train()


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Weights that do not depend on what else drew random numbers: matrices 0.2*randn, the rest
    moved by 0.1*randn."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim >= 2:
            parameter.copy_(0.2 * drawn)
        else:
            # The weight of a norm starts at 1 or 0 and stays near it; the bias of a linear map,
            # random below 0.5, starts at 0.
            parameter.copy_(parameter.round() + 0.1 * drawn)


_HANDWRITTEN: dict[str, Callable[[], nn.Module]] = {
    "nano_gpt": handwritten.NanoGPT,
    "titan_gqa": lambda: handwritten.TitanLlama(groups="enable_gqa"),
    "titan_repeat": lambda: handwritten.TitanLlama(groups="repeat"),
    "einops": handwritten.EinopsModel,
    "sequence_first": handwritten.SequenceFirst,
}
HANDWRITTEN = tuple(_HANDWRITTEN)


def build_handwritten(name: str) -> nn.Module:
    model = _HANDWRITTEN[name]().double()
    fill(model)
    return model.train()


def build_t(config: TConfig | None = None, **options: Any) -> nn.Module:
    return ModelT(config or TConfig(**options)).train()


def random_ids(batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    """Rows differ, and no id is a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def uneven_labels(ids: Tensor) -> Tensor:
    """Labels for which a mean of the ranks' means is wrong, and for which the last of four ranks
    has no target at all.

    Slot i is the target of token i. Slots 7 and 11 lie at the cuts of 16 tokens; by rank the counts
    are 3 and 6 on sp=2, and 2, 1, 6, 0 on sp=4.
    """
    labels = torch.full_like(ids, IGNORED)
    for row in range(ids.shape[0]):
        for slot in (0, 7, 8, 9, 10, 11) if row % 2 == 0 else (2, 9, 11):
            if slot + 1 < ids.shape[1]:
                labels[row, slot + 1] = ids[row, slot + 1]
    return labels


def late_labels(ids: Tensor, first: int) -> Tensor:
    """Only from `first` on: with a prompt of that length, the first ranks have no target."""
    labels = ids.clone()
    labels[:, :first] = IGNORED
    return labels


VARIANTS = ("plain", "positions", "padding", "padding_positions")


def batch_transformers(variant: str, batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """`plain`: ids and labels. `positions`: restart in one row. `padding*`: three pads at the left
    of row 0 only."""
    ids = random_ids(batch, length)
    labels = uneven_labels(ids)
    made = {"input_ids": ids, "labels": labels}
    if variant == "positions":
        made["position_ids"] = torch.arange(length).repeat(batch, 1)
        made["position_ids"][0] = torch.cat([torch.arange(5), torch.arange(length - 5)])
    if variant.startswith("padding"):
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        labels[0, :4] = IGNORED  # no target at a pad, and none predicted from a pad
        made["attention_mask"] = mask
    if variant == "padding_positions":
        # Counted from the first real token; the other row permuted, since a rotary embedding does
        # not see an offset.
        made["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        made["position_ids"][1] = (torch.arange(length) * 7 + 3) % length
    return made
