"""Forms of attention and masks, as docs/attention.md names them, each built from vectors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

from tests import reference_attention
from tests.place import positions

LENGTH, SIZE, WIDTH = 9, 2, 6
DOCUMENTS = torch.tensor([[0] * 2 + [1] * 6 + [2], [0] * 5 + [1] + [2] * 3])
PADDING = torch.tensor([[1] * 7 + [0] * 2, [0] * 3 + [1] * 6]).bool()
INF = float("inf")


q_at, k_at, causal = (
    functools.partial(each, LENGTH) for each in (positions.q_at, positions.k_at, positions.causal)
)


def itself() -> Tensor:
    """A query that may read nothing else reads itself: kernels differ in what they give then."""
    return k_at() == q_at()


# What a mask allows, [S, S] or [B, 1, S, S], from document ids d and padding p.
ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda d, p: causal(),
    "padding": lambda d, p: (causal() & p[:, None, None, :]) | itself(),
    "window": lambda d, p: causal() & (q_at() - k_at() < 3),
    "chunked": lambda d, p: causal() & (q_at() // 4 == k_at() // 4),
    "prefix": lambda d, p: causal() | (k_at() < d.argmax(1)[:, None, None, None]),
    "documents": lambda d, p: (d[:, None, :, None] == d[:, None, None, :]) & causal(),
    "documents, padding": lambda d, p: (
        ((d[:, None, :, None] == d[:, None, None, :]) & causal() & p[:, None, None, :]) | itself()
    ),
}
MASKS = ("none", *ALLOWED, "added", "slopes", "bias of heads", "given", "given by head")
# The same for one query and one key, as flex_attention asks for it.
MODS: dict[str, Callable[[Tensor, Tensor], Callable[..., Tensor]]] = {
    "causal": lambda d, p: lambda b, h, q, k: k <= q,
    "padding": lambda d, p: lambda b, h, q, k: ((k <= q) & p[b, k]) | (k == q),
    "window": lambda d, p: lambda b, h, q, k: (k <= q) & (q - k < 3),
    "chunked": lambda d, p: lambda b, h, q, k: (k <= q) & (q // 4 == k // 4),
    "prefix": lambda d, p: lambda b, h, q, k: (k <= q) | (k < d.argmax(1)[b]),
    "documents": lambda d, p: lambda b, h, q, k: (k <= q) & (d[b, q] == d[b, k]),
    "documents, padding": lambda d, p: (
        lambda b, h, q, k: ((k <= q) & (d[b, q] == d[b, k]) & p[b, k]) | (k == q)
    ),
}


class Model(nn.Module):
    """One attention over `heads` query heads and `kv` key heads, under a mask of a name."""

    def __init__(self, form: str, mask: str, heads: int, kv: int, reference: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.mask, self.heads, self.kv = form, mask, heads, kv
        self.attend = reference_attention.flex_attention if reference else flex.flex_attention
        self.table = nn.Embedding(16, WIDTH)
        self.q, self.o = nn.Linear(WIDTH, heads * SIZE), nn.Linear(heads * SIZE, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, kv * SIZE), nn.Linear(WIDTH, kv * SIZE)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.9, heads))
        self.by_distance = nn.Parameter(torch.rand(heads, 2 * LENGTH - 1))
        if form == "MultiheadAttention":
            self.whole = nn.MultiheadAttention(heads * SIZE, heads, batch_first=True)
        self.double()

    def forward(self, ids: Tensor, d: Tensor, p: Tensor, cuts: Tensor, given: Tensor) -> Tensor:
        x = self.table(ids)
        if self.form == "MultiheadAttention":
            x, out = self.q(x), self.q(x)
            mask = self.whole_mask(d, p, given)
            if mask is not None and mask.ndim == 4:  # it wants [B * H, S, S]
                mask = mask.expand(len(ids), self.heads, -1, -1).flatten(0, 1)
            elif mask is not None and mask.dtype == torch.bool:
                mask = ~mask
            if mask is not None and mask.ndim == 3 and mask.dtype == torch.bool:
                mask = ~mask
            out, _ = self.whole(out, out, out, attn_mask=mask, need_weights=False)
            return self.o(out + x)
        q, k, v = (y(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for y in (self.q, self.k, self.v))
        out = getattr(self, FORMS[self.form])(q, k, v, d, p, cuts, given)
        return self.o(out.transpose(1, 2).flatten(2))

    def whole_mask(self, d: Tensor, p: Tensor, given: Tensor) -> Tensor | None:
        """As models hand it to scaled_dot_product_attention."""
        if self.mask == "none":
            return None
        if self.mask in ALLOWED:
            return ALLOWED[self.mask](d, p)
        if self.mask == "added":
            return torch.where(ALLOWED["padding"](d, p), 0.0, -1e9).double()
        if self.mask == "slopes":
            bias = self.slopes[:, None, None].detach() * (k_at() - q_at())
            return bias.masked_fill(~causal(), -INF)[None]
        if self.mask == "bias of heads":
            return self.by_distance[:, k_at() - q_at() + LENGTH - 1][None]
        return given

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor, *rest: Tensor) -> Tensor:
        mask = self.whole_mask(d, p, rest[-1])
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.heads != self.kv)

    def by_hand(
        self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor, *rest: Tensor
    ) -> Tensor:
        mask = self.whole_mask(d, p, rest[-1])
        letters = self.form == "einsum"
        k, v = (y.repeat_interleave(self.heads // self.kv, 1) for y in (k, v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) if letters else q @ k.transpose(-1, -2)
        scores = scores * SIZE**-0.5
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -1e9)
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v) if letters else weights @ v

    def by_flex(
        self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor, *rest: Tensor
    ) -> Tensor:
        given, score_mod, mod = rest[-1], None, MODS.get(self.mask, lambda d, p: None)(d, p)
        slopes, table = self.slopes.detach(), self.by_distance
        if self.mask == "slopes":
            score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
            mod = MODS["causal"](d, p)
        elif self.mask == "bias of heads":
            score_mod = lambda s, b, h, i, j: s + table[h, j - i + LENGTH - 1]  # noqa: E731
        elif self.mask in ("given", "given by head"):
            last = given.shape[1] - 1
            mod = lambda b, h, i, j: given[b, h * min(last, 1), i, j]  # noqa: E731
        block_mask: Any = None
        if mod is not None:
            block_mask = create_block_mask(mod, len(d), self.heads, LENGTH, LENGTH, device="cpu")
        return self.attend(q, k, v, score_mod, block_mask, enable_gqa=self.heads != self.kv)

    def flash(self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor, *rest: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        function = sys.modules["flash_attn"].flash_attn_func
        options = {
            "none": {}, "causal": {"causal": True},
            "window": {"causal": True, "window_size": (2, 0)},
            "slopes": {"causal": True, "alibi_slopes": self.slopes.detach()},
        }[self.mask]  # fmt: skip
        return function(q, k, v, **options).transpose(1, 2)

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, d: Tensor, p: Tensor, *rest: Tensor
    ) -> Tensor:
        rows, cuts = len(d), rest[0]
        q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in (q, k, v))
        function = sys.modules["flash_attn"].flash_attn_varlen_func
        out = function(q, k, v, cuts, cuts, LENGTH, LENGTH, causal=True)
        return out.unflatten(0, (rows, LENGTH)).transpose(1, 2)


FORMS = {
    "sdpa": "sdpa",
    "matmul": "by_hand",
    "einsum": "by_hand",
    "MultiheadAttention": "",
    "flex": "by_flex",
    "flash_attn": "flash",
    "varlen": "varlen",
}
HEADS = {"4/4 on 2": (4, 4, 2), "7/7 on 4": (7, 7, 4), "9/3 on 2": (9, 3, 2),
         "14/2 on 4": (14, 2, 4), "4/1 on 4": (4, 1, 4), "3/1 on 4": (3, 1, 4)}  # fmt: skip


def has(form: str, mask: str) -> bool:
    """Whether a form has a way to say a mask."""
    if form == "flash_attn":
        return mask in ("none", "causal", "window", "slopes")
    if form == "varlen":
        return mask == "documents"
    return form != "flex" or mask != "added"


def inputs(mask: str, heads: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(16, (2, LENGTH), generator=generator)
    size = (2, heads if mask == "given by head" else 1, LENGTH, LENGTH)
    given = (torch.rand(size, generator=generator) < 0.5) | itself()
    starts = F.pad(DOCUMENTS.diff(dim=1) != 0, (1, 0), value=True).flatten().nonzero().flatten()
    cuts = F.pad(starts, (0, 1), value=DOCUMENTS.numel()).to(torch.int32)
    return ids, DOCUMENTS, PADDING, cuts, given
