"""What is traced is what one device does; what cannot be is refused by the line."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosp_dtensor.capture import Captured, capture, read_call
from autosp_dtensor.errors import CaptureError
from autosp_dtensor.graph import Origin, facts
from tests.simulate import Lowered, assert_program_equals_whole

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    """Embedded tokens [2, 12, 8] through a function of (module, x)."""

    def __init__(self, body: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.body = body
        self.double()

    def forward(self, ids: Tensor) -> Any:
        assert self.body is not None
        return self.body(self, self.embedding(ids))


def same(body: Callable[[Any, Tensor], Any], **options: Any) -> Lowered:
    """On 1, 2 and 3 ranks as on one device."""
    for n in (1, 2, 3):
        program = assert_program_equals_whole(Model(body), (IDS,), n, **options)
    return program


def traced(model: nn.Module, *args: Any) -> Captured:
    return capture(read_call(model, args or (IDS,), {}, lambda t: None))


def refused(body: Callable[[Any, Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as error:
        traced(Model(body))
    return str(error.value)


def line(body: Callable[..., Any], below: int) -> int:
    return body.__code__.co_firstlineno + below


# -- writing in place ------------------------------------------------------------------------------


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
        f"  node  test_trace.py:{line(body, 4)}\n"
        "  why   the traced program has no views of one memory: shards do not alias\n"
        "  fix   use the out-of-place form of the operation that writes: x = x + 1, not x.add_(1)"
    )


def _view_written(m: Any, x: Tensor) -> Tensor:
    x = x * 1
    x[:, 0].zero_()
    return x


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


_ALIASES = [_view_written, _view_of_view, _detached, _data]


@pytest.mark.parametrize("body", [*_ALIASES, _half_through_the_whole, _whole_through_a_half])
def test_aliases_are_seen(body: Callable[[Any, Tensor], Tensor]) -> None:
    assert "memory was changed through another view" in refused(body)


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
        f"  node  test_trace.py:{line(call, 1)}\n"
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
        f"  node  test_trace.py:{line(body, 2)}\n"
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


# -- state -----------------------------------------------------------------------------------------


class Counting(Model):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(body)
        self.register_buffer("usage", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.plain = torch.linspace(0, 1, 8, dtype=torch.float64)
        self.count = 0
        self.seen: list[int] = []
        self.stats = {"calls": 0}
        self.inner = SimpleNamespace(calls=0)


def _average(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.usage.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        m.steps += 1
    return x * m.usage


def _replaced(m: Any, x: Tensor) -> Tensor:
    m.usage = x.detach().sum((0, 1))
    return x / m.usage


def _copied(m: Any, x: Tensor) -> Tensor:
    m.usage.copy_(x.detach().amax((0, 1)))
    return x + m.usage


def _one_element(m: Any, x: Tensor) -> Tensor:
    m.usage[0] = x.detach().sum()
    return x + m.usage


@pytest.mark.parametrize("body", [_average, _replaced, _copied, _one_element])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_buffers_that_forward_writes_are_results(
    body: Callable[[Any, Tensor], Tensor], n: int
) -> None:
    program = assert_program_equals_whole(Counting(body), (IDS,), n)
    assert ("buffer", "usage") in {(o.kind, o.name) for o, _ in program.captured.writes} or (
        ("attr", "usage") in {(o.kind, o.name) for o, _ in program.captured.writes}
    )


def test_tensor_set_on_self_is_a_result() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.auxiliary = x.square().mean()
        return x

    program = assert_program_equals_whole(Counting(body), (IDS,), 2)
    assert [(o, i) for o, i in program.captured.writes] == [(Origin("attr", "", "auxiliary"), 1)]


def test_plain_tensor_attribute_is_read_from_the_model() -> None:
    captured = traced(Counting(lambda m, x: x * m.plain))
    assert Origin("attr", "", "plain") in {facts(n).origin for n in captured.graph.nodes}
    for n in (1, 2, 3):
        assert_program_equals_whole(Counting(lambda m, x: x * m.plain), (IDS,), n)


def test_number_that_forward_changes_is_set_and_watched() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        return x * m.count

    model = Counting(body)
    captured = traced(model)
    assert captured.sets == [("", "count", 1)]
    assert captured.watch.holds()
    model.count = 1
    assert not captured.watch.holds()


def test_flag_set_at_the_first_call_is_set_and_watched() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        if not hasattr(m, "ready"):
            m.ready = True
            return x
        return x * 2

    model = Counting(body)
    captured = traced(model)
    assert captured.sets == [("", "ready", True)]
    assert captured.watch.holds()
    model.ready = True
    assert not captured.watch.holds()


def test_attribute_that_forward_does_not_read_is_not_watched() -> None:
    model = Counting(lambda m, x: x * m.stats["calls"])
    captured = traced(model)
    model.count, model.seen = 7, [1, 2, 3]
    assert captured.watch.holds()
    model.stats["calls"] = 1
    assert not captured.watch.holds()


def test_list_that_grows_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.seen.append(1)
        return x

    with pytest.raises(CaptureError) as error:
        traced(Counting(body))
    assert str(error.value) == (
        "forward changes the list 'self.seen' in place.\n"
        "  node  Counting\n"
        "  why   a traced program runs without the model's Python, so the change would be made "
        "once instead of at every call\n"
        "  fix   return the value from forward, or assign a new object to the attribute"
    )


def _dict_counter(m: Any, x: Tensor) -> Tensor:
    m.stats["calls"] += 1
    return x * m.stats["calls"]


def _list_element(m: Any, x: Tensor) -> Tensor:
    m.body_state[0] = 2
    return x * m.body_state[0]


def _object_counter(m: Any, x: Tensor) -> Tensor:
    m.inner.calls += 1
    return x * m.inner.calls


def test_number_of_an_object_that_forward_changes_is_set_and_watched() -> None:
    model = Counting(_object_counter)
    before = model.inner.calls
    captured = traced(model)
    assert captured.sets == [("", "inner.calls", before + 1)]
    assert captured.watch.holds()
    model.inner.calls += 1
    assert not captured.watch.holds()


@pytest.mark.parametrize("body", [_dict_counter, _list_element])
def test_change_inside_a_container_or_object_is_refused(body: Any) -> None:
    model = Counting(body)
    model.body_state = [1]
    with pytest.raises(CaptureError):
        traced(model)


def test_container_of_tensors_set_on_self_is_a_result_or_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.kept = [x.sum()]
        return x

    try:
        captured = traced(Counting(body))
    except CaptureError:
        return
    held = [value for _, name, value in captured.sets if name == "kept"]
    leaves = [leaf for value in held for leaf in value]
    assert not any(isinstance(leaf, Tensor) for leaf in leaves), "a tensor without data is kept"


def test_live_module_is_untouched() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.count += 1
        m.auxiliary = x.sum()
        with torch.no_grad():
            m.usage.add_(1)
        m.steps = m.steps + 1
        return F.dropout(m.linear(x), 0.5) * torch.rand(8)

    model = Counting(body)
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    before = copy.deepcopy(model.state_dict())
    names = {name: id(value) for name, value in vars(model).items()}
    own = {id(t) for t in [*model.parameters(), *model.buffers()]}
    versions = [t._version for t in [*model.parameters(), *model.buffers()]]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state = torch.get_rng_state()
    traced(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: id(value) for name, value in vars(model).items()} == names
    assert {id(t) for t in [*model.parameters(), *model.buffers()]} == own
    assert [t._version for t in [*model.parameters(), *model.buffers()]] == versions
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(model.linear.weight.grad, torch.ones_like(model.linear.weight))


def test_torch_is_itself_again_after_a_trace_and_after_a_failed_one() -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    non_reentrant = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    traced(Model(lambda m, x: x))
    with pytest.raises(ZeroDivisionError):
        traced(Model(lambda m, x: 1 / 0))
    refused(lambda m, x: x.sum().item())
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert torch.utils.checkpoint._checkpoint_without_reentrant_generator is non_reentrant
    assert torch.overrides._get_current_function_mode() is None


# -- modes -----------------------------------------------------------------------------------------


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


# -- where tensors come from -----------------------------------------------------------------------

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
    assert calls["linear"].source == f"linear (test_trace.py:{line(body, 1)})"
    assert calls["exp"].source == f"test_trace.py:{line(body, 1)}"
    assert calls["exp"].meta.shape == (2, 12, 8) and calls["exp"].meta.dtype == torch.float64
    assert calls["exp"].meta.requires_grad


def test_graph_is_the_same_when_traced_again() -> None:
    model = Model(_rows)
    first, second = (
        [(n.op, str(n.target).split(" at ")[0], n.args) for n in traced(model).graph.nodes]
        for _ in range(2)
    )
    assert repr(first) == repr(second)


# -- functions that torch does not show ------------------------------------------------------------


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


# -- what goes in and comes out --------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Out:
    logits: Tensor
    loss: Tensor | None = None
    name: str = "out"


@dataclass(frozen=True)
class Frozen:
    logits: Tensor


class Odd:
    """Neither container nor tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (x, x.sum()),
        lambda m, x: [x, None, 3, "text"],
        lambda m, x: {"a": x, "b": {"c": [x.sum()]}},
        lambda m, x: OrderedDict(first=x, second=x.sum()),
        lambda m, x: Pair(x, x.sum()),
        lambda m, x: Out(x, x.sum()),
        lambda m, x: Out(x),
        lambda m, x: Frozen(x),
        lambda m, x: (x, x),
        lambda m, x: (),
        lambda m, x: None,
        lambda m, x: m.linear.weight,
        lambda m, x: (m.linear.weight * 2, torch.arange(12), torch.ones(3)),
        lambda m, x: x.shape,
        lambda m, x: (x.dtype, x.device, 2.5, True),
    ],
    ids=range(15),
)
def test_result_has_the_structure_that_forward_returned(body: Any) -> None:
    same(body)


def test_result_of_an_unknown_class_is_copied_with_its_tensors() -> None:
    captured = traced(Model(lambda m, x: Odd(x.exp())))
    made = captured.template.fill([torch.ones(2)])
    assert type(made) is Odd and torch.equal(made.value, torch.ones(2))


def test_same_tensor_twice_in_a_result_is_one_tensor() -> None:
    captured = traced(Model(lambda m, x: {"a": x, "b": (x, x)}))
    made = captured.template.fill([torch.ones(2)])
    assert made["a"] is made["b"][0] is made["b"][1]


def test_transformers_output_keeps_its_class() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def body(m: Any, x: Tensor) -> Any:
        return outputs.CausalLMOutput(loss=x.sum(), logits=x)

    captured = traced(Model(body))
    made = captured.template.fill([torch.tensor(1.0), torch.ones(2)])
    assert type(made) is outputs.CausalLMOutput
    assert made.loss.item() == made["loss"].item() == made[0].item() == 1.0
    assert list(made) == ["loss", "logits"]


class Takes(nn.Module):
    """Nested inputs: tensors anywhere, plain values, and what it makes of them."""

    def forward(self, batch: Any, *rest: Any, scale: float = 1.0, **more: Any) -> Tensor:
        ids, (mask, names) = batch["ids"], batch["more"]
        x = ids.double()[..., None] * torch.arange(4, dtype=torch.float64) * mask[..., None]
        return (x * scale).softmax(-1) * len(names) + sum(r.sum() for r in rest) + more["bias"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_nested_inputs_are_taken_apart(n: int) -> None:
    batch = {"ids": IDS, "more": (IDS > 3, ["a", "b"])}
    assert_program_equals_whole(
        Takes(), (batch, torch.ones(3)), n, scale=0.5, bias=torch.ones(4, dtype=torch.float64)
    )


def test_call_is_described_with_names_shapes_and_values() -> None:
    batch = {"ids": IDS, "more": (IDS > 3, ["a", "b"])}
    call = read_call(Takes(), (batch,), {"scale": 0.5, "mode": None}, lambda t: None)
    assert call.describe() == (
        "dict(i64[2, 12], tuple(bool[2, 12], list('a', 'b'))), scale=0.5, mode=None"
    )
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        call = read_call(Takes(), (torch.ones(2, requires_grad=True),), {}, lambda t: None)
        assert call.describe() == "f32[2] requires_grad, no_grad, ('cpu', torch.bfloat16)"


def _key(*args: Any, **kwargs: Any) -> Any:
    return read_call(len, args, kwargs, lambda t: None).key


def test_key_tells_calls_apart_that_need_programs_of_their_own() -> None:
    x = torch.ones(2, 3)
    keys = [
        _key(x), _key(x.double()), _key(x[:, :2]), _key(x.clone().requires_grad_()), _key(x=x),
        _key([x]), _key((x,)), _key(x, 1), _key(x, 1.0), _key(x, True), _key(x, 2), _key(x, None),
        _key(x, "a"), _key({"a": x}), _key({"b": x}), _key(x, x), _key(x, torch.float32),
    ]  # fmt: skip
    with torch.no_grad():
        keys.append(_key(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(_key(x))
    assert len(set(keys)) == len(keys)
    assert _key(x) == _key(torch.zeros(2, 3))


def test_argument_that_holds_state_is_refused_with_this_text() -> None:
    class Cache:
        pass

    with pytest.raises(CaptureError) as error:
        traced(Takes(), {"ids": IDS}, Cache())
    assert str(error.value) == (
        "an argument of type Cache cannot be traced.\n"
        "  why   forward may read and change it, and a program is traced once\n"
        "  fix   in training pass none (use_cache=False); under torch.no_grad() such calls run "
        "unsharded"
    )


# -- Python that reads values ----------------------------------------------------------------------

_WHY = "  why   the program is traced once, without data, and must be the same on every rank\n"
_FIX = (
    "  fix   use torch.where or a mask of fixed shape instead, or pass the value to forward as a "
    "Python number"
)


def test_item_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x / x.abs().max().item()

    assert refused(body) == (
        "Python reads the value of a tensor: item().\n"
        f"  node  test_trace.py:{line(body, 1)}\n{_WHY}{_FIX}"
    )


def test_branch_on_a_tensor_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        if (y > 0).any():
            y = y * 2
        return y

    assert refused(body) == (
        "Python reads the value of a tensor: bool().\n"
        f"  node  test_trace.py:{line(body, 2)}\n{_WHY}{_FIX}"
    )


def test_nonzero_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.nonzero()

    assert refused(body) == (
        "a shape depends on the value of a tensor: nonzero().\n"
        f"  node  test_trace.py:{line(body, 1)}\n{_WHY}{_FIX}"
    )


READING: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "complex": lambda x: complex(x.sum()),
    "tolist": lambda x: x[0, 0].tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "while": lambda x: [0 for _ in range(3) if x.sum() > 0],
    "equal": lambda x: torch.equal(x, x * 1),
    "allclose": lambda x: torch.allclose(x, x * 1),
    "index": lambda x: [1, 2, 3][x.long().sum()],
    "range": lambda x: range(x.long().sum()),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeats": lambda x: x.repeat_interleave((x[0, :, 0] > 0).long(), 1),
    "slice": lambda x: x[:, : (x > 0).sum()],
    "max of two": lambda x: max(x.sum(), x.mean()),
    "format": lambda x: f"{x.sum():.3f}",
    "assert": lambda x: _checked(x),
    "bincount": lambda x: x.flatten().long().abs().bincount(),
}


def _checked(x: Tensor) -> Tensor:
    assert not x.isnan().any()
    return x


@pytest.mark.parametrize("name", READING)
def test_reading_a_value_is_refused_by_the_line(name: str) -> None:
    def body(m: Any, x: Tensor) -> Any:
        return READING[name](x)

    text = refused(body)
    assert re.search(r"\n  node  test_trace\.py:\d+\n", text), text
    assert "value" in text.split("\n")[0] and "\n  fix   " in text


def test_shapes_and_metadata_can_be_read() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        assert x.dim() == 3 and x.numel() == batch * length * width and x.is_floating_point()
        assert len(x) == batch and x.size(1) == length and x.dtype == torch.float64
        assert x.device.type == "cpu" and x.requires_grad and not x.is_complex()
        return x.view(batch * length, -1) * length / torch.finfo(x.dtype).bits

    same(body)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("register_hook", lambda m, x: x.register_hook(lambda g: g)),
        ("retain_grad", lambda m, x: x.retain_grad()),
        ("backward", lambda m, x: x.sum().backward()),
    ],
)
def test_calls_that_act_outside_the_program_are_refused(name: str, body: Any) -> None:
    assert refused(body).startswith(f"forward calls {name}() on a tensor.\n")


def test_generator_of_the_models_own_is_refused() -> None:
    """It would go on from call to call, where on one device it starts anew."""

    def body(m: Any, x: Tensor) -> Tensor:
        fixed = torch.Generator().manual_seed(0)
        return x * torch.randn(8, generator=fixed)

    assert "enerator" in refused(body).split("\n")[0]


def test_gradient_inside_forward_is_refused() -> None:
    refused(lambda m, x: torch.autograd.grad(x.square().sum(), x, create_graph=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_function_transform_is_refused_with_the_way_out() -> None:
    text = refused(lambda m, x: torch.vmap(lambda row: row.softmax(-1))(x))
    assert text.split("\n")[0] == (
        "a tensor (2, 12, 8) was made where the tracer could not see it."
    )
    assert "autosp.register_rule(fn, ...)" in text


def test_error_of_the_models_own_is_left_as_it_is() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        traced(Model(body))


def test_backward_hook_on_a_module_is_refused() -> None:
    model = Model(lambda m, x: m.linear(x))
    model.linear.register_full_backward_hook(lambda *a: None)
    with pytest.raises(CaptureError, match="a module has a backward hook"):
        traced(model)


def test_forward_hooks_stand_in_the_graph_and_do_not_run_while_tracing() -> None:
    model = Model(lambda m, x: m.linear(x).exp())
    ran: list[str] = []
    model.linear.register_forward_pre_hook(lambda m, a: ran.append("before"))
    model.linear.register_forward_hook(lambda m, a, o: ran.append("after"))
    captured = traced(model)
    names = [n.target.__name__ for n in captured.graph.nodes if n.op == "call_function"]
    names = [name for name in names if name != "getitem"]
    assert names == ["embedding", "hooks_before", "linear", "hooks_after", "exp"]
    assert ran == []
