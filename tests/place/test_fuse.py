"""Attention written by hand becomes one call exactly where that changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.simulate import Lowered, assert_program_equals_whole

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
INF = float("inf")
LENGTH = 12


def above() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def minus_inf() -> Tensor:
    return torch.full((LENGTH, LENGTH), -INF, dtype=torch.float64).triu(1)


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).unflatten(0, (2, 6))


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.5
    scores.masked_fill_(above(), -INF)
    return scores.softmax(-1) @ v


FUSED: dict[str, Attention] = {
    "no mask": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "scaled by multiplying": lambda q, k, v: ((q @ k.mT) * 0.5).softmax(-1) @ v,
    "scaled by dividing": lambda q, k, v: ((q @ k.mT) / 2).softmax(-1) @ v,
    "scaled twice": lambda q, k, v: ((q @ k.mT) * 3 / 2).softmax(-1) @ v,
    "scaled from the left": lambda q, k, v: (0.5 * (q @ k.mT)).softmax(-1) @ v,
    "functions": lambda q, k, v: torch.matmul(
        F.softmax(torch.matmul(q, k.transpose(-2, -1)), dim=-1), v
    ),
    "causal, added": lambda q, k, v: ((q @ k.mT) * 0.5 + minus_inf()).softmax(-1) @ v,
    "causal, added to": lambda q, k, v: (minus_inf() + (q @ k.mT) * 0.5).softmax(-1) @ v,
    "causal, filled": lambda q, k, v: (q @ k.mT).masked_fill(above(), -INF).softmax(-1) @ v,
    "causal, filled with -1e9": lambda q, k, v: (
        (q @ k.mT).masked_fill(above(), -1e9).softmax(-1) @ v
    ),
    "causal, where": lambda q, k, v: torch.where(~above(), q @ k.mT, scalar(-INF)).softmax(-1) @ v,
    "causal, where the other way": lambda q, k, v: (
        torch.where(above(), scalar(-INF), q @ k.mT).softmax(-1) @ v
    ),
    "causal twice": lambda q, k, v: (
        ((q @ k.mT).masked_fill(above(), -INF) + minus_inf()).softmax(-1) @ v
    ),
    "in place": in_place,
    "three dims": bmm,
    "a dropout that drops nothing": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.0) @ v,
}
KEPT: dict[str, Attention] = {
    "softmax over the queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "softmax over the queries, by numpy's word": lambda q, k, v: (q @ k.mT).softmax(axis=-2) @ v,
    "a mask that forbids weakly": lambda q, k, v: (
        (q @ k.mT).masked_fill(above(), -3.0).softmax(-1) @ v
    ),
    "weights set to zero afterwards": lambda q, k, v: (
        (q @ k.mT).softmax(-1).masked_fill(above(), 0.0) @ v
    ),
    "the mask the wrong way": lambda q, k, v: (
        torch.where(above(), q @ k.mT, scalar(-1e9)).softmax(-1) @ v
    ),
    "the diagonal forbidden": lambda q, k, v: (
        (q @ k.mT).masked_fill(above().roll(-1, 1), -1e9).softmax(-1) @ v
    ),
    "a scale after the mask": lambda q, k, v: (
        ((q @ k.mT).masked_fill(above(), -1e9) * 1e-9).softmax(-1) @ v
    ),
    "a negative scale": lambda q, k, v: ((q @ k.mT) * -0.5 + minus_inf()).softmax(-1) @ v,
    "a learned scale": lambda q, k, v: ((q @ k.mT) * q[0, 0, 0, 0]).softmax(-1) @ v,
    "a scale divided by the scores": lambda q, k, v: (0.1 / (q @ k.mT + 3)).softmax(-1) @ v,
    "a division that rounds": lambda q, k, v: (
        torch.div(q @ k.mT, 2, rounding_mode="floor").softmax(-1) @ v
    ),
    "a bool mask that is added": lambda q, k, v: ((q @ k.mT) + ~above()).softmax(-1) @ v,
    "alpha on the scores": lambda q, k, v: (
        torch.add(minus_inf(), q @ k.mT, alpha=0.1).softmax(-1) @ v
    ),
    "a cast to integers on the way": lambda q, k, v: (
        (q @ k.mT).to(torch.int64).to(torch.float64).softmax(-1) @ v
    ),
    "weights used twice": lambda q, k, v: _twice((q @ k.mT).softmax(-1), v),
    "scores used twice": lambda q, k, v: _scores_too(q @ k.mT, v),
    "values on the left": lambda q, k, v: (v.mT @ (q @ k.mT).softmax(-1)).mT,
    "scores capped": lambda q, k, v: ((q @ k.mT) / 5).tanh().mul(5).softmax(-1) @ v,
    "a bias": lambda q, k, v: (q @ k.mT + torch.linspace(0, 1, LENGTH).double()).softmax(-1) @ v,
    "a multiplied mask": lambda q, k, v: ((q @ k.mT) * (~above()).double()).softmax(-1) @ v,
    "a sink": lambda q, k, v: torch.cat([q @ k.mT, q[..., :1]], -1).softmax(-1)[..., :-1] @ v,
    "keywords": lambda q, k, v: torch.matmul(torch.matmul(q, other=k.mT).softmax(-1), other=v),
}


def _twice(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v + weights.amax(-1, keepdim=True)


def _scores_too(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v + scores.mean(-1, keepdim=True)


def run(attention: Attention, n: int) -> Lowered:
    table = torch.randn(16, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table.requires_grad_()

    def model(ids: Tensor) -> Tensor:
        x = F.embedding(ids, table)
        q, k, v = (
            (x * factor).unflatten(-1, (6, 2)).transpose(1, 2) for factor in (1.3, 0.7, -0.9)
        )
        return attention(q, k, v).transpose(1, 2).flatten(2)

    ids = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    return assert_program_equals_whole(model, (ids,), n)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", FUSED)
def test_attention_by_hand_is_fused_and_equal(name: str, n: int) -> None:
    program = run(FUSED[name], n)
    assert len(program.named("scaled_dot_product_attention")) == 1
    assert not program.named("softmax")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", KEPT)
def test_what_only_looks_like_attention_is_left_alone(name: str, n: int) -> None:
    program = run(KEPT[name], n)
    assert not program.named("scaled_dot_product_attention")
