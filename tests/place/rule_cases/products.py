"""Products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autosp_dtensor.capture.flex import flex_weights

from .case import Case, b, f, i, own

_Q, _K = f(2, 4, 8, 3), f(2, 4, 6, 3)


def _attend(**options: Any) -> Callable[..., Tensor]:
    return lambda *t: F.scaled_dot_product_attention(*t, **options)


def _square(**options: Any) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return _attend(**options), (f(2, 4, 8, 3), f(2, 4, 8, 3), f(2, 4, 8, 5))


PRODUCTS: dict[str, list[Case]] = {
    "linear": [
        Case(F.linear, (f(2, 8, 6), f(4, 6)), "xxx,xx"),
        Case(F.linear, (f(2, 8, 6), f(4, 6), f(4)), "xx.,x.,x"),
        Case(F.linear, (f(8, 6), f(6)), "xx,x"),
        Case(F.linear, (f(6), f(4, 6)), "x,xx"),
    ],
    "matmul": [
        Case(torch.matmul, (f(8, 6), f(6, 4)), "xx,xx"),
        Case(torch.matmul, (f(2, 4, 8, 6), f(2, 4, 6, 3)), "xxxx,xxxx"),
        Case(torch.matmul, (f(2, 1, 8, 6), f(4, 6, 4)), "x.xx,xxx"),
        Case(torch.matmul, (f(2, 8, 6), f(6)), "xxx,x"),
        Case(torch.matmul, (f(6), f(2, 6, 4)), "x,xxx"),
        Case(torch.matmul, (f(6), f(6)), "x,x"),
        Case(lambda x, y: x @ y, (f(2, 8, 6), f(2, 6, 4)), "xxx,xxx"),
    ],
    "rmatmul": [Case(torch.Tensor.__rmatmul__, (f(6, 4), f(8, 6)), "xx,xx")],
    "mm": [Case(torch.mm, (f(8, 6), f(6, 4)), "xx,xx")],
    "bmm": [Case(torch.bmm, (f(4, 8, 6), f(4, 6, 2)), "xxx,xxx")],
    "mv": [Case(torch.mv, (f(8, 6), f(6)), "xx,x")],
    "dot": [Case(torch.dot, (f(6), f(6)), "x,x")],
    "baddbmm": [
        Case(torch.baddbmm, (f(4, 8, 2), f(4, 8, 6), f(4, 6, 2)), "xxx,xx.,x.x"),
        Case(torch.baddbmm, (f(1, 1, 2), f(4, 8, 6), f(4, 6, 2)), "..x,xx.,x.x"),
    ],
    "addmm": [
        Case(torch.addmm, (f(4), f(8, 6), f(6, 4)), "x,x.,.x"),
        Case(
            lambda *t: torch.addmm(*t, beta=0.5, alpha=2.0), (f(8, 4), f(8, 6), f(6, 4)), "xx,x.,.x"
        ),
    ],
    "outer": [Case(torch.outer, (f(8), f(6)), "x,x")],
    "ger": [Case(torch.ger, (f(8), f(6)), "x,x")],
    "einsum": [
        Case(
            lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y),
            (f(2, 4, 8, 6), f(2, 4, 6, 6)),
            "xxxx,xxxx",
        ),
        Case(
            lambda x, y: torch.einsum("... d, e d -> ... e", x, y), (f(2, 8, 6), f(4, 6)), "xxx,xx"
        ),
        Case(lambda x, y: torch.einsum("bsd,bsd", x, y), (f(2, 8, 6), f(2, 8, 6)), "xxx,xxx"),
        Case(lambda x: torch.einsum("bii->bi", x), (f(4, 6, 6),), "x.."),
        Case(lambda x: torch.einsum("bij->bj", x), (f(4, 6, 6),), "xxx"),
        Case(lambda x, y: torch.einsum("ij,jk", x, y), (f(8, 6), f(6, 4)), "xx,xx"),
        Case(
            lambda x, y, z: torch.einsum("bi,ij,bj->b", x, y, z),
            (f(4, 8), f(8, 6), f(4, 6)),
            "xx,xx,xx",
        ),
    ],
    "embedding": [
        Case(F.embedding, (i(4, 8, high=10), f(10, 6)), "xx,.x"),
        Case(lambda x, w: F.embedding(x, w, padding_idx=1), (i(8, high=10), f(10, 6)), "x,.x"),
        Case(
            lambda x, w: F.embedding(x, w, scale_grad_by_freq=True),  # counts over all ids
            (i(8, high=10), f(10, 6)),
            ".,.x",
        ),
    ],
    "conv1d": [
        Case(
            lambda x, w: F.conv1d(x, w, padding=1), (f(4, 6, 8), f(2, 6, 3)), "x..,x..", empty=False
        ),
        Case(F.conv1d, (f(4, 6, 8), f(2, 6, 3), f(2)), "x..,x..,x", empty=False),
        Case(
            lambda x, w: F.conv1d(x, w, groups=6), (f(4, 6, 8), f(6, 1, 3)), "xx.,x..", empty=False
        ),
        Case(
            lambda x, w, k: F.conv1d(x, w, k, groups=6),
            (f(4, 6, 8), f(6, 1, 3), f(6)),
            "xx.,x..,x",
            empty=False,
        ),
        Case(
            lambda x, w: F.conv1d(x, w, groups=2), (f(4, 6, 8), f(4, 3, 3)), "x..,...", empty=False
        ),
        Case(
            lambda x, w: F.conv1d(x, w, groups=6), (f(4, 6, 8), f(12, 1, 3)), "x..,...", empty=False
        ),
        Case(F.conv1d, (f(6, 8), f(2, 6, 3)), "..,x..", empty=False),
    ],
    "conv2d": [
        Case(F.conv2d, (f(4, 3, 8, 6), f(2, 3, 3, 3)), "x...,x...", empty=False),
        Case(
            lambda x, w: F.conv2d(x, w, groups=4),
            (f(2, 4, 8, 6), f(4, 1, 3, 3)),
            "xx..,x...",
            empty=False,
        ),
    ],
    "conv3d": [Case(F.conv3d, (f(2, 3, 4, 4, 4), f(2, 3, 3, 3, 3)), "x....,x....", empty=False)],
    "scaled_dot_product_attention": [
        Case(_attend(), (_Q, _K, f(2, 4, 6, 5)), "xxx.,xx..,xx.."),
        Case(*_square(is_causal=True), "xx..,xx..,xx.."),
        Case(_attend(), (_Q, _K, _K, b(8, 6)), "xxx.,xx..,xx..,x."),
        Case(_attend(), (_Q, _K, _K, f(2, 1, 8, 6)), "xxx.,xx..,xx..,x.x."),
        Case(_attend(), (_Q, _K, _K, f(2, 4, 1, 6)), "xxx.,xx..,xx..,xx.."),
        Case(_attend(scale=0.3), (f(4, 8, 3), f(4, 6, 3), f(4, 6, 3)), "xx.,x..,x.."),
        Case(_attend(), (f(8, 3), f(6, 3), f(6, 3)), "x.,..,.."),
        Case(
            _attend(enable_gqa=True),
            (f(2, 8, 6, 3), f(2, 4, 5, 3), f(2, 4, 5, 3)),
            "xxx.,xx..,xx..",
        ),
        Case(
            _attend(enable_gqa=True, is_causal=True),
            (f(2, 8, 6, 3), f(2, 2, 6, 3), f(2, 2, 6, 3)),
            "xx..,xx..,xx..",
        ),
        Case(
            _attend(enable_gqa=True),
            (f(2, 8, 6, 3), f(2, 4, 6, 3), f(2, 4, 6, 3), f(1, 8, 6, 6)),
            "xxx.,xx..,xx..,.xx.",
        ),
    ],
}


def _documents(q: Tensor, k: Tensor, v: Tensor, d: Tensor, **options: Any) -> Tensor:
    mask = d[:, None, :, None] >= d[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


PRODUCTS["tiled_attention"] = [
    Case(
        _documents,
        (f(2, 4, 6, 3), f(2, 4, 6, 3), f(2, 4, 6, 5), i(2, 6)),
        ".x..,.x..,.x..,....,....",
        canonical=True,
    ),
    Case(
        lambda *t: _documents(*t, enable_gqa=True, scale=0.3),
        (f(2, 8, 6, 3), f(2, 4, 6, 3), f(2, 4, 6, 3), i(2, 6)),
        ".x..,.x..,.x..,....,....",
        canonical=True,
    ),
]


PRODUCTS["flex_weights"] = [
    Case(own(flex_weights), (f(2, 4, 8, 6), f(2, 4, 6, 5)), "xxx.,xx.."),
]
