"""Ranks with different numbers of heads and tokens run the same exchanges again, at the same time.

What is a view on one rank is a copy on another, so autograd saves other tensors there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.checkpoint import Checkpoint, Frame
from tests.checkpoint.test_recompute import asked
from tests.run.test_codegen import assert_ranks_give_the_whole

WIDTH, HEADS = 12, 3
IDS = torch.randint(16, (2, 13), generator=torch.Generator().manual_seed(1))
Body = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.qkv, self.linear, self.body = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            [body],
        )

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).split(WIDTH, -1)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * self.body[0](self, x)


class Blocks(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(Block(body) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        for block in self.blocks:
            x = block(x)
        return x


BODIES: dict[str, Body] = {
    "a branch without gradient": lambda m, x: (
        m.attend(x.detach()) + m.attend(x).detach() * m.linear(x)
    ),
    "over all tokens": lambda m, x: m.attend(x - x.mean(1, keepdim=True)) * x.amax(1, keepdim=True),
    "two in parallel": lambda m, x: m.attend(x) * m.attend(x.sin()),
}
MODES: list[tuple[str | Checkpoint, int | None]] = [
    ("full", None),
    ("sequence", None),
    (Checkpoint(("exchanges",)), None),
    ("auto", 3_000),
    ("auto", 6_000),
    ("auto", 9_000),
]


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", BODIES)
def test_uneven_ranks_meet_in_what_runs_again(
    name: str, mode: tuple[str | Checkpoint, int | None], n: int
) -> None:
    assert_ranks_give_the_whole(Blocks(BODIES[name]), (IDS,), n, asked(*mode))


class Pair(nn.Module):
    """A block whose second result has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8, dtype=torch.float64))
        self.layers = nn.ModuleList(PairBlock() for _ in range(2))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(ids, self.table)
        for layer in self.layers:
            x, seen = layer(x)
        return x, seen


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + y, y.detach().abs()


@pytest.mark.parametrize("n", [1, 2])
def test_results_without_a_gradient_stay_so_and_none_is_a_view(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 warns of modules that return views."""
    model, ids = Pair(), torch.randint(16, (2, 12))
    given: list[Tensor] = []
    real = Frame.results

    def noted(frame: Frame, results: tuple[Any, ...]) -> tuple[Any, ...]:
        out = real(frame, results)
        given.extend(out)
        return out

    monkeypatch.setattr(Frame, "results", noted)
    assert_ranks_give_the_whole(model, (ids,), n, asked("full"))
    assert {r.requires_grad for r in given} == {True, False}
    assert not any(r._is_view() for r in given if r.requires_grad)
