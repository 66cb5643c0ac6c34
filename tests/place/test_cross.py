"""Attention whose keys are of another sequence: encoder and decoder, memory of another length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autosp_dtensor.place.masks import tiles
from tests import models, reference_attention
from tests.simulate import assert_program_equals_whole
from tests.upcasts import upcasts_stay_in_fp64

RANKS = [2, 3, 4]
SOURCE, TARGET = 13, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids_of(length: int, seed: int) -> Tensor:
    return torch.randint(32, (2, length), generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Queries of x over keys of memory, heads shared or not, spelled in three ways."""

    def __init__(self, spelled: str, heads: int, kv: int) -> None:
        super().__init__()
        self.spelled, self.heads, self.kv = spelled, heads, kv
        self.q, self.o = nn.Linear(16, heads * 4), nn.Linear(heads * 4, 16)
        self.k, self.v = nn.Linear(16, kv * 4), nn.Linear(16, kv * 4)

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        k, v = (y(memory).unflatten(-1, (self.kv, 4)).transpose(1, 2) for y in (self.k, self.v))
        if self.spelled == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, allowed, enable_gqa=True)
        else:
            k, v = (y.repeat_interleave(self.heads // self.kv, 1) for y in (k, v))
            scores = (q @ k.mT) / 2
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -1e9)
            out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class Seq2Seq(nn.Module):
    """An encoder that looks both ways, and a decoder over it, one layer each, with padding in the
    source, causal in the target."""

    def __init__(self, spelled: str = "sdpa", heads: int = 4, kv: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.encoder, self.decoder, self.cross = (Attention(spelled, heads, kv) for _ in range(3))
        self.double()

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None) -> Tensor:
        allowed = None if padding is None else padding.bool()[:, None, None, :]
        memory = self.table(source)
        memory = memory + self.encoder(memory, memory, allowed)
        at = torch.arange(target.shape[1])
        x = self.table(target)
        x = x + self.decoder(x, x, at <= at[:, None])
        x = x + self.cross(x, memory, allowed)
        logits = F.linear(x, self.table.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


PADDING = torch.tensor([[1] * 9 + [0] * 4, [0] * 5 + [1] * 8])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spelled", ["sdpa", "matmul"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2), (7, 7)])
def test_encoder_and_decoder(heads: tuple[int, int], spelled: str, padded: bool, n: int) -> None:
    model = Seq2Seq(spelled, *heads)
    for lengths in ((SOURCE, TARGET), (TARGET, SOURCE)):
        source, target = (ids_of(length, seed) for seed, length in enumerate(lengths))
        padding = PADDING[:, : lengths[0]] if padded else None
        assert_program_equals_whole(model, (source, target, padding), n)


class ByFlex(nn.Module):
    """flex_attention of queries over keys of another length, by mods of a name."""

    def __init__(self, mods: str, kv: int, reference: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mods, self.kv = mods, kv
        self.attend: Any = reference_attention.flex_attention if reference else flex_attention
        self.table = nn.Embedding(32, 16)
        self.k, self.v = nn.Linear(16, kv * 4), nn.Linear(16, kv * 4)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.6, 4))
        self.double()

    def forward(self, target: Tensor, source: Tensor, padding: Tensor) -> Tensor:
        q = self.table(target).unflatten(-1, (4, 4)).transpose(1, 2)
        memory = self.table(source)
        k, v = (y(memory).unflatten(-1, (self.kv, 4)).transpose(1, 2) for y in (self.k, self.v))
        queries, keys, slopes, mod, score = q.shape[2], k.shape[2], self.slopes, None, None
        if self.mods == "padding":
            mod = lambda b, h, i, j: padding[b, j]  # noqa: E731
        elif self.mods == "bottom right":
            mod = lambda b, h, i, j: j <= i + keys - queries  # noqa: E731
        elif self.mods == "diagonal":
            mod = lambda b, h, i, j: (i * keys // queries - j).abs() < 3  # noqa: E731
        if self.mods != "padding":
            score = lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()  # noqa: E731
        mask = None
        if mod is not None:
            mask = create_block_mask(mod, len(target), None, queries, keys, device="cpu")
        out = self.attend(q, k, v, score, mask, enable_gqa=self.kv != 4)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("kv", [4, 2, 1])
@pytest.mark.parametrize("mods", ["scores alone", "padding", "bottom right", "diagonal"])
def test_flex_attention(mods: str, kv: int, n: int) -> None:
    for lengths in ((SOURCE, TARGET), (TARGET, SOURCE)):
        source, target = (ids_of(length, seed) for seed, length in enumerate(lengths))
        inputs = (target, source, PADDING[:, : lengths[0]].bool())
        reference = ByFlex(mods, kv, reference=True)
        assert_program_equals_whole(ByFlex(mods, kv), inputs, n, reference=reference)


class OverMemory(nn.Module):
    """Image features that every rank holds, read by a split text: nothing of them is cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.cross = Attention("sdpa", 4, 2)
        self.double()

    def forward(self, ids: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.cross(x, memory, mask[:, None, None, :])


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("rows", [1, 2])
def test_memory_that_is_not_split(rows: int, n: int) -> None:
    """Its gradient is whole on every rank. Masked, since equal copies cancel in the softmax."""
    mask = torch.tensor([[True, False, True, True, True], [True, True, True, False, False]])
    memory = drawn(1, rows, 5, 16).requires_grad_()
    ids = ids_of(TARGET, 1)[:rows]
    assert_program_equals_whole(OverMemory(), (ids, memory, mask[:rows]), n)


class Multihead(nn.Module):
    """nn.MultiheadAttention over another sequence, with padding and bias of keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.cross = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.double()

    def forward(self, ids: Tensor, source: Tensor, padding: Tensor | None) -> Tensor:
        x, memory = self.table(ids), self.table(source)
        if self.cross.kdim != 16:
            memory = memory[..., : self.cross.kdim]
        out, _ = self.cross(x, memory, memory, key_padding_mask=padding, need_weights=False)
        return x + out


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"kdim": 12, "vdim": 12}, {"bias": False}])
def test_multihead_attention(options: dict[str, Any], padded: bool, n: int) -> None:
    padding = PADDING == 0 if padded else None
    inputs = (ids_of(TARGET, 1), ids_of(SOURCE, 2), padding)
    assert_program_equals_whole(Multihead(**options), inputs, n)


def small(family: str, attention: str, layers: int = 2) -> nn.Module:
    """T5 and BART of transformers. T5's encoder and decoder each train a table of position bias."""
    import transformers

    sizes: dict[str, Any]
    if family == "t5":
        sizes = {
            "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": layers, "num_heads": 4,
            "relative_attention_num_buckets": 6, "relative_attention_max_distance": 8,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        }  # fmt: skip
        config = transformers.T5Config(vocab_size=32, use_cache=False, **sizes)
        model: nn.Module = transformers.T5ForConditionalGeneration(config)
    else:
        sizes = {
            "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
            "dropout": 0.0, "max_position_embeddings": 32, "attn_implementation": attention,
        }  # fmt: skip
        config = transformers.BartConfig(vocab_size=32, use_cache=False, **sizes)
        model = transformers.BartForConditionalGeneration(config)
    model = model.double().train()
    models.fill(model)
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("family", "attention"), [("t5", "eager"), ("bart", "eager"), ("bart", "sdpa")]
)
@pytest.mark.parametrize("n", RANKS)
def test_transformers_encoder_and_decoder(
    family: str, attention: str, padded: bool, n: int
) -> None:
    model = small(family, attention)
    source, labels = ids_of(SOURCE, 1), ids_of(TARGET, 2)
    labels[0, 5:] = -100
    batch: dict[str, Any] = {"input_ids": source, "labels": labels}
    if padded:
        batch["attention_mask"] = PADDING
    with upcasts_stay_in_fp64():
        program = assert_program_equals_whole(model, (), n, **batch)
    assert not program.named("softmax")  # no layer's scores are left as they stand
    tables = [name for name, _ in model.named_parameters() if "relative_attention_bias" in name]
    assert len(tables) == (2 if family == "t5" else 0)
