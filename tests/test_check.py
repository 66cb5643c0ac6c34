"""`verify` on one rank: what it compares, and what it says where a call is random by design."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp_dtensor as autosp
from autosp_dtensor.errors import UsageError
from tests.run.fake_group import fake_mesh

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1) as made:
        yield made


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(p)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.dropout(self.embedding(ids)).cumsum(1)).square().mean()


def test_dropout_is_named_where_it_makes_the_values_differ(mesh: DeviceMesh) -> None:
    report = autosp.verify(autosp.parallelize(Dropping(0.5), mesh), IDS)
    assert not report.ok
    line = Dropping.forward.__code__.co_firstlineno + 1
    assert report.random == (f"dropout, dropout (test_check.py:{line})",)
    assert str(report).split("\n")[-3:] == [
        "the call draws random numbers, by design others than one device draws:",
        f"  dropout, dropout (test_check.py:{line})",
        "verify it without: model.eval(), or dropout 0",
    ]


@pytest.mark.parametrize("how", ["eval", "p=0"])
def test_report_says_nothing_of_random_numbers_where_none_are_drawn(
    mesh: DeviceMesh, how: str
) -> None:
    model = autosp.parallelize(Dropping(0.0 if how == "p=0" else 0.5), mesh)
    report = autosp.verify(model.train(how == "p=0"), IDS)
    assert report.ok and report.random == ()
    assert str(report).endswith("equal to one device (tolerance 1e-14)")


def test_difference_that_is_not_random_is_not_put_down_to_it(mesh: DeviceMesh) -> None:
    class Wrong(Dropping):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            Wrong.calls += 1
            return super().forward(ids) * Wrong.calls

    report = autosp.verify(autosp.parallelize(Wrong(0.0), mesh), IDS)
    assert not report.ok and "random" not in str(report)


def test_function_cannot_be_verified(mesh: DeviceMesh) -> None:
    function: Any = autosp.parallelize(lambda logits: logits.sum(), mesh)
    with pytest.raises(UsageError) as error:
        autosp.verify(function, torch.ones(2, 12, 8))
    assert re.sub(r":\d+", ":LINE", str(error.value)) == (
        "verify takes a module.\n"
        "  where verify (test_check.py:LINE)\n"
        "  have  Forward\n"
        "  why   it compares the gradients of parameters\n"
        "  fix   verify the module whose output the function takes"
    )


class Biased(nn.Module):
    """Attention whose keys have a bias: scores change by as much for all keys, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 64), nn.Linear(64, 64)
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (p(x).unflatten(-1, (8, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_zero_but_for_rounding_are_equal(
    dtype: torch.dtype, mesh: DeviceMesh
) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        ids, model = torch.randint(16, (2, 64)), Biased().to(dtype)
        model.embedding.weight.data.mul_(3)
        report = autosp.verify(autosp.parallelize(model, mesh, tile=4), ids)
        (row,) = (row for row in report.rows if row.name == "grad k.bias")
        assert report.ok and row.size < 1e-7
