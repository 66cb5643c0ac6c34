"""What models do by head, with numbers of heads that the ranks do not divide: parameters of a head,
shared key heads however they are repeated, values of another size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.place.attention import torch_forms
from autosp_dtensor.place.attention.heads import attend
from autosp_dtensor.place.masks import tiles
from tests.simulate import assert_program_equals_whole, lowered

LENGTH, SIZE, WIDTH = 11, 4, 12
# Query heads and key heads: 7, 14 and 9 are not divided by 4, 4 or 2; 1 and 2 are fewer than 4.
HEADS = [(7, 7), (14, 2), (14, 7), (9, 3), (4, 1), (8, 2), (3, 3), (2, 1)]
SHARED = [each for each in HEADS if each[0] != each[1]]
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


def above() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def away() -> Tensor:
    return torch.arange(LENGTH) - torch.arange(LENGTH)[:, None]


class Model(nn.Module):
    """One attention; the form says how q, k, v [B, H, S, D] and the parameters make its result."""

    def __init__(self, form: Callable[..., Tensor], heads: int, kv: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.heads, self.kv = form, heads, kv
        self.table = nn.Embedding(16, WIDTH)
        self.q, self.o = nn.Linear(WIDTH, heads * SIZE), nn.Linear(heads * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * SIZE), nn.Linear(WIDTH, kv * SIZE)
        self.per_head = nn.Parameter(torch.linspace(-1, 1.5, heads))
        self.norms = nn.Parameter(torch.rand(2, SIZE) + 0.5)
        self.gate = nn.Linear(WIDTH, heads)
        self.buckets = nn.Embedding(5, heads)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (y(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q, self.k, self.v))
        out = self.form(self, x, q, k, v)
        return x + self.o(out.transpose(1, 2).flatten(2))


def repeat(m: Model, *tensors: Tensor) -> list[Tensor]:
    return [y.repeat_interleave(m.heads // m.kv, 1) for y in tensors]


def enable_gqa(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, *repeat(m, k, v), is_causal=True)


def expanded(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers' repeat_kv."""
    groups = m.heads // m.kv
    k, v = (y[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for y in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped_einsum(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (m.kv, -1))
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q, k) * SIZE**-0.5
    weights = scores.masked_fill(above(), -torch.inf).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).flatten(1, 2)


def sinks(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """gpt-oss: a column for each head, left out afterwards."""
    k, v = repeat(m, k, v)
    scores = (q @ k.mT * SIZE**-0.5).masked_fill(above(), -torch.inf)
    column = m.per_head.view(1, -1, 1, 1).expand(len(x), -1, LENGTH, -1)
    weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float64)
    return weights[..., :-1] @ v


def alibi(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1, m.heads + 1).double()
    bias = slopes[:, None, None] * away()
    mask = bias.masked_fill(above(), -torch.inf)
    return F.scaled_dot_product_attention(q, *repeat(m, k, v), mask)


def trained_alibi(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = repeat(m, k, v)
    scores = q @ k.mT + m.per_head[:, None, None] * away()
    return scores.masked_fill(above(), -torch.inf).softmax(-1) @ v


def bias_by_distance(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """T5's [1, H, S, S], of a trained table."""
    bias = m.buckets(away().abs().clamp(max=4)).permute(2, 0, 1)[None]
    return F.scaled_dot_product_attention(q, *repeat(m, k, v), bias)


def normed(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (F.rms_norm(y, (SIZE,), w) for y, w in zip((q, k), m.norms, strict=True))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def gated(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A gate of each head and token on what attention gives, and v once more outside of it."""
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out * torch.sigmoid(m.gate(x)).transpose(1, 2)[..., None] + repeat(m, v)[0]


def sharp(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Swin's trained scale of each head over cosines."""
    k, v = repeat(m, k, v)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.per_head[:, None, None].exp()
    return scores.softmax(-1) @ v


def same_key_and_value(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


def latent(m: Model, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MLA's: one more key head that all heads share, and values of half the size."""
    k, v = repeat(m, k, v)
    one = x[..., :2].unsqueeze(1)
    q = torch.cat([q, q[..., :2] * 0.5], -1)
    k = torch.cat([k, one.expand(-1, m.heads, -1, -1)], -1)
    out = F.scaled_dot_product_attention(q, k, v[..., :2], is_causal=True, scale=0.4)
    return torch.cat([out, out], -1)


FORMS = [
    enable_gqa, repeated, expanded, grouped_einsum, sinks, alibi, trained_alibi, bias_by_distance,
    normed, gated, sharp, same_key_and_value, latent,
]  # fmt: skip


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_form_with_any_number_of_heads(form: Callable[..., Tensor], n: int) -> None:
    for heads, kv in HEADS:
        assert_program_equals_whole(Model(form, heads, kv), (IDS,), n)


@pytest.mark.parametrize("form", [enable_gqa, repeated, expanded], ids=lambda form: form.__name__)
def test_key_heads_are_not_repeated_before_the_exchange(form: Callable[..., Tensor]) -> None:
    """q, k and v in one exchange, with as many heads as they have, and the result in another."""
    for heads, kv in SHARED:
        if heads < 4:
            continue  # every rank computes all heads
        program = lowered(Model(form, heads, kv), (IDS,), 4)
        assert program.kinds() == ["all_to_all", "all_to_all"]
        there, back = (moves for _, moves in program.collectives())
        assert [target.block for _, target in there] == [heads, kv, kv]
        assert [source.block for source, _ in back] == [heads * SIZE]  # flattened


@pytest.mark.parametrize("form", [bias_by_distance, enable_gqa], ids=lambda form: form.__name__)
def test_rank_without_queries_has_all_gradients(form: Callable[..., Tensor]) -> None:
    """Else it would leave out collectives of backward: the mask's, as torch's kernels do where
    nothing is asked. 11 tokens on 8 ranks are 2, 2, 2, 2, 2, 1, 0, 0."""
    assert_program_equals_whole(Model(form, 14, 2), (IDS,), 8)
    q, k, v, mask = (
        torch.ones(2, 4, *sizes, requires_grad=True)
        for sizes in ((0, SIZE), (5, SIZE), (5, SIZE), (0, 5))
    )
    out = attend(F.scaled_dot_product_attention, torch_forms._nothing, None, (), q, k, v, mask)
    assert out.shape == (2, 4, 0, SIZE)
    grads = torch.autograd.grad(out.sum(), (q, k, v, mask), allow_unused=True)
    assert all(grad is not None for grad in grads)
