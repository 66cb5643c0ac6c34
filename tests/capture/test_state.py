"""Changes of state that forward makes are results; what would be lost is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.errors import CaptureError
from autosp_dtensor.graph import Origin, facts
from tests.capture.tracing import IDS, Model, refused, traced
from tests.simulate import assert_program_equals_whole


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
        "  have  after the trace, 1 entries; before it, 0 entries\n"
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
