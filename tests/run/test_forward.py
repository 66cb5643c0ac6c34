"""Calls of a parallelized module or function on a mesh of one, where everything is computed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autosp_dtensor as autosp
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


# -- programs are kept for what they depend on -----------------------------------------------------


def test_program_is_traced_once_for_each_shape_mode_and_value(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    for _ in range(3):
        model(IDS)
        model(IDS + 1 - 1)
    assert programs(model) == 1
    model(IDS[:, :7])
    assert programs(model) == 2
    model.eval()
    model(IDS)
    assert programs(model) == 3
    with torch.no_grad():
        model(IDS)
    assert programs(model) == 4
    model.train()
    model.linear.weight.requires_grad_(False)
    model(IDS)
    assert programs(model) == 5
    model.linear.weight.requires_grad_(True)
    model(IDS)
    assert programs(model) == 5


def test_weights_are_read_at_every_call(mesh: DeviceMesh) -> None:
    model = Model(lambda m, x: m.linear(x))
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    model(IDS)
    for each in (model, reference):
        with torch.no_grad():
            each.linear.weight.mul_(2)
            each.linear.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
            each.table = each.table + 1
    same(model, reference, IDS)
    assert programs(model) == 1


def test_module_swapped_in_is_used(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    model(IDS)
    model.linear = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)).double()
    assert torch.equal(whole(model(IDS)), model.linear(model.embedding(IDS)))


def _scaled(model: Model) -> None:
    model.scale = 3.0


def _list(model: Model) -> None:
    model.sizes[0] = 5


def _config(model: Model) -> None:
    model.config.scale = 3.0


def _inner(model: Model) -> None:
    model.config.inner.power = 2


def _dropout(model: Model) -> None:
    model.dropout.p = 0.0


def _new(model: Model) -> None:
    model.config = SimpleNamespace(scale=0.5, inner=SimpleNamespace(power=3))


def _all(m: Any, x: Tensor) -> Tensor:
    x = x * m.scale * m.sizes[0] * m.config.scale
    return m.dropout(x.pow(m.config.inner.power) * 0 + 1) * 0 + x.pow(m.config.inner.power)


@pytest.mark.parametrize("change", [_scaled, _list, _config, _inner, _new])
def test_attribute_changed_by_the_user_is_seen(
    mesh: DeviceMesh, change: Callable[[Model], None]
) -> None:
    model = Model(_all)
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    same(model, reference, IDS)
    change(model)
    change(reference)
    same(model, reference, IDS)


def test_dropout_changed_by_the_user_is_seen(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.dropout(x * 0 + 1)), mesh)
    assert set(whole(model(IDS)).unique().tolist()) == {0.0, 2.0}
    _dropout(model)
    assert set(whole(model(IDS)).unique().tolist()) == {1.0}


def test_forward_changed_by_the_user_is_seen_or_refused(mesh: DeviceMesh) -> None:
    model = autosp.parallelize(Model(lambda m, x: x), mesh)
    first = whole(model(IDS))
    model.body = lambda m, x: x * 2
    assert torch.equal(whole(model(IDS)), first * 2)


def test_many_programs_are_warned_of(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = autosp.parallelize(Model(lambda m, x: x), mesh)
    with caplog.at_level(logging.WARNING, "autosp_dtensor"):
        for length in range(1, 17):
            model(torch.zeros(1, length, dtype=torch.int64))
    assert [record.getMessage() for record in caplog.records] == [
        "16 programs traced for one module; each new shape or Python value is traced once: pad "
        "lengths to a few sizes, pass numbers that change (a count, a scale) as tensors"
    ]


def test_what_was_traced_is_logged(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    model = autosp.parallelize(Model(lambda m, x: m.linear(x)), mesh)
    with caplog.at_level(logging.INFO, "autosp_dtensor"):
        model(IDS)
        model(IDS)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("traced Model(i64[2, 12]) in ")
    nothing = "no collective; 0 B sent per rank"
    assert text.endswith(f"a step: forward {nothing}, backward {nothing}")


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
