"""Attention as it may be spelled: keywords, three dims, and nn.MultiheadAttention's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import (
    CausalBias,
    CausalVariant,
    causal_lower_right,
    causal_upper_left,
)

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.errors import CaptureError
from autosp_dtensor.place.masks import tiles
from tests.simulate import assert_program_equals_whole

LENGTH, HEADS, SIZE = 9, 4, 2
WIDTH = HEADS * SIZE
IDS = torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PADDING = torch.tensor([[False] * 7 + [True] * 2, [True] * 2 + [False] * 7])
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
READS = CAUSAL & (torch.arange(LENGTH) != 2)  # each query reads a key that is not padded
RANKS = pytest.mark.parametrize("n", [2, 4])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 4)


class Projected(nn.Module):
    """q, k and v [B, H, S, D] of a table, and what a method makes of them."""

    def __init__(self, call: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.table, self.qkv = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        qkv = self.qkv(self.table(ids)).unflatten(-1, (3, HEADS, SIZE))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        out = getattr(self, self.call)(q, k, v)
        return out.transpose(1, 2).flatten(2)

    def keywords(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)

    def keywords_and_mask(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[:, ::2], v[:, ::2]
        return F.scaled_dot_product_attention(
            value=v, scale=0.3, key=k, enable_gqa=True, query=q, attn_mask=~CAUSAL
        )

    def three_dims(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rows and heads in one dim, as models had it before there was a fourth."""
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.unflatten(0, (-1, HEADS))

    def of_one_row(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[H, S, D]: a row at a time."""
        rows = [
            F.scaled_dot_product_attention(*row, is_causal=True)
            for row in zip(q, k, v, strict=True)
        ]
        return torch.stack(rows)

    def with_other_users(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out * q.sigmoid() + k.cumsum(2) * v.mean(2, keepdim=True)

    def masked_with_other_users(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3
        out = F.scaled_dot_product_attention(q, k, v, near)
        return out * q + (k * k).sum(-1, keepdim=True).softmax(2) * v


CALLS = [name for name in vars(Projected) if not name.startswith("_") and name != "forward"]


@RANKS
@pytest.mark.parametrize("call", CALLS)
def test_spelling_is_that_of_one_device(call: str, n: int) -> None:
    program = assert_program_equals_whole(Projected(call), (IDS,), n)
    assert program.named("scaled_dot_product_attention") or program.named("tiled_attention")


class Multihead(nn.Module):
    """nn.MultiheadAttention over its own input, [B, S, E] or, not batch_first, [S, B, E]."""

    def __init__(self, *, first: bool = True, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = first
        self.table = nn.Embedding(16, WIDTH)
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, **options)
        self.double()
        for name in ("bias_k", "bias_v"):
            bias = getattr(self.inner, name)
            if bias is not None:
                nn.init.normal_(bias)

    def forward(
        self, ids: Tensor, padding: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x = self.table(ids) if self.first else self.table(ids.T)
        out, _ = self.inner(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)
        return (x + out) if self.first else (x + out).transpose(0, 1)


MASKS = {
    "none": (None, None),
    "mask": (None, CAUSAL),
    "padding": (PADDING, None),
    "padding and mask": (PADDING, READS),
    "padding and a mask that is added": (
        torch.zeros(2, LENGTH).double().masked_fill(PADDING, -1e9),
        torch.zeros(LENGTH, LENGTH).double().masked_fill(CAUSAL, -1e9),
    ),
}


@RANKS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_multihead_attention(masks: str, first: bool, n: int) -> None:
    assert_program_equals_whole(Multihead(first=first), (IDS, *MASKS[masks]), n)


@RANKS
@pytest.mark.parametrize("masks", ["none", "mask", "padding"])
@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_multihead_attention_adds(option: str, masks: str, n: int) -> None:
    """One more key and value for all rows: trained, or zeros."""
    assert_program_equals_whole(Multihead(**{option: True}), (IDS, *MASKS[masks]), n)


@RANKS
def test_one_row_without_a_dim_of_rows(n: int) -> None:
    """[S, E], the sequence in dim 0."""
    for mask in (None, CAUSAL):
        assert_program_equals_whole(Multihead(), (IDS[0], None, mask), n, 0)


class Biased(nn.Module):
    """Attention to another sequence under a causal bias of torch."""

    def __init__(self, make: Callable[..., Any], kv: int = HEADS, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.kv, self.options = make, kv, options
        self.table, self.k = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, kv * SIZE)
        self.double()

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        q = self.table(ids).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k = self.k(self.table(other)).unflatten(-1, (self.kv, SIZE)).transpose(1, 2)
        bias = self.make(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(
            q, k, -k, bias, enable_gqa=self.kv != HEADS, **self.options
        )
        return out.transpose(1, 2).flatten(2)


def by_class_upper_left(queries: int, keys: int) -> Any:
    return CausalBias(CausalVariant.UPPER_LEFT, queries, keys)


def by_class_lower_right(queries: int, keys: int) -> Any:
    return CausalBias(CausalVariant.LOWER_RIGHT, queries, keys)


@RANKS
@pytest.mark.parametrize("length", [LENGTH, LENGTH + 4])
@pytest.mark.parametrize(
    "make", [causal_upper_left, causal_lower_right, by_class_upper_left, by_class_lower_right]
)
def test_causal_bias(make: Callable[..., Any], length: int, n: int) -> None:
    """Nothing of its memory, which torch never fills, is read."""
    other = torch.randint(16, (2, length), generator=torch.Generator().manual_seed(2))
    for model in (Biased(make), Biased(make, kv=2, scale=0.3)):
        program = assert_program_equals_whole(model, (IDS, other), n)
        (attention,) = program.named("scaled_dot_product_attention") + program.named(
            "tiled_attention"
        )
        by_argument = make.__name__.endswith("upper_left") or length == LENGTH
        assert (attention.kwargs.get("is_causal") is True) == by_argument


def lowered_of(model: Any, *inputs: Any) -> None:
    capture(read_call(model, inputs, {}, lambda t: None))


class Kept(Biased):
    """Makes it once, as an attribute, or as a buffer."""

    def __init__(self, buffer: bool = False) -> None:
        super().__init__(causal_lower_right)
        if buffer:
            self.register_buffer("bias", causal_lower_right(LENGTH, LENGTH + 4))
        else:
            self.bias = causal_lower_right(LENGTH, LENGTH + 4)
        self.make = lambda *_: self.bias


OUTSIDE = causal_lower_right(LENGTH, LENGTH + 4)


@pytest.mark.parametrize(
    "model",
    [Kept(), Kept(buffer=True), Biased(lambda *_: OUTSIDE)],
    ids=["kept", "buffer", "global"],
)
def test_causal_bias_from_outside_of_forward_is_refused(model: nn.Module) -> None:
    other = torch.randint(16, (2, LENGTH + 4))
    with pytest.raises(CaptureError, match="made outside of forward") as caught:
        lowered_of(model, IDS, other)
    assert caught.value.have == f"lower_right, {LENGTH} x {LENGTH + 4}"


def test_causal_bias_as_an_argument_is_refused() -> None:
    def call(x: Tensor, bias: Any) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, bias)

    with pytest.raises(CaptureError, match="made outside of forward"):
        lowered_of(call, torch.randn(2, 4, LENGTH, 2), OUTSIDE)


def test_causal_bias_in_another_operation_is_refused() -> None:
    def call(x: Tensor) -> Tensor:
        return torch.add(x @ x.mT, causal_lower_right(LENGTH, LENGTH))

    with pytest.raises(CaptureError, match="add is given a causal bias"):
        lowered_of(call, torch.randn(2, 4, LENGTH, 2))


def test_causal_bias_of_no_variant_is_what_torch_says() -> None:
    """And after a trace torch's class is as it was."""
    model = Biased(lambda *sizes: CausalBias(1, *sizes))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="variant must be a CausalVariant, got int"):
        lowered_of(model, IDS, IDS)
    assert "__new__" not in vars(CausalBias)
    made = by_class_lower_right(2, 3)
    assert isinstance(made, CausalBias) and (made.seq_len_q, made.seq_len_kv) == (2, 3)


def test_causal_bias_and_is_causal_is_what_torch_says() -> None:
    model = Biased(causal_lower_right, is_causal=True)
    for run in (model, lambda *given: lowered_of(model, *given)):
        with pytest.raises(ValueError, match="should not be used with causal=True"):
            run(IDS, IDS)
