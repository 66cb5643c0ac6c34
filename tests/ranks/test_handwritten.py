"""Models as people write them: slicing for the shift, complex rotary tables, einops, sequence
first."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests import models
from tests.compare import assert_same_as_one_device
from tests.models_handwritten import titan_cross_entropy
from tests.place import test_along as along
from tests.pool import Rank, run_on_ranks


def handwritten_on_ranks(rank: Rank, name: str, length: int = 16, batch: int = 2) -> None:
    ids = models.random_ids(batch, length)
    labels = models.uneven_labels(ids)
    arguments: dict[str, Any]
    options: dict[str, Any] = {"sharded": ["logits"]}
    if name.startswith("titan"):
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        arguments = {"tokens": ids, "targets": targets}
        options = {"loss": titan_cross_entropy, "sharded": ["out"]}
    elif name == "sequence_first":
        arguments = {"ids": ids.T.contiguous(), "labels": labels.T.contiguous()}
        options = {"seq_dim": 0, "sharded": ["1"]}
    elif name == "nano_gpt":
        arguments = {"idx": ids, "labels": labels}
        options = {"sharded": ["0"]}
    else:
        arguments = {"x": ids, "labels": labels}
    assert_same_as_one_device(
        rank,
        partial(models.build_handwritten, name),
        arguments,
        rank.mesh(sp=rank.world_size),
        **options,
    )


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", models.HANDWRITTEN)
def test_model_equals_one_device(name: str, n: int) -> None:
    run_on_ranks(handwritten_on_ranks, name, n=n)


@pytest.mark.parametrize("length", [13, 7])
@pytest.mark.parametrize("name", models.HANDWRITTEN)
def test_model_equals_one_device_at_lengths_that_sp_does_not_divide(name: str, length: int) -> None:
    run_on_ranks(handwritten_on_ranks, name, length, n=4)


@pytest.mark.parametrize("name", models.HANDWRITTEN)
def test_batch_of_one_and_of_three(name: str) -> None:
    for batch in (1, 3):
        run_on_ranks(handwritten_on_ranks, name, 16, batch, n=2)


def along_on_ranks(rank: Rank, length: int) -> None:
    mesh = rank.mesh(sp=rank.world_size)
    batch = along.pooled_batch(length)
    assert_same_as_one_device(rank, along.Pooled, batch, mesh, sharded=["x"])


@pytest.mark.parametrize(("n", "length"), [(2, 13), (4, 16), (4, 8)])
def test_convolution_cumulative_sum_and_pooling(n: int, length: int) -> None:
    run_on_ranks(along_on_ranks, length, n=n)


def tied_head_is_one_parameter(rank: Rank) -> list[str]:
    import autosp_dtensor as autosp

    model = models.build_handwritten("nano_gpt")
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    split = autosp.parallelize(model, rank.mesh(sp=2))
    assert split is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.wte.weight is model.lm_head.weight
    ids = models.random_ids()
    model(ids, ids)[1].backward()
    assert model.wte.weight is model.lm_head.weight
    assert torch.equal(model.wte.weight.grad, model.lm_head.weight.grad)
    return sorted(model.state_dict())


def test_parallelize_keeps_the_object_its_parameters_and_its_keys() -> None:
    keys = run_on_ranks(tied_head_is_one_parameter, n=2)
    assert keys == [sorted(models.build_handwritten("nano_gpt").state_dict())] * 2
