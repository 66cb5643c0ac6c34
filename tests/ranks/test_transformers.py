"""transformers 5.x, unmodified: loss, logits and every gradient of ten families equal one
process."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import models
from tests.compare import assert_same_as_one_device
from tests.place import test_cross as cross
from tests.pool import Rank, run_on_ranks
from tests.reference_attention import loaded_by_transformers
from tests.upcasts import upcasts_stay_in_fp64

# Each rank has its own core at sp=2; sp=4 repeats what depends on the number of ranks.
SP2_CASES = [
    (family, attention)
    for family in models.TRANSFORMERS
    for attention in ("sdpa", "eager")
    if attention == "eager" or family in models.TRANSFORMERS_SDPA
]
SP4_CASES = [
    (family, "sdpa" if family in models.TRANSFORMERS_SDPA else "eager")
    for family in models.TRANSFORMERS
]


def family_on_ranks(rank: Rank, family: str, attention: str, variant: str) -> None:
    build = partial(models.build_transformers, family, attention)
    build()  # imports the family, before the names of fp32 are replaced in it
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(
            rank,
            build,
            models.batch_transformers(variant),
            rank.mesh(sp=rank.world_size),
            sharded=["logits"],
        )


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize(("family", "attention"), SP2_CASES)
def test_family_equals_one_device_on_two_ranks(family: str, attention: str, variant: str) -> None:
    run_on_ranks(family_on_ranks, family, attention, variant, n=2)


@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize(("family", "attention"), SP4_CASES)
def test_family_equals_one_device_on_four_ranks(family: str, attention: str, variant: str) -> None:
    run_on_ranks(family_on_ranks, family, attention, variant, n=4)


@pytest.mark.parametrize("variant", ["plain", "padding_positions"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_eager_attention_equals_one_device_on_four_ranks(family: str, variant: str) -> None:
    run_on_ranks(family_on_ranks, family, "eager", variant, n=4)


def family_by_flash_attn(rank: Rank, family: str, variant: str) -> None:
    import transformers.modeling_flash_attention_utils as flash_utils

    def build() -> Any:
        model = models.build_transformers(family, "eager")
        model.config._attn_implementation = "flash_attention_2"  # refused there without a GPU
        return model

    batch = models.batch_transformers(variant)
    build()
    with upcasts_stay_in_fp64(), mock.patch.multiple(flash_utils, **loaded_by_transformers()):
        assert_same_as_one_device(
            rank, build, batch, rank.mesh(sp=rank.world_size), sharded=["logits"]
        )


@pytest.mark.parametrize(("variant", "n"), [("plain", 2), ("padding", 2), ("padding", 4)])
def test_flash_attention_2_equals_one_device(variant: str, n: int) -> None:
    """With windows; padding is what transformers takes out of rows before it calls the kernel."""
    run_on_ranks(family_by_flash_attn, "mistral", variant, n=n)


def family_in_fp32(rank: Rank, family: str) -> None:
    """As users run it: nothing patched. fp32 sums in another order differ by about 1e-6."""
    attention = "sdpa" if family in models.TRANSFORMERS_SDPA else "eager"
    assert_same_as_one_device(
        rank,
        lambda: models.build_transformers(family, attention).float(),
        models.batch_transformers("plain"),
        rank.mesh(sp=2),
        rtol=2e-5,
    )


@pytest.mark.parametrize("family", models.TRANSFORMERS)
def test_family_as_users_run_it_in_fp32(family: str) -> None:
    run_on_ranks(family_in_fp32, family, n=2)


def llama_called_as(rank: Rank, form: str) -> None:
    batch = models.batch_transformers("plain")
    build = partial(models.build_transformers, "llama")
    if form == "cache":  # the default of every config, also in training
        build = partial(models.build_transformers, "llama", use_cache=True)
    elif form == "num_items":
        batch["num_items_in_batch"] = 20
    elif form == "num_items_tensor":  # what Trainer hands over
        batch["num_items_in_batch"] = torch.tensor(20)
    elif form == "tuple":
        batch["return_dict"] = False
    elif form == "hidden_states":
        batch["output_hidden_states"] = True
    elif form == "no_target":
        batch["labels"] = torch.full_like(batch["labels"], -100)
        batch["num_items_in_batch"] = 20
    elif form == "shift_labels":
        batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    elif form == "logits_to_keep":
        batch["logits_to_keep"] = 0
    build()
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(rank, build, batch, rank.mesh(sp=2))


@pytest.mark.parametrize(
    "form",
    [
        "cache",
        "num_items",
        "num_items_tensor",
        "tuple",
        "hidden_states",
        "no_target",
        "shift_labels",
        "logits_to_keep",
    ],
)
def test_llama_equals_one_device_in_every_form_of_call(form: str) -> None:
    run_on_ranks(llama_called_as, form, n=2)


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that sees every logit, so that none can be wrong unseen."""
    weights = 1 + targets.double() / 64
    return (logits.log_softmax(-1).pow(2).sum(-1) * weights).sum()


def logits_on_ranks(rank: Rank, family: str) -> None:
    attention = "sdpa" if family in models.TRANSFORMERS_SDPA else "eager"
    build = partial(models.build_transformers, family, attention)
    build()
    ids = models.random_ids()
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(
            rank,
            build,
            {"input_ids": ids, "targets": ids},
            rank.mesh(sp=2),
            loss=squared,
            sharded=["logits"],
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_logits_without_labels_feed_a_loss_outside(family: str) -> None:
    run_on_ranks(logits_on_ranks, family, n=2)


def encoder_and_decoder_on_ranks(rank: Rank) -> None:
    mesh = rank.mesh(sp=rank.world_size)
    source, target = cross.ids_of(cross.SOURCE, 1), cross.ids_of(cross.TARGET, 2)
    build = partial(cross.Seq2Seq, "sdpa", 6, 2)
    batch = {"source": source, "target": target, "padding": cross.PADDING}
    assert_same_as_one_device(rank, build, batch, mesh)
    build = partial(cross.small, "t5", "eager", layers=1)
    build()  # imports the family, before the names of fp32 are replaced in it
    labels = target.clone()
    labels[0, 5:] = -100
    batch = {"input_ids": source, "attention_mask": cross.PADDING, "labels": labels}
    with upcasts_stay_in_fp64():
        assert_same_as_one_device(rank, build, batch, mesh)


@pytest.mark.parametrize("n", [2, 4])
def test_encoder_and_decoder_equal_one_device(n: int) -> None:
    """Padded sources of another length than the target: one by hand, 6 heads over 2, and T5."""
    run_on_ranks(encoder_and_decoder_on_ranks, n=n)
