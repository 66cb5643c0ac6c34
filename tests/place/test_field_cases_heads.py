"""FIELD-CASES.md, class heads: shared, uneven and few heads, per-head parameters, norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.model_t import Attention, ModelT, TConfig, rotate
from tests.place.field_cases import batch_with, checked, loss_of, t_with

RANKS = [2, 3, 4]
TWO_ROWS = batch_with([range(15), (2, 9, 11)], rows=2)


@pytest.mark.parametrize("n", RANKS)
def test_fc_003_key_heads_keep_their_place(n: int) -> None:
    """The gradients of the K and V projections are among those compared."""
    assert loss_of(TConfig(), n, batch_with()) == checked(4.253)
    loss_of(TConfig(heads=8, kv_heads=1, head_size=4), n, TWO_ROWS)


class WithSinks(Attention):
    """gpt-oss: a weight of each head that takes part in the softmax and reads no value."""

    sinks: nn.Parameter

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        together = torch.cat([scores, sinks], dim=-1)
        together = together - together.max(dim=-1, keepdim=True).values
        return together.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("n", RANKS)
def test_fc_024_every_rank_has_the_sinks_of_its_heads(n: int) -> None:
    model = t_with(WithSinks)
    sinks = nn.Parameter(torch.tensor([-2.0, 0.0, 1.0, 3.0], dtype=torch.float64))
    for block in model.blocks:
        block.attention.sinks = sinks
    assert loss_of(model, n, batch_with()) == checked(4.581)
    loss_of(model, n, TWO_ROWS)


@pytest.mark.parametrize("n", RANKS)
def test_fc_059_heads_that_the_ranks_do_not_divide(n: int) -> None:
    assert loss_of(TConfig(heads=6, kv_heads=3), n, batch_with()) == checked(5.211)
    loss_of(TConfig(heads=7, kv_heads=7), n, TWO_ROWS)


@pytest.mark.parametrize("heads", [(14, 2), (14, 7), (9, 3), (9, 1), (5, 5), (3, 1)])
@pytest.mark.parametrize("n", RANKS)
def test_fc_059_more_numbers_of_heads(heads: tuple[int, int], n: int) -> None:
    config = TConfig(layers=1, heads=heads[0], kv_heads=heads[1], head_size=4)
    loss_of(config, n, TWO_ROWS)


@pytest.mark.parametrize("kind", ["hidden", "head"])
@pytest.mark.parametrize("n", RANKS)
def test_fc_076_norm_is_over_all_heads_or_over_each(kind: str, n: int) -> None:
    loss_of(TConfig(qk_norm=kind), n, TWO_ROWS)


class Latent(nn.Module):
    """DeepSeek's MLA: K and V from a narrow latent, one rotary key head for all heads, and values
    narrower than keys."""

    heads, plain, turned, values = 4, 8, 4, 8

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, self.heads * (self.plain + self.turned), bias=False)
        self.down = nn.Linear(32, 6 + self.turned, bias=False)
        self.norm = nn.RMSNorm(6)
        self.up = nn.Linear(6, self.heads * (self.plain + self.values), bias=False)
        self.o = nn.Linear(self.heads * self.values, 32, bias=False)

    def forward(self, x: Tensor, angles: Tensor, keep: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        angles = angles[..., :2]
        q = self.q(x).view(rows, length, self.heads, -1).transpose(1, 2)
        q, q_turned = q.split([self.plain, self.turned], -1)
        latent, k_turned = self.down(x).split([6, self.turned], -1)
        k_turned = rotate(k_turned.view(rows, 1, length, -1), angles)
        k, v = (
            self.up(self.norm(latent))
            .view(rows, length, self.heads, -1)
            .transpose(1, 2)
            .split([self.plain, self.values], -1)
        )
        q = torch.cat([q, rotate(q_turned, angles)], -1)
        k = torch.cat([k, k_turned.expand(-1, self.heads, -1, -1)], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(rows, length, -1))


@pytest.mark.parametrize("n", RANKS)
def test_fc_092_values_narrower_than_keys_and_one_shared_rotary_key(n: int) -> None:
    torch.manual_seed(0)
    model = ModelT()
    for block in model.blocks:
        block.attention = Latent().double()
    loss_of(model, n, TWO_ROWS)
