"""transformers' packed rows and padding, by each of its attention implementations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.integrations.flex_attention as flex_utils
import transformers.masking_utils as masking_utils
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from autosp_dtensor.place.masks import tiles
from tests import models, reference_attention
from tests.model_t import IGNORED
from tests.place.field_cases import assert_reach_only, logits_of
from tests.simulate import Lowered, assert_program_equals_whole
from tests.upcasts import upcasts_stay_in_fp64

FAMILIES = ["llama", "mistral", "gemma3_text"]  # the last two have windows
WAYS = ["sdpa", "eager", "flex_attention", "flash_attention_2"]
LENGTH = models.LENGTH
# torch's compiler, which transformers asks for flex_attention, imports it.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*deprecated")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference functions, as if transformers had imported flash-attn."""
    for name, value in reference_attention.loaded_by_transformers().items():
        monkeypatch.setattr(flash_utils, name, value)


def build(family: str, way: str) -> nn.Module:
    model = models.build_transformers(family, "eager")
    model.config._attn_implementation = way  # transformers refuses flash-attn without a GPU
    return model


def positions_of(*rows: tuple[int, ...]) -> Tensor:
    made = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    return torch.stack(made)


def packed_batch(*rows: tuple[int, ...]) -> dict[str, Tensor]:
    ids, positions = models.random_ids(len(rows)), positions_of(*rows)
    labels = models.uneven_labels(ids).masked_fill(positions == 0, IGNORED)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


class ByReference(nn.Module):
    """transformers' flex_attention with the function of tests/reference_attention.py, since torch
    has no backward of its own on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._modules = model._modules  # the same names
        self.model_of_transformers = [model]

    def forward(self, **batch: Any) -> Any:
        def attend(*args: Any, training: bool = False, **kwargs: Any) -> Tensor:
            return reference_attention.flex_attention(*args, **kwargs)

        block_mask = partial(create_block_mask, BLOCK_SIZE=16)
        with (
            mock.patch.object(flex_utils, "compile_friendly_flex_attention", attend),
            mock.patch.object(masking_utils, "create_block_mask", _uncompiled(block_mask)),
        ):
            return self.model_of_transformers[0](**batch)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, _compile=False, **kwargs: function(*args, **kwargs)


def run(family: str, way: str, n: int, batch: dict[str, Any]) -> Lowered:
    """Split against one device."""
    model, reference = build(family, way), build(family, way)
    if way == "flex_attention":
        reference = ByReference(reference)
    with upcasts_stay_in_fp64():
        return assert_program_equals_whole(model, (), n, reference=reference, **batch)


def kernels(program: Lowered) -> set[str]:
    names = ("scaled_dot_product_attention", "tiled_attention", "_flash_attention_forward")
    return {name for name in names if program.named(name)}


def changed(batch: dict[str, Tensor], row: int, where: slice) -> Tensor:
    ids = batch["input_ids"].clone()
    ids[row, where] = (ids[row, where] + 17) % 40 + 3
    return ids


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_start_anew_are_documents(family: str, way: str, n: int) -> None:
    """Over cuts, at cuts (4, 8, 12), of one token; with flash-attn a batch of one row."""
    for lengths in ((5, 11), (1, 7, 4, 3, 1)):
        batch = packed_batch(lengths)
        program = run(family, way, n, batch)
        assert len(kernels(program)) == 1
        first = lengths[0] if lengths[0] > 1 else lengths[0] + lengths[1]
        start = 0 if lengths[0] > 1 else 1
        other = changed(batch, 0, slice(start, first))
        unchanged = [(0, slice(0, start)), (0, slice(first, LENGTH))]
        assert_reach_only(program, {**batch, "ids": batch["input_ids"]}, other, unchanged)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("way", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_have_their_own_borders(family: str, way: str, n: int) -> None:
    batch = packed_batch((5, 11), (9, 6, 1))
    program = run(family, way, n, batch)
    other = changed(batch, 0, slice(0, 5))
    unchanged = [(0, slice(5, LENGTH)), (1, slice(0, LENGTH))]
    assert_reach_only(program, {**batch, "ids": batch["input_ids"]}, other, unchanged)


@pytest.mark.parametrize(
    ("variant", "n"), [("plain", 2), ("padding", 2), ("padding", 4), ("padding_positions", 4)]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_that_of_one_device(family: str, way: str, variant: str, n: int) -> None:
    run(family, way, n, models.batch_transformers(variant))


class ThreeAxes(nn.Module):
    """Qwen2-VL's decoder: positions of time, height and width, [3, B, S]; [4, B, S] where they
    begin with those of documents."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        config = qwen.Qwen2VLTextConfig(
            vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False, pad_token_id=0,
            attn_implementation="eager", rope_parameters=rope,
        )  # fmt: skip
        self.model = qwen.Qwen2VLTextModel(config)
        self.head = nn.Linear(32, models.VOCABULARY, bias=False)
        self.double()
        models.fill(self)
        config._attn_implementation = "flash_attention_2"

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        states = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return self.head(states)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("lengths", [(LENGTH,), (5, 11)], ids=["one text", "documents"])
def test_fc_089_three_axes_of_positions_reach_flash_attn_as_one_document(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], n: int
) -> None:
    """Three equal rows, of one batch row: its kernel is the one without borders. Documents are said
    by a fourth row, and their borders end at the last token."""
    borders: list[list[int]] = []
    packed_kernel = flash_utils._flash_varlen_fn

    def watched(*args: Any, **kwargs: Any) -> Any:
        borders.append(kwargs["cu_seqlens_q"].tolist())
        return packed_kernel(*args, **kwargs)

    monkeypatch.setattr(flash_utils, "_flash_varlen_fn", watched)
    documents = len(lengths) > 1
    positions = positions_of(lengths).expand(4 if documents else 3, 1, LENGTH).contiguous()
    batch = {"ids": models.random_ids(1), "positions": positions}
    with upcasts_stay_in_fp64():
        program = assert_program_equals_whole(ThreeAxes(), (*batch.values(),), n)
        assert kernels(program) == {"_flash_attention_forward"}
        assert borders == [[0, 5, LENGTH]] * len(borders) and bool(borders) == documents
        other = changed({"input_ids": batch["ids"]}, 0, slice(0, 5))
        before, after = (logits_of(program, {**batch, "ids": x}) for x in (batch["ids"], other))
    differ = (before != after).any(-1)[0]
    assert differ.tolist() == [True] * 5 + [not documents] * (LENGTH - 5)
