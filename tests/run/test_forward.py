"""Calls of a parallelized module or function on a mesh of one, where everything is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import autosp_dtensor as autosp
from autosp_dtensor.api import forward_of
from autosp_dtensor.capture import kept
from tests.run.fake_group import fake_mesh
from tests.run.one_rank import IDS, Model, programs, same, whole

# -- the module stays what it was ------------------------------------------------------------------


def test_module_is_the_same_object_with_the_same_parameters(mesh: DeviceMesh) -> None:
    model = Model(lambda m, x: m.linear(x))
    before = {name: id(p) for name, p in model.named_parameters()}
    state = list(model.state_dict())
    given = autosp.parallelize(model, mesh)
    given(IDS).sum().backward()
    assert given is model and type(model) is Model
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == state
    assert all(p.grad is not None for p in (model.linear.weight, model.embedding.weight))


def test_result_on_one_rank_is_bit_equal_and_so_are_gradients(mesh: DeviceMesh) -> None:
    model = Model(lambda m, x: F.gelu(m.linear(x)).cumsum(1))
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    same(model, reference, IDS)
    whole(model(IDS)).square().sum().backward()
    reference(IDS).square().sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        if want.grad is not None:
            assert torch.equal(got.grad, want.grad)


SAVED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "output": lambda m, x: m.linear(x).exp(),
    "several": lambda m, x: m.linear(x).softmax(-1).rsqrt() * m.dropout(x).sigmoid(),
    "attention": lambda m, x: F.scaled_dot_product_attention(m.linear(x), x, x),
    "loss": lambda m, x: F.cross_entropy(m.linear(x).flatten(0, 1), IDS.flatten() % 8),
    "checkpoint": lambda m, x: checkpoint(lambda y: m.linear(y).exp(), x, use_reentrant=False),
    "write": lambda m, x: m.linear(x).mul_(2).exp_(),
}


@pytest.mark.parametrize("body", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("sp", [1, 2])
def test_no_tensor_of_the_trace_outlives_it(
    body: Callable[[Any, Tensor], Tensor], sp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever autograd saves. What is left would be searched for holders in all of the process."""
    looked = []
    monkeypatch.setattr(kept, "_referrers", lambda tensors: looked.append(tensors) or [])
    with fake_mesh(sp) as group:
        model = autosp.parallelize(Model(body), group)
        model(IDS)
    assert programs(model) == 1 and not looked


def test_function_is_replaced_by_a_new_one(mesh: DeviceMesh) -> None:
    def loss(x: Tensor) -> Tensor:
        """Mean square."""
        return x.square().mean()

    split = autosp.parallelize(loss, mesh)
    x = torch.randn(2, 12, 8)
    assert split is not loss and split.__name__ == "loss" and split.__doc__ == "Mean square."
    assert torch.equal(split(x), loss(x))


def test_hooks_on_the_outside_run_once_for_each_call(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    ran: list[str] = []
    model.register_forward_pre_hook(lambda m, a: ran.append("before"))
    model.register_forward_hook(lambda m, a, o: ran.append("after"))
    model(IDS)
    model(IDS)
    assert ran == ["before", "after"] * 2


def test_copied_module_is_parallelized_on_its_own(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    first = whole(model(IDS))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    assert torch.equal(whole(twin(IDS)), torch.zeros_like(first))
    assert torch.equal(whole(model(IDS)), first)
    assert forward_of(twin) is not forward_of(model)


# -- state -----------------------------------------------------------------------------------------


def _average(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.usage.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    return x * m.usage


def _counted(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * m.count


def _first_time(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "ready"):
        m.ready = True
        return x
    return x * 2


def _remembered(m: Any, x: Tensor) -> Tensor:
    previous = getattr(m, "last", None)
    m.last = x.detach().sum()
    return x if previous is None else x + previous


@pytest.mark.parametrize("body", [_average, _counted, _first_time, _remembered])
def test_state_goes_on_from_call_to_call(mesh: DeviceMesh, body: Any) -> None:
    model = Model(body)
    reference = copy.deepcopy(model)
    buffer = model.usage
    autosp.parallelize(model, mesh)
    for length in (12, 12, 7, 12):
        same(model, reference, IDS[:, :length])
    assert model.usage is buffer
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert model.count == reference.count
    assert hasattr(model, "ready") == hasattr(reference, "ready")


def test_loss_kept_on_self_can_be_trained_on(mesh: DeviceMesh) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.auxiliary = m.linear(x).square().mean()
        return x

    model = Model(body)
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    for each in (model, reference):
        each(IDS)
        each.auxiliary.backward()
    assert torch.equal(model.linear.weight.grad, reference.linear.weight.grad)


def test_mask_in_a_buffer_that_is_overwritten_is_seen(mesh: DeviceMesh) -> None:
    """Its value was proved causal when the program was built."""

    def body(m: Any, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        mask = m.mask[: x.shape[1], : x.shape[1]]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    model = Model(body)
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    torch.testing.assert_close(whole(model(IDS)), reference(IDS))
    for each in (model, reference):
        each.mask[5, 2] = False
    torch.testing.assert_close(whole(model(IDS)), reference(IDS))
    for each in (model, reference):
        each.mask = torch.ones(16, 16, dtype=torch.bool)
    torch.testing.assert_close(whole(model(IDS)), reference(IDS))


# -- calls that are not split ----------------------------------------------------------------------


def test_without_gradient_what_cannot_be_split_runs_as_written(mesh: DeviceMesh) -> None:
    class Cached(nn.Module):
        def forward(self, ids: Tensor, cache: Any = None) -> Tensor:
            if cache is not None:
                cache.seen = ids.sum().item()
            return ids.double().unsqueeze(-1) * 2

    cache = SimpleNamespace()
    model = autosp.parallelize(Cached(), mesh)
    with torch.no_grad():
        model(IDS, cache)
    assert cache.seen == IDS.sum().item() and forward_of(model).last is None
    with pytest.raises(autosp.CaptureError, match="an argument of type SimpleNamespace"):
        model(IDS, cache)


# -- random numbers --------------------------------------------------------------------------------


def test_dropout_draws_anew_at_every_call_and_is_repeated_by_a_seed(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.dropout(x * 0 + 1)), mesh)
    torch.manual_seed(5)
    first, second = whole(model(IDS)), whole(model(IDS))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(whole(model(IDS)), first)


def test_program_without_draws_leaves_the_generator_alone(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    state = torch.get_rng_state()
    model(IDS)
    model(IDS)
    assert torch.equal(torch.get_rng_state(), state)


# -- verify ----------------------------------------------------------------------------------------


def test_verify_says_that_one_rank_is_equal_and_leaves_the_model_as_it_was(
    mesh: DeviceMesh,
) -> None:
    model = autosp.parallelize(Model(lambda m, x: _average(m, m.linear(x)).sum()), mesh)
    model.linear.weight.grad = torch.full_like(model.linear.weight, 3.0)
    state = copy.deepcopy(model.state_dict())
    report = autosp.verify(model, IDS)
    assert report.ok and report.worst.error == 0.0
    assert {row.name for row in report.rows} >= {"loss", "grad linear.weight", "output 0"}
    assert "equal to one device" in str(report)
    torch.testing.assert_close(model.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(model.linear.weight.grad, torch.full_like(model.linear.weight, 3.0))


def test_verify_notices_a_wrong_program(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    from autosp_dtensor.run.program import Program

    model = autosp.parallelize(Model(lambda m, x: m.linear(x).sum()), mesh)
    right = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *a: right(self, *a) * 1.001)
    report = autosp.verify(model, IDS)
    assert not report.ok and "NOT equal to one device" in str(report)
