"""Grad mode, autocast and checkpoints, and functions that torch does not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autosp_dtensor.graph import facts
from tests.capture.tracing import IDS, Model, same, traced
from tests.simulate import assert_program_equals_whole


def _no_grad_block(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.linear(x).square().mean(-1, keepdim=True)
    return x * scale


@torch.no_grad()
def _quiet(x: Tensor) -> Tensor:
    return x.softmax(-1)


def _grad_enabled_inside(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = m.linear(x)
    return y + z


def _set_grad(m: Any, x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    y = m.linear(x)
    torch.set_grad_enabled(True)
    return y * x


def _quiet_views(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        a, b = x.chunk(2, -1)
    return x[..., :4] * a + b


@pytest.mark.parametrize(
    "body",
    [_no_grad_block, lambda m, x: x * _quiet(x), _grad_enabled_inside, _set_grad, _quiet_views,
     lambda m, x: x * x.detach(), lambda m, x: x - x.data],
)  # fmt: skip
def test_gradient_is_switched_off_where_the_model_does_it(body: Any) -> None:
    same(body)


def test_call_without_gradient_is_traced_without() -> None:
    with torch.no_grad():
        captured = traced(Model(lambda m, x: m.linear(x)))
    output = next(n for n in captured.graph.nodes if n.op == "output")
    assert not facts(output).outs[0].requires_grad


def _low(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.linear(x.float()).softmax(-1)


def _low_then_high(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.linear(x.float())
        with torch.autocast("cpu", enabled=False):
            z = y.float() @ y.float().mT
    return z


@pytest.mark.parametrize("body", [_low, _low_then_high])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_autocast_inside_forward_is_kept(body: Any, n: int) -> None:
    model = Model(body)
    model.linear.float()
    assert_program_equals_whole(model, (IDS,), n, gradients=False)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_autocast_around_the_call_and_off_inside_is_kept(n: int) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        heads = m.linear(x.float()).unflatten(-1, (4, 2)).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            h = heads.float()
            out = ((h @ h.mT) * 0.5).softmax(-1) @ h
        return m.linear(out.transpose(1, 2).flatten(2))

    model = Model(body)
    model.linear.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_program_equals_whole(model, (IDS,), n, gradients=False)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoint_inside_the_model_is_seen_and_changes_nothing(
    use_reentrant: bool, n: int
) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.linear, x.cumsum(1), use_reentrant=use_reentrant).exp()

    # With reentrant checkpoints torch has no autograd.grad; the program's own are not reentrant.
    program = assert_program_equals_whole(Model(body), (IDS,), n, gradients=not use_reentrant)
    assert [c.scope.path for c in program.captured.calls if c.checkpointed] == ["linear"]


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_autograd_function_is_one_node() -> None:
    captured = traced(Model(lambda m, x: Clipped.apply(x, 0.5)))
    names = [n.target.__name__ for n in captured.graph.nodes if n.op == "call_function"]
    assert names == ["embedding", "Clipped"]


def test_autograd_function_keeps_its_backward() -> None:
    assert_program_equals_whole(Model(lambda m, x: Clipped.apply(x, 0.5)), (IDS,), 1)


clipped = Clipped.apply  # as most code keeps it


def test_autograd_function_kept_by_its_bound_method_is_one_node_too() -> None:
    captured = traced(Model(lambda m, x: clipped(x, 0.5)))
    names = [n.target.__name__ for n in captured.graph.nodes if n.op == "call_function"]
    assert names == ["embedding", "Clipped"]
    assert_program_equals_whole(Model(lambda m, x: clipped(x, 0.5)), (IDS,), 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
def test_compiled_function_is_traced_through() -> None:
    @torch.compile
    def inner(x: Tensor) -> Tensor:
        return x.relu() * 2

    captured = traced(Model(lambda m, x: inner(x)))
    names = [n.target.__name__ for n in captured.graph.nodes if n.op == "call_function"]
    assert names == ["embedding", "relu", "mul"]
