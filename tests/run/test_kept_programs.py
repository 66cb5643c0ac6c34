"""A program is kept for what it depends on, and traced anew when that changes."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp_dtensor as autosp
from autosp_dtensor.place.masks import tiles
from tests.run.one_rank import IDS, Model, programs, same, whole


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


def test_masks_are_found_anew_for_values_written_past_autograd(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `.data`: tensors and their versions stay the same."""
    monkeypatch.setattr(tiles, "TILE", 4)

    def body(model: Any, x: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=model.rows == model.columns)[:, 0]

    model = Model(body)
    model.register_buffer("rows", torch.zeros(2, 1, 12, 1))
    model.register_buffer("columns", torch.zeros(2, 1, 1, 12))
    reference = copy.deepcopy(model)
    autosp.parallelize(model, mesh)
    for documents in (torch.arange(12) // 5, torch.arange(12) // 2, torch.arange(12) // 7):
        for each in (model, reference):
            each.rows.data.copy_(documents[:, None])
            each.columns.data.copy_(documents)
        torch.testing.assert_close(whole(model(IDS)), reference(IDS))
    assert programs(model) == 1


def test_masks_keep_nothing_alive() -> None:
    mask = object.__new__(tiles.TileMask)
    mask._known = None
    monkey: Any = mask
    monkey._find_bands = lambda leaves: []
    leaf = torch.zeros(3)
    mask.bands([leaf])
    held = weakref.ref(leaf)
    del leaf
    assert held() is None


def scaled_layer() -> tuple[type[nn.Module], Callable[[float], None]]:
    """A class whose forward reads a variable around it, and what sets that."""
    scale = 1.0

    def put(value: float) -> None:
        nonlocal scale
        scale = value

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    return Layer, put


@pytest.mark.parametrize("which", [0, 1])
def test_variables_around_each_function_of_one_code_are_watched(
    mesh: DeviceMesh, which: int
) -> None:
    """Classes that one factory made share the code of their forward, not its variables."""
    made = [scaled_layer(), scaled_layer()]
    model = Model(lambda m, x: m.second(m.first(x)))
    model.first, model.second = (cls() for cls, _ in made)
    model = autosp.parallelize(model, mesh)
    before = whole(model(IDS))
    made[which][1](3.0)
    torch.testing.assert_close(whole(model(IDS)), before * 3)
