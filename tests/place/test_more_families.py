"""Attention as more of transformers' families write it: ALiBi, MLA, sinks, chunks, both ways, and
positions relative to each other. All unmodified, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from autosp_dtensor.place.masks import tiles
from tests import models
from tests.simulate import assert_program_equals_whole
from tests.upcasts import upcasts_stay_in_fp64

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # ALiBi, one key head
    "Falcon": ("ForCausalLM", {
        **_SIZES, "alibi": True, "multi_query": True, "new_decoder_architecture": False,
        "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "Mpt": ("ForCausalLM", {
        "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    # MLA: values of another size, one rotary key head for all heads
    "DeepseekV3": ("ForCausalLM", {
        **_SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2}),
    # sinks, a window in every other layer, experts
    "GptOss": ("ForCausalLM", {
        **_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 4}),
    # chunks of 4 tokens, and layers without
    "Llama4Text": ("ForCausalLM", {
        **_GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 4,
        "moe_layers": [], "interleave_moe_layer_step": 100}),
    "Cohere2": ("ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    # both ways; with windows both ways
    "Bert": ("ForMaskedLM", {**_SIZES, **_NO_DROPOUT}),
    "ModernBert": ("ForMaskedLM", {
        **_SIZES, "global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1,
        "sep_token_id": 2}),
    # scores of content with position and of position with content
    "DebertaV2": ("ForMaskedLM", {
        **_SIZES, **_NO_DROPOUT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "max_relative_positions": 8}),
    "XLNet": ("LMHeadModel", {
        "vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "dropout": 0.0}),
}  # fmt: skip
EAGER = ("Falcon", "Mpt", "DeepseekV3", "GptOss", "Llama4Text", "ModernBert", "DebertaV2", "XLNet")
SDPA = ("Falcon", "DeepseekV3", "Llama4Text", "Cohere2", "Bert", "ModernBert")
CASES = [*((name, "eager") for name in EAGER), *((name, "sdpa") for name in SDPA)]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


@pytest.mark.parametrize(("variant", "n"), [("plain", 4), ("padding", 4), ("padding", 2)])
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_family_is_that_of_one_device(family: str, attention: str, variant: str, n: int) -> None:
    if (family, attention, variant) == ("Falcon", "sdpa", "padding"):
        # torch's flash kernel on a CPU (2.13) has a wrong gradient for rows that a mask of finite
        # numbers forbids whole. One device takes another kernel, since one key head is broadcast;
        # so do ranks that have more than one query head.
        n = 2
    head, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        **sizes, attn_implementation=attention, use_cache=False
    )
    config._experts_implementation = "batched_mm"  # others have shapes that depend on data
    name = {"Llama4Text": "Llama4", "XLNet": "XLNet"}.get(family, family) + head
    model = getattr(transformers, name)(config).double().train()
    models.fill(model)
    with upcasts_stay_in_fp64():
        assert_program_equals_whole(model, (), n, **models.batch_transformers(variant))


@pytest.mark.parametrize("hint", [None, True, False])
def test_torchs_encoder_takes_a_mask_with_and_without_a_hint(hint: bool | None) -> None:
    """Without one torch looks whether the mask is causal; the trace need not."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(12).double()
    x = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0)).double()
    assert_program_equals_whole(encoder, (x,), 2, mask=mask, is_causal=hint)
