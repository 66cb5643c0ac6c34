"""What a model repeats is a region of its own, whatever holds it: `checkpoint=` is for those."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autosp_dtensor as autosp
from autosp_dtensor.run import block_paths
from tests.run.fake_group import fake_mesh


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Held(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        each: Iterable[Any] = (
            self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers
        )  # type: ignore[assignment]
        for layer in each:
            x = layer(x)
        return x


HOLDERS: dict[str, Callable[[], nn.Module]] = {
    "list": lambda: Held(nn.ModuleList([Layer(), Layer(), Layer()])),
    "dict": lambda: Held(nn.ModuleDict({"0": Layer(), "1": Layer(), "2": Layer()})),
    "sequence": lambda: Held(nn.Sequential(Layer(), Layer(), Layer())),
    "root": lambda: nn.Sequential(Layer(), Layer(), Layer()),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_repeated_layers_are_regions_that_are_checkpointed(
    holder: Callable[[], nn.Module],
) -> None:
    model = holder()
    with fake_mesh(2) as group:
        autosp.parallelize(model, group, checkpoint="full", check_ranks=False)
        model(torch.randn(2, 12, 8))
        text = str(autosp.explain(model))
    assert "and 1 more like it" in text and "operations run again" in text


def test_single_layers_in_a_sequence_or_a_dict_are_none() -> None:
    whole = nn.ModuleDict(
        {
            "table": nn.Embedding(16, 8),
            "first": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            "layers": nn.ModuleList([Layer(), Layer()]),
            "last": Layer(),
        }
    )
    assert block_paths(whole) == {"layers.0", "layers.1"}
    assert block_paths(nn.Sequential(nn.Embedding(16, 8), Layer(), Layer(), nn.Linear(8, 8))) == {
        "1", "2"
    }  # fmt: skip
