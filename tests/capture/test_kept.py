"""Tensors that forward keeps outside of the model would be lost: refused, by the line that made
them; and nothing else is."""

from __future__ import annotations

import functools
import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosp_dtensor.capture import capture, kept, read_call
from autosp_dtensor.errors import CaptureError
from tests.capture.tracing import Model, line, refused, traced

LOSSES: list[Any] = []
BY_NAME: dict[str, Any] = {}
LAST: Any = None
STATE = SimpleNamespace()
QUEUE: deque[Any] = deque(maxlen=4)


@pytest.fixture(autouse=True)
def _nothing_is_kept_between_tests() -> Any:
    yield
    global LAST
    LAST = None
    LOSSES.clear(), BY_NAME.clear(), QUEUE.clear(), STATE.__dict__.clear(), row.cache_clear()


def test_loss_in_a_global_list_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        loss = x.square().mean()
        y = m.linear(x)
        LOSSES.append(loss)
        return y

    assert refused(body) == (
        "forward keeps a tensor outside of the model.\n"
        f"  node  test_kept.py:{line(body, 1)}\n"
        "  have  mean f64[], held by a list\n"
        "  why   forward's Python runs once, on tensors without data: what it keeps there would "
        "never be filled\n"
        "  fix   return the tensor from forward, or assign it to an attribute of a module of its "
        "own: self.loss = loss"
    )


def _global_name(m: Any, x: Tensor) -> Tensor:
    global LAST
    LAST = x.mean()
    return x


def _closure() -> Callable[[Any, Tensor], Tensor]:
    seen = []

    def body(m: Any, x: Tensor) -> Tensor:
        seen.append(m.linear(x).detach())
        return x

    return body


@functools.cache
def row(length: int) -> Tensor:
    return torch.arange(length)


KEEPING: dict[str, tuple[Any, str]] = {
    "dict": (lambda m, x: BY_NAME.update(loss=x.mean()) or x, "mean f64[], held by a dict"),
    "global": (_global_name, "mean f64[], held by a dict"),
    "closure": (_closure(), "detach f64[2, 12, 8], held by a list"),
    "object": (lambda m, x: setattr(STATE, "h", x * 2) or x, "mul f64[2, 12, 8], held by a "),
    "deque": (lambda m, x: QUEUE.append(x.exp()) or x, "exp f64[2, 12, 8], held by a "),
    "tuple": (lambda m, x: LOSSES.append((x.sum(), 1)) or x, "sum f64[], held by a tuple"),
    "cache": (lambda m, x: x * row(8), "arange i64[8], held by a "),
    "unused": (lambda m, x: LOSSES.append(m.linear.bias) or x, "param linear.bias f64[8], held by"),
    "result too": (lambda m, x: LOSSES.append(x) or x, "embedding f64[2, 12, 8], held by a list"),
    "parameter": (
        lambda m, x: LOSSES.append(m.linear.weight) or m.linear(x),
        "param linear.weight",
    ),
}


@pytest.mark.parametrize("name", KEEPING)
def test_wherever_a_tensor_is_kept_it_is_found(name: str) -> None:
    body, have = KEEPING[name]
    assert f"\n  have  {have}" in refused(body)


def test_what_the_user_has_frozen_is_looked_at_as_well() -> None:
    gc.freeze()
    try:
        assert "held by a list" in refused(lambda m, x: LOSSES.append(x.exp()) or x)
        assert gc.get_freeze_count(), "frozen as before"
    finally:
        gc.unfreeze()


def test_input_that_is_kept_is_refused_as_well() -> None:
    def call(x: Tensor) -> Tensor:
        LOSSES.append(x)
        return x * 2

    with pytest.raises(CaptureError, match=r"node  call\n  have  input 0 f32\[2, 12\], held by"):
        capture(read_call(call, (torch.ones(2, 12),), {}, lambda t: None))


def test_what_was_made_last_is_named_first() -> None:
    """Its gradient holds what was made before it."""

    def body(m: Any, x: Tensor) -> Tensor:
        LOSSES.append(x.exp())
        LOSSES.append(m.linear(x).sum())
        return x

    have = refused(body).split("\n")[2:4]
    assert have == ["  have  sum f64[], held by a list",
                    "        exp f64[2, 12, 8], held by a list"]  # fmt: skip


@pytest.mark.parametrize("where", ["object", "dict"])
def test_tensor_in_a_container_of_the_model_is_refused(where: str) -> None:
    """The trace has a copy of the container: nothing outside holds the tensor."""

    def body(m: Any, x: Tensor) -> Tensor:
        if where == "object":
            m.state.loss = x.mean()
        else:
            m.stats["loss"] = x.mean()
        return x

    model = Model(body)
    model.state, model.stats = SimpleNamespace(calls=1), {"loss": None}
    with pytest.raises(CaptureError) as error:
        traced(model)
    held = "SimpleNamespace 'self.state'" if where == "object" else "dict 'self.stats'"
    assert str(error.value).startswith(
        f"forward keeps a tensor in the {held}.\n  node  Model\n  have  tensors under ['loss']\n"
    )


# -- what is not kept ------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x  # lives as long as the gradient does
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@dataclass
class Out:
    logits: Tensor
    loss: Tensor


class Odd:
    def __init__(self, value: Tensor) -> None:
        self.value, self.me = value, self


def _on_self(m: Any, x: Tensor) -> Tensor:
    m.auxiliary = x.mean()
    m.linear.kept = x.exp()
    return x


def _in_a_ring(m: Any, x: Tensor) -> Tensor:
    ring: list[Any] = [x.exp()]
    ring.append(ring)
    return m.linear(ring[0])


def _caught(m: Any, x: Tensor) -> Tensor:
    try:
        y = x.exp()
        raise KeyError(y)
    except KeyError as error:
        return m.linear(error.args[0])


INNOCENT: dict[str, Any] = {
    "self": _on_self,
    "ring": _in_a_ring,
    "caught": _caught,
    "local": lambda m, x: torch.stack([y.exp() for y in [*x]]),
    "function": lambda m, x: Doubled.apply(x).sum(),
    "checkpoint": lambda m, x: checkpoint(m.linear, x, use_reentrant=False),
    "dataclass": lambda m, x: Out(x, x.sum()),
    "object": lambda m, x: Odd(x.exp()),
    "constant": lambda m, x: x * CONSTANT,
    "list of modules": lambda m, x: m.more[0](x),
}
CONSTANT = torch.ones(8)


@pytest.mark.parametrize("name", INNOCENT)
def test_what_ends_with_the_call_is_not_refused(name: str) -> None:
    model = Model(INNOCENT[name])
    model.more = [nn.Linear(8, 8).double()]
    traced(model)


def test_hooks_that_are_shown_an_object_keep_none() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Out:
            return Out(x.exp(), x.sum())

    model = Model(lambda m, x: m.inner(x).logits)
    model.inner = Inner()
    model.inner.register_forward_hook(lambda m, a, out: None)
    traced(model)


def test_trace_lets_go_of_its_tensors_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection takes longer than a small trace."""
    monkeypatch.setattr(kept.gc, "collect", lambda: pytest.fail("collected"))
    gc.disable()
    try:
        traced(Model(lambda m, x: Out(m.linear(x).relu(), x.sum())))
    finally:
        gc.enable()
