"""Python that reads values, and what acts outside of the program, is refused by the line."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

from autosp_dtensor.errors import CaptureError
from tests.capture.tracing import Model, line, refused, same, traced

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
        f"  node  test_reads.py:{line(body, 1)}\n  have  arg 0 f64[]\n{_WHY}{_FIX}"
    )


def test_branch_on_a_tensor_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        if (y > 0).any():
            y = y * 2
        return y

    assert refused(body) == (
        "Python reads the value of a tensor: bool().\n"
        f"  node  test_reads.py:{line(body, 2)}\n  have  arg 0 bool[]\n{_WHY}{_FIX}"
    )


def test_nonzero_is_refused_with_this_text() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        return x.nonzero()

    assert refused(body) == (
        "a shape depends on the value of a tensor: nonzero().\n"
        f"  node  test_reads.py:{line(body, 1)}\n  have  arg 0 f64[2, 12, 8]\n{_WHY}{_FIX}"
    )


READING: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "complex": lambda x: complex(x.sum()),
    "tolist": lambda x: x[0, 0].tolist(),
    "tolist of one": lambda x: x.sum().tolist(),
    "asarray": lambda x: numpy.asarray(x.detach()),
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
    assert re.search(r"\n  node  test_reads\.py:\d+\n  have  arg 0 \w+\[", text), text
    assert "value" in text.split("\n")[0] and "\n  fix   " in text


@pytest.mark.parametrize(
    ("name", "called"),
    [("int", "int()"), ("float", "float()"), ("complex", "complex()"), ("tolist", "tolist()"),
     ("tolist of one", "tolist()"), ("numpy", "numpy()"), ("while", "bool()"),
     ("index", "its use as an index"), ("mask", "indexing"), ("format", "format()"),
     ("asarray", "numpy.asarray()"), ("unique", "unique()")],
)  # fmt: skip
def test_reading_is_named_as_it_was_called(name: str, called: str) -> None:
    first = refused(lambda m, x: READING[name](x)).split("\n")[0]
    assert first.endswith(f" the value of a tensor: {called}.")


def test_number_that_was_made_a_tensor_can_be_read() -> None:
    same(lambda m, x: x * torch.tensor(3).tolist())


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
        (
            "register_post_accumulate_grad_hook",
            lambda m, x: m.linear.weight.register_post_accumulate_grad_hook(lambda p: None),
        ),
        ("retain_grad", lambda m, x: x.retain_grad()),
        ("backward", lambda m, x: x.sum().backward()),
    ],
)
def test_calls_that_act_outside_the_program_are_refused(name: str, body: Any) -> None:
    text = refused(body)
    assert text.startswith(f"forward calls {name}() on a tensor.\n  node  "), text
    assert "\n  have  arg 0 f64[" in text, text


def test_hook_on_a_gradients_node_is_refused() -> None:
    text = refused(lambda m, x: x.exp().grad_fn.register_hook(lambda i, o: None))
    assert text.startswith("forward takes grad_fn of a tensor.\n")
    assert "a forward hook of the module" in text


@pytest.mark.filterwarnings("error")
def test_hook_on_a_tensor_in_a_hook_on_all_modules_is_refused_alike() -> None:
    """It runs on the tracer's tensors; torch calls hooks again to clean up after an error."""
    hook = register_module_forward_hook(lambda m, a, out: out.register_hook(lambda g: g) and None)
    try:
        text = refused(lambda m, x: m.linear(x))
    finally:
        hook.remove()
    assert text.startswith("forward calls register_hook() on a tensor.\n  node  embedding (")


@pytest.mark.filterwarnings("error")
def test_error_in_a_hook_before_a_module_is_left_as_it_is() -> None:
    def hook(module: nn.Module, args: Any) -> None:
        if isinstance(module, Model):
            raise KeyError("mine")

    handle = register_module_forward_pre_hook(hook)
    try:
        with pytest.raises(KeyError, match="mine"):
            traced(Model(lambda m, x: m.linear(x)))
    finally:
        handle.remove()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_refused_with_the_reason(kind: Any) -> None:
    model = Model(lambda m, x: m.memory(x)[0])
    model.memory = kind(8, 8, batch_first=True).double()
    with pytest.raises(CaptureError) as error:
        traced(model)
    text = str(error.value)
    assert text.startswith(
        f"{kind.__name__} goes through a sequence token by token.\n  node  memory (test_reads.py:"
    )
    assert "\n  have  arg 0 f64[2, 12, 8]\n  why   each token needs the state" in text


def test_recurrent_module_that_is_not_called_is_no_matter() -> None:
    model = Model(lambda m, x: m.linear(x))
    model.memory = nn.LSTM(8, 8).double()
    traced(model)


def test_generator_of_the_models_own_is_refused() -> None:
    """It would go on from call to call, where on one device it starts anew."""

    def body(m: Any, x: Tensor) -> Tensor:
        fixed = torch.Generator().manual_seed(0)
        return x * torch.randn(8, generator=fixed)

    assert "enerator" in refused(body).split("\n")[0]


def test_gradient_inside_forward_is_refused() -> None:
    refused(lambda m, x: torch.autograd.grad(x.square().sum(), x, create_graph=True))


def test_a_module_first_imported_in_forward_keeps_torchs_own_functions() -> None:
    """As parts of torch are by the first flex_attention: `from torch.autograd import grad`."""
    kept: list[Any] = []

    def body(m: Any, x: Tensor) -> Tensor:
        kept.append(torch.autograd.grad)
        return x * 2

    traced(Model(body))
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(kept[0](x.square().sum(), x)[0], torch.full((3,), 2.0))


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


def test_backward_hook_on_all_modules_is_refused_as_such() -> None:
    hook = register_module_full_backward_hook(lambda *a: None)
    try:
        text = refused(lambda m, x: m.linear(x))
    finally:
        hook.remove()
    assert text.startswith("a backward hook is registered on all modules.\n  node  Model\n")


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


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_numbers_drawn_in_python_are_refused_with_this_text(draw: Any) -> None:
    """Layer drop and the like: the number drawn at tracing would stand in every call."""
    assert refused(lambda m, x: x * draw()) == (
        "forward draws random numbers in Python (random or numpy.random).\n"
        "  node  Model\n"
        "  have  i64[2, 12]\n"
        "  why   the program is traced once: the number drawn then would be used at every call\n"
        "  fix   draw with torch, or pass the number to forward"
    )


def test_generator_of_its_own_in_python_is_no_matter() -> None:
    """It gives the same numbers at each call of one device, too."""
    same(lambda m, x: x * random.Random(0).random())
