"""Rules of the user's: for torch functions, custom ops, autograd functions, Python functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autosp_dtensor as autosp
from autosp_dtensor.errors import PlacementError, UsageError
from autosp_dtensor.place.register import parse_spec
from tests.simulate import assert_program_equals_whole, lowered
from tests.user_rules import rules_are_put_back

__all__ = ["rules_are_put_back"]

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))
TABLE = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TABLE.requires_grad_()


def model(function: Any) -> Any:
    return lambda ids: function(F.embedding(ids, TABLE))


# -- what can be registered ------------------------------------------------------------------------


def test_torch_function_is_refused_until_it_is_registered() -> None:
    def centred(x: Tensor) -> Tensor:
        return torch.trapezoid(x, dim=1)

    with pytest.raises(PlacementError, match="trapezoid has no rule"):
        lowered(model(centred), (IDS,), 2)
    assert autosp.register_rule(torch.trapezoid, "b [s] d -> b d") is torch.trapezoid
    for n in (1, 2, 3):
        assert_program_equals_whole(model(centred), (IDS,), n)


def test_rule_of_the_users_goes_before_a_built_in_one() -> None:
    autosp.register_rule(torch.cumsum, "[b] [s] [d] -> b s d")
    program = assert_program_equals_whole(model(lambda x: torch.cumsum(x, 1)), (IDS,), 2)
    assert "all_gather" in program.kinds()


@torch.library.custom_op("autosp_test::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, factor: float) -> Tensor:
    return x * w * factor


@scaled.register_fake
def _(x: Tensor, w: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1] * ctx.factor, None, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:2]),
        setattr(ctx, "factor", inputs[2]),
    )[0],
)


@pytest.mark.parametrize("call", [scaled, torch.ops.autosp_test.scaled,
                                  torch.ops.autosp_test.scaled.default], ids=range(3))  # fmt: skip
@pytest.mark.parametrize("registered", [scaled, torch.ops.autosp_test.scaled.default], ids=range(2))
def test_custom_op_is_registered_under_any_of_its_names(call: Any, registered: Any) -> None:
    weight = torch.linspace(0, 1, 8, dtype=torch.float64)
    with pytest.raises(PlacementError, match="scaled"):
        lowered(model(lambda x: call(x, weight, 2.0)), (IDS,), 2)
    autosp.register_rule(registered, "b s d, d -> b s d")
    for n in (1, 2, 3):
        program = assert_program_equals_whole(model(lambda x: call(x, weight, 2.0)), (IDS,), n)
        assert program.kinds() == []


class Halved(torch.autograd.Function):
    """Its backward is not that of what it computes: it has to be kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        return x.clamp(max=most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / 2, None


class Summed(torch.autograd.Function):
    """Reads all tokens; two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cumsum(1), x.cumsum(1).exp()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return (first + second).flip(1).cumsum(1).flip(1)


def test_autograd_function_keeps_its_backward() -> None:
    with pytest.raises(PlacementError, match="Halved"):
        lowered(model(lambda x: Halved.apply(x, 0.5)), (IDS,), 2)
    assert autosp.register_rule(Halved, "... d -> ... d") is Halved
    for n in (1, 2, 3):
        program = assert_program_equals_whole(model(lambda x: Halved.apply(x, 0.5)), (IDS,), n)
        assert program.kinds() == []


def test_autograd_function_with_two_results() -> None:
    autosp.register_rule(Summed, "b [s] d -> b [s] d, b [s] d")
    for n in (1, 2, 3):
        program = assert_program_equals_whole(model(Summed.apply), (IDS,), n)
        assert n == 1 or program.kinds()[0] == "all_to_all"


def histogram(x: Tensor, edges: int = 4) -> Tensor:
    """Looks at data, so it cannot be traced."""
    marks = torch.linspace(-1, 1, edges + 1, dtype=x.dtype)
    counts = [float((x[row].detach() > mark).sum()) for row in range(len(x)) for mark in marks]
    return torch.tensor(counts, dtype=x.dtype).view(len(x), -1)


def test_python_function_that_reads_values_is_one_call() -> None:
    wrapped = autosp.register_rule(
        histogram, "b [s] [d] -> b n", fake=lambda x, edges=4: x.new_empty(len(x), edges + 1)
    )
    assert wrapped.__name__ == "histogram" and wrapped.__doc__ == histogram.__doc__
    torch.testing.assert_close(wrapped(TABLE[None]), histogram(TABLE[None]))  # outside of a trace
    for n in (1, 2, 3):
        assert_program_equals_whole(model(lambda x: wrapped(x) + wrapped(x, edges=4)), (IDS,), n)


def test_python_function_that_writes_to_its_argument_is_refused() -> None:
    def written(x: Tensor) -> Tensor:
        return x.mul_(2)

    opaque = autosp.register_rule(written, "b s d -> b s d")
    with pytest.raises(autosp.CaptureError, match="written changes an argument in place"):
        lowered(model(lambda x: opaque(x * 1)), (IDS,), 2)


def test_name_that_no_result_has_is_summed_over() -> None:
    @lambda f: autosp.register_rule(f, "b s d -> b d")
    def energy(x: Tensor) -> Tensor:
        return x.square().sum(1)

    program = assert_program_equals_whole(model(energy), (IDS,), 3)
    assert program.kinds() == ["all_reduce"]


def test_whole_dim_sends_the_sequence_to_another_one() -> None:
    @lambda f: autosp.register_rule(f, "b [s] d -> b [s] d")
    def mixed(x: Tensor) -> Tensor:
        return x.flip(1) + x.mean(1, keepdim=True)

    program = assert_program_equals_whole(model(mixed), (IDS[:1],), 2)
    assert program.kinds()[0] == "all_to_all"


def test_dim_of_size_one_and_scalars() -> None:
    @lambda f: autosp.register_rule(f, "b s d, b 1 d, () -> b s d, ()")
    def shifted(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x + y * z, z * 2

    def call(ids: Tensor) -> Any:
        x = F.embedding(ids, TABLE)
        return shifted(x, x.mean(1, keepdim=True), TABLE.sum())[0]

    for n in (1, 2, 3):
        assert_program_equals_whole(call, (IDS,), n)


# -- patterns --------------------------------------------------------------------------------------


def test_pattern_is_read_into_names() -> None:
    assert parse_spec("b s [d], [d] -> b s [d]") == (
        (("b", "s", "[d]"), ("[d]",)),
        (("b", "s", "[d]"),),
    )
    assert parse_spec("... d, () ->() , ... 1") == (
        (("...", "d"), ()),
        ((), ("...", "1")),
    )


def _refused(spec: str) -> str:
    with pytest.raises(UsageError) as error:
        autosp.register_rule(Halved, spec)
    return re.sub(r"\.py:\d+", ".py:LINE", str(error.value))


@pytest.mark.parametrize("spec", ["b s d", "b s d ->", "b s d ->  ", ""])
def test_pattern_without_results_is_refused_with_this_text(spec: str) -> None:
    assert _refused(spec) == (
        f"the pattern {spec!r} has no '->' with results after it.\n"
        "  where register_rule (test_register.py:LINE)\n"
        f"  have  {spec!r}\n"
        "  why   a rule says where the dims of the arguments are in the results\n"
        '  fix   for example "b s d, [d] -> b s d"'
    )


@pytest.mark.parametrize(
    ("spec", "part"),
    [("b (s d) -> b", "b (s d)"), ("b [s d] -> b", "b [s d]"), ("b s-> b {s}", "b {s}"),
     ("b 2 -> b", "b 2"), ("b s, d? -> b", "d?")],
)  # fmt: skip
def test_pattern_that_cannot_be_read_is_refused_with_this_text(spec: str, part: str) -> None:
    assert _refused(spec) == (
        f"{part!r} in the pattern {spec!r} cannot be read.\n"
        "  where register_rule (test_register.py:LINE)\n"
        f"  have  {spec!r}\n"
        "  why   each dim has a name of its own; names may not be joined or repeated by count\n"
        "  fix   names, [names], ... and () separated by spaces"
    )


HALVED = "test_register.py:LINE, Halved"


def test_pattern_with_another_number_of_tensors_is_refused_with_this_text() -> None:
    autosp.register_rule(Halved, "b s d, d -> b s d")
    with pytest.raises(UsageError) as error:
        lowered(model(lambda x: Halved.apply(x, 0.5)), (IDS,), 2)
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == (
        "the pattern 'b s d, d -> b s d' of Halved has 2 inputs and 1 results, the call has 1 "
        "tensors and gives 1.\n"
        f"  where {HALVED}\n"
        "  have  arg 0 f64[2, 12, 8]\n"
        "        result 0 f64[2, 12, 8]\n"
        "  why   each tensor, weights too, and each result has a term of its own\n"
        "  fix   one term for each tensor among the arguments, and one for each result: "
        'register_rule(fn, "b s d, [d] -> b s d")'
    )


def test_pattern_with_another_number_of_dims_is_refused_with_this_text() -> None:
    autosp.register_rule(Halved, "b s -> b s")
    with pytest.raises(UsageError) as error:
        lowered(model(lambda x: Halved.apply(x, 0.5)), (IDS,), 2)
    assert re.sub(r"\.py:\d+", ".py:LINE", str(error.value)) == (
        "'b s' in the pattern 'b s -> b s' of Halved names 2 dims, the tensor has 3.\n"
        f"  where {HALVED}\n"
        "  have  arg 0 f64[2, 12, 8]\n"
        "        result 0 f64[2, 12, 8]\n"
        "  why   each dim has a name\n"
        "  fix   name each dim; '...' stands for any leading dims, '()' for a scalar"
    )


def test_more_dims_named_than_dots_can_stand_for_is_refused() -> None:
    autosp.register_rule(Halved, "... a b c d -> ... a b c d")
    with pytest.raises(UsageError, match="names 4 dims, the tensor has 3"):
        lowered(model(lambda x: Halved.apply(x, 0.5)), (IDS,), 2)


def test_pattern_that_lies_about_sizes_is_caught_before_it_runs() -> None:
    """The result is said to have the tokens, but has one row for all of them."""

    @lambda f: autosp.register_rule(f, "b s d -> b s d")
    def last(x: Tensor) -> Tensor:
        return x[:, -1:].expand(-1, 12, -1)

    with pytest.raises((AssertionError, PlacementError, RuntimeError)):
        lowered(model(last), (IDS,), 2)
