"""flash-attn's entry points: the model's own kernel on the heads of a rank, exact."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.checkpoint import by_heads, record
from autosp_dtensor.errors import CaptureError
from tests import reference_attention as reference
from tests.simulate import Lowered, Ranks, assert_program_equals_whole, lowered

LENGTH, HEADS, SIZE = 12, 6, 2
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# Borders of documents: inside a rank's part, at its end, one of a single token; tail padding.
CUTS = torch.tensor([0, 5, 12, 13, 22], dtype=torch.int32)
SLOPES = torch.linspace(0.1, 0.6, HEADS, dtype=torch.float64)
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    names = reference.install_flash_attn()
    yield
    for name in names:
        del sys.modules[name]


def flash(name: str, module: str = "flash_attn") -> Callable[..., Any]:
    return getattr(sys.modules[module], name)


def packed(x: Tensor) -> Tensor:
    """[B, S, H, D] as one row of tokens."""
    return x.flatten(0, 1)


def rows(x: Tensor) -> Tensor:
    return x.unflatten(0, (2, LENGTH))


# q [B, S, H, D]; k, v with as many heads, which a call may take fewer of.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flash_attn_func": lambda q, k, v: flash("flash_attn_func")(q, k, v, causal=True),
    "by keyword": lambda q, k, v: flash("flash_attn_func")(v=v, q=q, k=k, softmax_scale=0.3),
    "window and cap": lambda q, k, v: flash("flash_attn_func")(
        q, k, v, causal=True, window_size=(3, 0), softcap=2.0
    ),
    "slopes": lambda q, k, v: flash("flash_attn_func")(q, k, v, alibi_slopes=SLOPES),
    "slopes of each row": lambda q, k, v: flash("flash_attn_func")(
        q, k, v, alibi_slopes=torch.stack([SLOPES, 2 * SLOPES])
    ),
    "three key heads": lambda q, k, v: flash("flash_attn_func")(
        q, k[:, :, :3], v[:, :, :3], causal=True
    ),
    "two key heads": lambda q, k, v: flash("flash_attn_func")(q, k[:, :, :2], v[:, :, :2]),
    "one key head": lambda q, k, v: flash("flash_attn_func")(
        q, k[:, :, :1], v[:, :, :1], alibi_slopes=SLOPES
    ),
    "the same tensor as key and value": lambda q, k, v: flash("flash_attn_func")(q, k, k),
    "other head size of values": lambda q, k, v: flash("flash_attn_func")(q, k, v[..., :1]),
    "qkvpacked": lambda q, k, v: flash("flash_attn_qkvpacked_func")(
        torch.stack([q, k, v], 2), causal=True
    ),
    "kvpacked": lambda q, k, v: flash("flash_attn_kvpacked_func")(
        q, torch.stack([k, v], 2)[:, :, :, :2], causal=True
    ),
    "varlen": lambda q, k, v: rows(
        flash("flash_attn_varlen_func")(
            packed(q), packed(k), packed(v), CUTS, CUTS, 9, 9, causal=True
        )
    ),
    "varlen, shared key heads": lambda q, k, v: rows(
        flash("flash_attn_varlen_func")(
            packed(q), packed(k[:, :, :2]), packed(v[:, :, :2]), CUTS, CUTS, 9, 9,
            causal=True, alibi_slopes=SLOPES,
        )
    ),
    "varlen qkvpacked": lambda q, k, v: rows(
        flash("flash_attn_varlen_qkvpacked_func")(
            packed(torch.stack([q, k, v], 2)), CUTS, 9, causal=True
        )
    ),
    "varlen kvpacked": lambda q, k, v: rows(
        flash("flash_attn_varlen_kvpacked_func")(
            packed(q), packed(torch.stack([k, v], 2)), CUTS, CUTS, 9, 9
        )
    ),
    "flash-attn 3": lambda q, k, v: flash("flash_attn_func", "flash_attn_interface")(
        q, k[:, :, :3], v[:, :, :3], causal=True, window_size=(4, 0)
    ),
    "flash-attn 4 with sinks and log-sum-exp": lambda q, k, v: with_lse(
        *flash("flash_attn_func", "flash_attn.cute")(
            q, k[:, :, :3], v[:, :, :3], causal=True, learnable_sink=SINKS
        )
    ),
}  # fmt: skip


def with_lse(out: Tensor, lse: Tensor) -> Tensor:
    return out * torch.sigmoid(lse.double()).transpose(1, 2)[..., None]


TABLE = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(0)).double()
TABLE.requires_grad_()


def model(call: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    def run(ids: Tensor) -> Tensor:
        x = F.embedding(ids, TABLE).unflatten(-1, (HEADS, SIZE))
        return call(x * 1.3, x * 0.7, x * -0.9).flatten(2)

    return run


def equal(name: str, n: int) -> Lowered:
    return assert_program_equals_whole(model(CALLS[name]), (IDS,), n)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_flash_attention_is_that_of_one_device(name: str, n: int) -> None:
    """Six heads on four ranks: 2, 2, 1, 1; key heads go where they are read."""
    program = equal(name, n)
    assert "all_gather" not in program.kinds()
    if n > 1:
        assert program.kinds().count("all_to_all") == 2
    assert not program.named("softmax")  # the kernel is one call, not looked into


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_kernel_is_called_for_one_head_at_a_time(
    name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where backward's workspace asks for it; a kernel that gives log-sum-exp too stays whole."""
    heads: list[int] = []
    real = by_heads._Run.cut

    def noted(run: Any, tensors: Any, group: Any) -> Any:
        heads.append(group.queries[1])
        return real(run, tensors, group)

    monkeypatch.setattr(by_heads._Run, "cut", noted)
    assert_program_equals_whole(model(CALLS[name]), (IDS,), n, tile=100)
    assert {*heads} == ({1} if "4" not in name else set())


def test_what_is_known_of_a_kernel_does_not_depend_on_its_calls() -> None:
    """It is not looked into: what it saves is taken to be all it takes and gives."""
    one, each = (lowered(model(CALLS["varlen"]), (IDS,), 2, tile=tile).root for tile in (None, 100))
    counts = [sorted((s.bytes, s.own) for s in record(region).saved) for region in (one, each)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("n", [1, 2])
def test_function_is_met_wherever_the_model_keeps_it(n: int) -> None:
    """In a table, in a closure, as a default, wrapped in torch.compile."""
    function = flash("flash_attn_func")
    table = {"fast": function}

    def call(q: Tensor, k: Tensor, v: Tensor, default: Any = function) -> Tensor:
        return table["fast"](q, k, v) + default(q, k, v, causal=True) + function(q, q, v)

    program = assert_program_equals_whole(model(call), (IDS,), n)
    assert len(program.named("flash_attn_func")) == 3
    assert (
        function is flash("flash_attn_func") and function(*[torch.ones(1, 2, 1, 2)] * 3).sum() == 4
    )


def test_dropout_draws_for_each_rank_its_own() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash("flash_attn_func")(q, k, torch.ones_like(v), dropout_p=0.5)

    program = lowered(model(call), (IDS,), 2)
    first, again, other = (
        Ranks(2, program.state, seed=seed).run(program.root, [[IDS, IDS]]) for seed in (1, 1, 2)
    )
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first[0][0], other[0][0])
    whole = torch.cat(first[0], 1).unflatten(-1, (HEADS, SIZE))[..., 0]
    assert not torch.allclose(whole[:, :, :3], whole[:, :, 3:])


def test_probabilities_are_refused() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash("flash_attn_func")(q, k, v, return_attn_probs=True)

    with pytest.raises(CaptureError, match="attention probabilities"):
        capture(read_call(model(call), (IDS,), {}, lambda t: None))


def test_result_of_another_kind_than_expected_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that gives (out, lse) where one tensor was expected."""
    program = lowered(model(CALLS["flash-attn 3"]), (IDS,), 2)
    real = reference.hopper_attn_func
    code = (lambda *a, **k: (0, 1)).__code__
    monkeypatch.setattr(real, "__code__", code)
    with pytest.raises(CaptureError, match="gives a tuple"):
        Ranks(2, program.state).run(program.root, [[IDS, IDS]])
