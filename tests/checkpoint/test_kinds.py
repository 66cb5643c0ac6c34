"""Every kernel counts as attention, at what its arguments say it reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.attention.flex_attention import flex_attention

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint import flops_of, policy_of
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.cost import DEVICES, pairs_read
from autosp_dtensor.graph import short_name
from tests import reference_attention as reference
from tests.checkpoint.stacked import Stacked
from tests.run.test_codegen import Ran
from tests.simulate import Lowered, lowered
from tests.user_rules import rules_are_put_back

__all__ = ["rules_are_put_back"]

LENGTH, HEADS, SIZE = 12, 4, 4
WIDTH = HEADS * SIZE
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
CUTS = torch.tensor([0, 5, 12, 24], dtype=torch.int32)
SLOPES = torch.linspace(0.1, 0.4, HEADS, dtype=torch.float64)[:, None, None]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with reference.references_here():
        yield


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2) * SIZE**-0.5).masked_fill(~causal(), -torch.inf)
    return scores.softmax(-1) @ v


def letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 3 * torch.tanh(q @ k.transpose(-1, -2) / 3)
    return scores.masked_fill(~causal(), -torch.inf).softmax(-1) @ v


def slopes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    away = torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None]
    return F.scaled_dot_product_attention(q, k, v, SLOPES * away)


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(LENGTH)
    mask = causal() & (at[:, None] - at < 3)
    return F.scaled_dot_product_attention(q, k, v, mask)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j))


def flash(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sys.modules["flash_attn"].flash_attn_func(q, k, v, **given).transpose(1, 2)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    qkv = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    out = sys.modules["flash_attn"].flash_attn_qkvpacked_func(qkv, causal=True)
    return out.transpose(1, 2)


def documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    kernel = sys.modules["flash_attn"].flash_attn_varlen_func
    out = kernel(q, k, v, CUTS, CUTS, LENGTH, LENGTH, causal=True)
    return out.unflatten(0, (2, LENGTH)).transpose(1, 2)


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = sys.modules["flash_attn.cute"].flash_attn_func(q, k, v, causal=True)
    return (out * lse.double().sigmoid().transpose(1, 2)[..., None]).transpose(1, 2)


RULE = "b h [m] d, b h [t] d, b h [t] e -> b h [m] e"


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def registered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return autosp.register_rule(kernel, RULE)(q, k, v)


def packed_kernel(qkv: Tensor) -> Tensor:
    return kernel(*qkv.unbind(2))


def registered_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """It reads one tensor: only the user can know."""
    call = autosp.register_rule(packed_kernel, "b h n [s] d -> b h [s] d", attention=True)
    return call(torch.stack([q, k, v], 2))


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return kernel(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            return torch.autograd.grad(kernel(*given), given, grad)


def registered_function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    autosp.register_rule(Kernel, RULE)
    return Kernel.apply(q, k, v)


FORMS: dict[str, Attend] = {
    "sdpa": functools.partial(F.scaled_dot_product_attention, is_causal=True),
    "positional": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
    "by hand": by_hand,
    "einsum": letters,
    "soft cap": soft_cap,
    "slopes": slopes,
    "window": window,
    "flex": flex,
    "flash-attn": functools.partial(flash, causal=True),
    "flash-attn, all": flash,
    "flash-attn, packed": packed,
    "flash-attn, documents": documents,
    "flash-attn with log-sum-exp": with_lse,
    "registered": registered,
    "registered, packed": registered_packed,
    "registered autograd function": registered_function,
}


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.attend = nn.Linear(WIDTH, WIDTH), attend

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(*qkv).transpose(1, 2).flatten(2)).tanh()


class Model(Stacked):
    def __init__(self, attend: Attend) -> None:
        super().__init__(lambda: Block(attend), WIDTH)


def attention_of(program: Lowered) -> list[Node]:
    return [n for n in program.nodes() if n.op == "call_function" and is_attention(n)]


def sequence(program: Lowered) -> Any:
    inner = {r: 1 for _, r in program.root.walk() if r is not program.root}
    return policy_of(inner, "sequence", DEVICES["cpu"])


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_no_attention_runs_again_and_gradients_are_bit_equal(form: str, n: int) -> None:
    plain, again = (Ran(Model(FORMS[form]), (IDS,), n, policy=p) for p in (None, sequence))
    for a, b in zip([*plain.results, *plain.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)
    policy = sequence(again.program)
    ((region, choice),) = policy.choices.items()
    nodes, known = list(region.graph.nodes), attention_of(again.program)
    attention = [k for k, node in enumerate(nodes) if node in known]
    assert len(attention) == 1 and not choice.again & {*attention}
    names = {short_name(nodes[k].target) for k in choice.again}
    assert not names & {"softmax", "matmul", "kernel", "packed_kernel", "Kernel"}
    assert "linear" in names  # what leads to its queries does run again


# Pairs of one head that a call reads; 12 tokens, causal: 78.
READ: dict[str, int] = {
    "sdpa": 78, "positional": 78, "by hand": 78, "einsum": 144, "soft cap": 78,
    "flash-attn": 78, "flash-attn, all": 144, "flash-attn, packed": 78,
    "flash-attn, documents": 78, "flash-attn with log-sum-exp": 78, "registered": 144,
    "registered, packed": 144, "registered autograd function": 144,
}  # fmt: skip


@pytest.mark.parametrize("form", READ)
def test_flops_are_those_of_the_pairs_that_are_read(form: str) -> None:
    program = lowered(Model(FORMS[form]), (IDS,), 1)
    node = attention_of(program)[0]
    assert flops_of(node) == 2 * 2 * HEADS * READ[form] * 2 * SIZE


@pytest.mark.parametrize("given", [{"window_size": (3, 0)}, {"window_size": (2, 2)},
                                   {"causal": True, "window_size": (3, 5)}])  # fmt: skip
def test_windows_are_counted(given: dict[str, Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v, **given)

    program = lowered(Model(attend), (IDS,), 1)
    node = attention_of(program)[0]
    away = torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]
    left, right = given["window_size"]
    read = (away >= -left) & (away <= (0 if "causal" in given else right))
    assert flops_of(node) == 2 * 2 * HEADS * int(read.sum()) * 2 * SIZE


@pytest.mark.parametrize("left", [None, 0, 2, 9])
@pytest.mark.parametrize("right", [None, 0, 1, 9])
@pytest.mark.parametrize("first", [None, 0])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9)])
def test_pairs_are_those_of_the_mask(
    queries: int, keys: int, first: int | None, left: int | None, right: int | None
) -> None:
    at = torch.arange(queries)[:, None] + (keys - queries if first is None else first)
    away = torch.arange(keys) - at
    mask = torch.ones_like(away, dtype=torch.bool)
    if left is not None:
        mask &= away >= -left
    if right is not None:
        mask &= away <= right
    assert pairs_read(queries, keys, left, right, first=first) == int(mask.sum())


def bincount(x: Tensor) -> Tensor:
    return x.cumsum(2)


@pytest.mark.parametrize(
    ("attention", "counts"), [(None, False), (True, True), (False, False)], ids=str
)
def test_what_reads_one_sequence_counts_as_the_user_says(
    attention: bool | None, counts: bool
) -> None:
    call = autosp.register_rule(bincount, "b h [s] d -> b h [s] d", attention=attention)
    program = lowered(Model(lambda q, k, v: call(v)), (IDS,), 2)
    assert bool(attention_of(program)) == counts


def added_norm(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x + y, (SIZE,), w)


def test_what_reads_features_whole_is_no_attention_and_a_kernel_may_be_none() -> None:
    call = autosp.register_rule(added_norm, "b h s [d], b h s [d], [d] -> b h s [d]")
    weight = torch.ones(SIZE).double()
    assert not attention_of(lowered(Model(lambda q, k, v: call(v, q, weight)), (IDS,), 2))
    call = autosp.register_rule(kernel, RULE, attention=False)
    assert not attention_of(lowered(Model(call), (IDS,), 2))
