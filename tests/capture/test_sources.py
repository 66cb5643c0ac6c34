"""Where a trace's tensors come from, and what its nodes know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from tests.capture.tracing import IDS, Model, line, same, traced
from tests.simulate import assert_program_equals_whole

GLOBAL = torch.linspace(0, 1, 8, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tensors_of_closures_and_globals_are_constants(n: int) -> None:
    closed = torch.linspace(1, 2, 8, dtype=torch.float64, requires_grad=True)
    program = assert_program_equals_whole(
        Model(lambda m, x: x * closed + GLOBAL + closed.sum()), (IDS,), n
    )
    assert len(program.captured.consts) == 2
    assert any(value is closed for value in program.captured.consts.values())


def test_constant_given_by_keyword_is_a_constant() -> None:
    weight = torch.rand(8, dtype=torch.float64)
    same(lambda m, x: F.cross_entropy(x.flatten(0, 1), IDS.flatten() % 8, weight=weight))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tied_weights_are_one(n: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
            self.head = nn.Linear(8, 16, bias=False, dtype=torch.float64)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids).cumsum(1))

    program = assert_program_equals_whole(Tied(), (IDS,), n)
    states = [node for node in program.captured.graph.nodes if node.op == "get_attr"]
    assert len(states) == 1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_module_called_twice_stands_twice_in_the_trace(n: int) -> None:
    program = assert_program_equals_whole(
        Model(lambda m, x: m.linear(m.linear(x).cumsum(1))), (IDS,), n
    )
    paths = [call.scope.path for call in program.captured.calls]
    assert paths == ["", "embedding", "linear", "linear"]


@pytest.mark.parametrize("n", [1, 2])
def test_module_that_is_not_registered_is_traced(n: int) -> None:
    model = Model(lambda m, x: m.hidden[0](x))
    model.hidden = [nn.Linear(8, 8, dtype=torch.float64)]
    assert_program_equals_whole(model, (IDS,), n)


def test_rows_of_a_tensor_can_be_iterated() -> None:
    same(lambda m, x: torch.stack([row.softmax(-1) for row in x]))


def test_every_node_knows_its_module_its_line_and_its_shape() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return m.linear(x).exp()

    captured = traced(Model(body))
    calls = {node.name: facts(node) for node in captured.graph.nodes if node.op == "call_function"}
    assert set(calls) == {"embedding", "linear", "exp"}
    assert [s.path for s in calls["linear"].scope] == ["", "linear"]
    assert calls["linear"].source == f"linear (test_sources.py:{line(body, 1)})"
    assert calls["exp"].source == f"test_sources.py:{line(body, 1)}"
    assert calls["exp"].meta.shape == (2, 12, 8) and calls["exp"].meta.dtype == torch.float64
    assert calls["exp"].meta.requires_grad


def test_graph_is_the_same_when_traced_again() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[..., 0] = 1
        return y * m.linear(x)

    model = Model(body)
    first, second = (
        [(n.op, str(n.target).split(" at ")[0], n.args) for n in traced(model).graph.nodes]
        for _ in range(2)
    )
    assert repr(first) == repr(second)
