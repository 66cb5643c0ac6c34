"""Writing in place gives what it gives on one device, or is refused by the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.errors import CaptureError
from autosp_dtensor.graph import facts
from tests.capture.tracing import Model, line, refused, same, traced


def _operators(m: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x += 1
    x *= 2
    x -= x.mean(-1, keepdim=True)
    x /= 3
    return x


def _rows(m: Any, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    y[..., 0] = 1
    y[:, 0] = y[:, 0] + x[:, 5]
    return y


def _halves(m: Any, x: Tensor) -> Tensor:
    a, b = x.detach().clone().chunk(2, -1)  # with a gradient torch itself refuses
    a.mul_(2)
    b.add_(a)
    return torch.cat([a, b], -1) * x


def _activation_forgotten(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    F.relu(x, inplace=True)
    return x


def _activation_residual(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = nn.ReLU(inplace=True)(x)
    return x + y


def _dims(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.unsqueeze_(1)
    y.transpose_(1, 2)
    return y.squeeze_(2)


def _read_before(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    before = x * 3
    x.exp_()
    return before + x


def _index_put(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.masked_fill_(y > 0, 0.5)
    y.index_fill_(2, torch.tensor([1, 3]), 2.0)
    return y.clamp_(max=1.5)


@pytest.mark.parametrize(
    "body",
    [_operators, _rows, _halves, _activation_forgotten, _activation_residual, _dims, _read_before,
     _index_put],
)  # fmt: skip
def test_writing_in_place_gives_what_it_gives_on_one_device(
    body: Callable[[Any, Tensor], Tensor],
) -> None:
    same(body)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize(
    "function", [F.relu, F.silu, F.elu, F.leaky_relu, F.hardtanh, F.selu, F.celu, F.relu6, F.mish]
)
def test_activation_in_place_changes_its_argument(
    function: Callable[..., Tensor], positional: bool
) -> None:
    if positional and function not in (F.relu, F.silu, F.selu, F.relu6, F.mish):
        pytest.skip("inplace is not its second argument")

    def body(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        function(x, True) if positional else function(x, inplace=True)
        return x

    same(body)


def test_no_node_of_the_graph_writes_in_place() -> None:
    for body in (_operators, _rows, _halves, _activation_residual):
        captured = traced(Model(body))
        inputs = [torch.ones(2, 12, 8).double()]
        for node in captured.graph.nodes:
            if node.op == "call_function" and node.args and facts(node).meta.shape == (2, 12, 8):
                x = inputs[0].clone()
                others = [x if isinstance(a, torch.fx.Node) else a for a in node.args]
                before = x._version
                try:
                    node.target(*others, **node.kwargs)
                except (RuntimeError, TypeError, IndexError):
                    continue
                assert x._version == before, node.format_node()


def test_reading_a_view_after_its_memory_changed_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        first = x[:, 0]
        x.mul_(2)
        return first + 1

    assert refused(body) == (
        "a tensor is read after its memory was changed through another view.\n"
        f"  node  test_writes.py:{line(body, 4)}\n"
        "  have  arg 0 f64[2, 8]\n"
        "  why   the traced program has no views of one memory: shards do not alias\n"
        "  fix   use the out-of-place form of the operation that writes: x = x + 1, not x.add_(1)"
    )


def _two_views_written(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    first, second = x[:, :6], x[:, 3:]
    first.zero_()
    second.add_(1)
    return x


def _another_view_read(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    other = x[:, 1:4]
    x[:, 0].zero_()
    return other


def _view_of_view(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    x.flatten(1).view(2, 12, 8).add_(1)
    return x


def _detached(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    y = x.detach()
    y.zero_()
    return x


def _data(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    x.data.zero_()
    return x


def _half_through_the_whole(m: Any, x: Tensor) -> Tensor:
    x = x.detach() * 1
    a, b = x.chunk(2, -1)
    x.mul_(2)
    return a + b


def _whole_through_a_half(m: Any, x: Tensor) -> Tensor:
    x = x.detach() * 1
    a, _ = x.chunk(2, -1)
    a.mul_(2)
    return x


_ALIASES = [_two_views_written, _another_view_read, _view_of_view, _detached, _data]


@pytest.mark.parametrize("body", [*_ALIASES, _half_through_the_whole, _whole_through_a_half])
def test_aliases_are_seen(body: Callable[[Any, Tensor], Tensor]) -> None:
    assert "memory was changed through another view" in refused(body)


def _filled_in_parts(m: Any, x: Tensor) -> Tensor:
    """As DeepSeek's keys are made in transformers."""
    y = x.new_empty(x.shape)
    y[..., :3].copy_(x[..., 3:6])
    y[..., 3:].copy_(x[..., 3:].sin())
    return y


def _part_of_a_part(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    part = x[..., :6][:, None, 2:]
    part.mul_(2)
    part.add_(x[0, 0, 0] * 0 + 1)
    total = part.sum()
    x[..., -1].zero_()
    return x + total


def _read_under_no_grad_first(m: Any, x: Tensor) -> Tensor:
    x = m.linear(x)
    x[..., :3].mul_(2)
    with torch.no_grad():
        size = x.abs().max()
    return x / size


@pytest.mark.parametrize("body", [_filled_in_parts, _part_of_a_part, _read_under_no_grad_first])
def test_writes_through_a_part_are_set_in_the_whole(body: Callable[[Any, Tensor], Tensor]) -> None:
    same(body)


def test_adding_to_rows_is_right_or_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = x * 1
        y[:, 0] += x[:, 5]
        return y

    try:
        traced(Model(body))
    except CaptureError:
        return
    same(body)


def _weight_scaled_behind_its_back(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data.mul_(2)
    return m.linear(x)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (lambda m, x: m.linear.weight.mul_(2), "param linear.weight"),
        (_weight_scaled_behind_its_back, "linear.weight"),
        (lambda m, x: m.linear.weight[0].zero_(), "linear.weight"),
        (lambda m, x: x.add_(m.linear.bias.add_(1)), "param linear.bias"),
    ],
)
def test_writing_to_a_parameter_is_refused(body: Any, what: str) -> None:
    def quietly(m: Any, x: Tensor) -> Any:
        with torch.no_grad():
            return body(m, x)

    assert what in refused(quietly).split("\n")[0]


def test_writing_to_an_input_is_refused_with_this_text() -> None:
    def call(x: Tensor) -> Tensor:
        return x.mul_(2)

    with pytest.raises(CaptureError) as error:
        capture(read_call(call, (torch.ones(2, 12, 8),), {}, lambda t: None))
    assert str(error.value) == (
        "forward changes input 0 in place.\n"
        f"  node  test_writes.py:{line(call, 1)}\n"
        "  have  arg 0 f32[2, 12, 8]\n"
        "  why   an input or parameter belongs to the caller; ranks would change their own copies\n"
        "  fix   work on a copy: x = x.clone()"
    )


def _set_weight_data(m: Any, x: Tensor) -> Tensor:
    m.linear.weight.data = m.linear.weight.data / m.linear.weight.data.norm()
    return m.linear(x)


def _set_own_data(m: Any, x: Tensor) -> Tensor:
    y = x * 1
    y.data = y.data * 2
    return y


@pytest.mark.parametrize("body", [_set_weight_data, _set_own_data])
def test_assigning_data_is_refused(body: Callable[[Any, Tensor], Tensor]) -> None:
    assert "data" in refused(body)


def test_out_argument_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.exp(x.detach(), out=y)
        return y

    assert refused(body) == (
        "exp writes to out=.\n"
        f"  node  test_writes.py:{line(body, 2)}\n"
        "  have  arg 0 f64[2, 12, 8]\n"
        "        arg 1 f64[2, 12, 8]\n"
        "  why   the traced program has no views of one memory\n"
        "  fix   assign the result instead"
    )


def _doubled_quietly(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    with torch.no_grad():
        x.mul_(2)
    return x * x


def _cleared_quietly(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    with torch.no_grad():
        x[:, 0] = 0
    return x * x


@pytest.mark.parametrize("body", [_doubled_quietly, _cleared_quietly])
def test_writing_under_no_grad_keeps_the_gradient_or_is_refused(
    body: Callable[[Any, Tensor], Tensor],
) -> None:
    try:
        traced(Model(body))
    except CaptureError:
        return
    same(body)
