"""A module with every kind of state on a mesh of one, where everything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autosp_dtensor.api import forward_of
from tests.run.fake_group import fake_mesh

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1) as made:
        yield made


class Model(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("usage", torch.zeros(8))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        self.scale = 2.0
        self.sizes = [1, 2]
        self.config = SimpleNamespace(scale=2.0, inner=SimpleNamespace(power=1))
        self.table = torch.linspace(0, 1, 8)
        self.count = 0
        self.body = body
        self.double()

    def forward(self, ids: Tensor) -> Any:
        return self.body(self, self.embedding(ids))


def programs(model: Any) -> int:
    return sum(len(found) for found in forward_of(model).programs.values())


def whole(result: Tensor) -> Tensor:
    """A split result is a DTensor, of which the one rank holds all."""
    return result.to_local() if isinstance(result, DTensor) else result


def same(model: nn.Module, reference: nn.Module, *args: Any) -> None:
    torch.testing.assert_close(whole(model(*args)), reference(*args), rtol=0, atol=0)
