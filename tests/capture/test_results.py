"""What goes in and comes out keeps its structure."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosp_dtensor.capture import read_call
from autosp_dtensor.errors import CaptureError
from tests.capture.tracing import IDS, Model, same, traced
from tests.simulate import assert_program_equals_whole

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
        "  node  Takes\n"
        f"  have  dict(i64[2, 12]), {Cache.__qualname__}\n"
        "  why   forward may read and change it, and a program is traced once\n"
        "  fix   pass tensors, numbers, functions, or lists, dicts and dataclasses of them; in "
        "training no cache (use_cache=False); under torch.no_grad() such calls run unsharded"
    )
