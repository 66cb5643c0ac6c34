"""Attention by hand over grouped heads, scores of five dims: one call, key heads not repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import tiles
from tests.simulate import assert_program_equals_whole

LENGTH, SIZE = 9, 2
INF = float("inf")
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 1 + [1] * 7 + [2]])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


def causal() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


# A product of q [B, S, Hkv, group, D] and k [B, T, Hkv, D] as scores, and of weights and values.
def letters(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bqkgd,bskd->bkgqs", q, k)


def letters_back(w: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bkgqs,bskd->bqkgd", w, v)


def apart(q: Tensor, k: Tensor) -> Tensor:
    """Keys have a dim of groups, of one or of all."""
    return torch.einsum("bkgqd,bkgsd->bkgqs", q.permute(0, 2, 3, 1, 4), grouped(k, q.shape[3]))


def apart_back(w: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bkgqs,bkgsd->bkgqd", w, grouped(v, w.shape[2])).permute(0, 3, 1, 2, 4)


def grouped(k: Tensor, group: int) -> Tensor:
    return k.transpose(1, 2)[:, :, None].expand(-1, -1, group, -1, -1)


def broadcast(q: Tensor, k: Tensor) -> Tensor:
    return q.permute(0, 2, 3, 1, 4) @ k.transpose(1, 2)[:, :, None].transpose(-1, -2)


def broadcast_back(w: Tensor, v: Tensor) -> Tensor:
    return (w @ v.transpose(1, 2).unsqueeze(2)).permute(0, 3, 1, 2, 4)


def expanded(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q.permute(0, 2, 3, 1, 4), grouped(k, q.shape[3]).mT)


def expanded_back(w: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(w, grouped(v, w.shape[2])).permute(0, 3, 1, 2, 4)


SPELLED = {
    "einsum": (letters, letters_back),
    "einsum, groups of keys": (apart, apart_back),
    "matmul": (broadcast, broadcast_back),
    "matmul, expanded": (expanded, expanded_back),
    "both": (letters, broadcast_back),
}
Weights = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_documents(d: Tensor) -> Tensor:
    return (d[:, None, :, None] == d[:, None, None]) & causal()


# Scores [B, Hkv, group, S, T], documents [B, S], trained numbers [Hkv, group] give weights.
WEIGHTS: dict[str, tuple[Weights, str]] = {
    "no mask": (lambda s, d, t: (s * 0.5).softmax(-1), "scaled_dot_product_attention"),
    "causal": (
        lambda s, d, t: (s * 0.5).masked_fill(~causal(), -INF).softmax(dim=-1),
        "scaled_dot_product_attention",
    ),
    "causal, in place, fifth dim": (
        lambda s, d, t: F.softmax(s.mul_(0.5).masked_fill_(~causal(), -INF), 4),
        "scaled_dot_product_attention",
    ),
    "causal, five dims": (
        lambda s, d, t: (s * 0.5 + torch.where(causal(), 0.0, -INF)[None, None, None]).softmax(-1),
        "scaled_dot_product_attention",
    ),
    "documents": (
        lambda s, d, t: s.masked_fill(~of_documents(d)[:, None], -INF).softmax(-1),
        "tiled_attention",
    ),
    "documents, by a number": (
        lambda s, d, t: torch.where(of_documents(d)[:, :, None], s, -1e9).softmax(-1),
        "tiled_attention",
    ),
    "scores of each head": (
        lambda s, d, t: (s * t[:, :, None, None]).masked_fill(~causal(), -INF).softmax(-1),
        "tiled_attention",
    ),
    "scores of each group": (
        lambda s, d, t: (s * t[:1, :, None, None]).masked_fill(~causal(), -INF).softmax(-1),
        "tiled_attention",
    ),
    "scores of each key head": (
        lambda s, d, t: (s * t[None, :, :1, None, None]).softmax(-1), "tiled_attention"
    ),
    "capped": (
        lambda s, d, t: (torch.tanh(s / 3) * 3).masked_fill(~causal(), -INF).softmax(-1),
        "tiled_attention",
    ),
    "dropout of nothing, casts": (
        lambda s, d, t: F.dropout(s.masked_fill(~causal(), -INF).softmax(-1), 0.0).to(s.dtype),
        "scaled_dot_product_attention",
    ),
}  # fmt: skip
KEPT: dict[str, Weights] = {
    "softmax over queries": lambda s, d, t: s.softmax(-2),
    "softmax twice": lambda s, d, t: s.softmax(-1).softmax(-1),
    "scores used twice": lambda s, d, t: s.softmax(-1) * s.mean(),
    "softmax over groups": lambda s, d, t: s.softmax(2),
}


class Model:
    def __init__(self, spelled: str, weights: Weights, kv: int, group: int) -> None:
        self.products, self.weights = SPELLED[spelled], weights
        self.kv, self.group = kv, group
        generator = torch.Generator().manual_seed(0)
        shape = 16, kv * group * SIZE
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        self.trained = torch.rand(kv, group, generator=generator, dtype=torch.float64)
        self.trained.requires_grad_()

    def __call__(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        q = (x * 1.3).unflatten(-1, (self.kv, self.group, SIZE))
        k, v = (
            (x[..., : self.kv * SIZE] * factor).unflatten(-1, (self.kv, SIZE))
            for factor in (0.7, -0.9)
        )
        scores, back = self.products
        return back(self.weights(scores(q, k), documents, self.trained), v).flatten(2)


@pytest.mark.parametrize(("kv", "group", "n"), [(2, 2, 2), (3, 3, 2), (2, 7, 4), (1, 4, 3)])
@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("name", WEIGHTS)
def test_grouped_attention_is_one_call(
    name: str, spelled: str, kv: int, group: int, n: int
) -> None:
    weights, kernel = WEIGHTS[name]
    program = assert_program_equals_whole(Model(spelled, weights, kv, group), (IDS, DOCUMENTS), n)
    (call,) = program.named(kernel) or program.named("attend")
    assert not program.named("softmax")
    keys = [facts(x).meta.shape for x in call.all_input_nodes if len(facts(x).meta.shape) == 4]
    assert (2, kv, LENGTH, SIZE) in keys, "key heads are not repeated"


@pytest.mark.parametrize("spelled", SPELLED)
@pytest.mark.parametrize("name", KEPT)
def test_what_only_looks_like_it_is_left_alone(name: str, spelled: str) -> None:
    program = assert_program_equals_whole(Model(spelled, KEPT[name], 2, 2), (IDS, DOCUMENTS), 2)
    assert program.named("softmax")


class OneKeyHead(Model):
    """Keys and values have no dim of heads."""

    def __call__(self, ids: Tensor, documents: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        q, k, v = (x * 1.3).unflatten(-1, (-1, SIZE)), x[..., :SIZE], x[..., -SIZE:]
        scores = torch.einsum("bqhd,bsd->bhqs", q, k)
        weights = self.weights(scores, documents, self.trained)
        return torch.einsum("bhqs,bsd->bqhd", weights, v).flatten(2)


@pytest.mark.parametrize(("heads", "n"), [(2, 2), (5, 2), (3, 4)])
@pytest.mark.parametrize("name", [
    "no mask", "causal", "causal, in place, fifth dim", "capped", "documents, without groups",
])  # fmt: skip
def test_one_key_head_without_a_dim_is_shared(name: str, heads: int, n: int) -> None:
    known: dict[str, tuple[Weights, str]] = {
        **WEIGHTS,
        "causal, in place, fifth dim": (
            lambda s, d, t: F.softmax(s.mul_(0.5).masked_fill_(~causal(), -INF), 3),
            "scaled_dot_product_attention",
        ),
        "documents, without groups": (
            lambda s, d, t: s.masked_fill(~of_documents(d), -INF).softmax(-1), "tiled_attention"
        ),
    }  # fmt: skip
    weights, kernel = known[name]
    model = OneKeyHead("einsum", weights, 1, heads)
    program = assert_program_equals_whole(model, (IDS, DOCUMENTS), n)
    (call,) = program.named(kernel) or program.named("attend")
    assert not program.named("softmax")
    keys = [facts(x).meta.shape for x in call.all_input_nodes if len(facts(x).meta.shape) == 4]
    assert (2, 1, LENGTH, SIZE) in keys


class WithWeights(nn.Module):
    """nn.MultiheadAttention gives its weights, and nobody takes them."""

    def __init__(self, *, average: bool, used: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, dtype=torch.float64)
        self.inner = nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64)
        self.average, self.used = average, used

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        out, weights = self.inner(
            x, x, x, attn_mask=~causal(), need_weights=True, average_attn_weights=self.average
        )
        return out + weights.sum() if self.used else out


@pytest.mark.parametrize("average", [True, False])
def test_weights_that_nobody_takes_are_not_made(average: bool) -> None:
    model = WithWeights(average=average, used=False)
    program = assert_program_equals_whole(model, (IDS,), 2)
    assert len(program.named("scaled_dot_product_attention")) == 1
    model = WithWeights(average=average, used=True)
    assert assert_program_equals_whole(model, (IDS,), 2).named("softmax")


@pytest.mark.parametrize("spelled", ["einsum", "matmul"])
def test_products_under_the_models_own_autocast_stay_in_it(spelled: str) -> None:
    """They round to bfloat16 there, and nowhere else."""
    model = Model(spelled, lambda s, d, t: s.float().softmax(-1), 2, 2)
    model.table = model.table.detach().float().requires_grad_()
    scores, back = model.products

    def rounded(q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scores(q, k)

    model.products = rounded, lambda w, v: back(w, v.float())
    program = assert_program_equals_whole(model, (IDS, DOCUMENTS), 1)
    assert program.named("softmax")
