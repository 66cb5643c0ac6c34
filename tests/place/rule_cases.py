"""One or more calls for every rule in the table, each with the dims on which it may be split.

`dims` has one term for each tensor that the operation takes, one character for each of its dims:
`x` may be split, `.` must be whole. A new rule brings its cases here, or test_rules.py fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """drawn: results are random or uninitialized, only shapes and dtypes can be compared.
    canonical: the operation is one that the canonical form brings in. empty: torch takes parts
    without elements.
    """

    call: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    dims: str
    drawn: bool = False
    canonical: bool = False
    empty: bool = True

    def terms(self) -> list[str]:
        return [term.strip() for term in self.dims.split(",")]


def _generator(shape: tuple[int, ...]) -> torch.Generator:
    return torch.Generator().manual_seed(sum((k + 1) * s for k, s in enumerate(shape)) + 1)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(shape), dtype=torch.float64)


def u(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator(shape), dtype=torch.float64)


def i(*shape: int, high: int = 4) -> Tensor:
    return torch.randint(high, shape, generator=_generator(shape))


def b(*shape: int) -> Tensor:
    return f(*shape) > 0


def c(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape).flip(-1))


def _written(call: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place call on a tensor of its own, since inputs may not be written to."""
    return lambda x, *more: call(x.clone(), *more)


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


def _random(call: Callable[..., Any], *tensors: Tensor, dims: str) -> list[Case]:
    return [Case(call, tensors, dims, drawn=True)]


_ONE = (f(4, 8, 6),)
_ALL = "xxx"


def _same(call: Callable[..., Any], *tensors: Tensor) -> list[Case]:
    """Local on all dims of every tensor."""
    tensors = tensors or _ONE
    return [Case(call, tensors, ",".join("x" * t.dim() for t in tensors))]


def _loss(name: str, first: Tensor, second: Tensor, *more: Tensor) -> list[Case]:
    call = getattr(F, name)
    terms = ",".join("x" * t.dim() for t in (first, second, *more))
    whole = terms.replace("x", ".")
    return [
        Case(lambda *t: call(*t, reduction="none"), (first, second, *more), terms),
        Case(lambda *t: call(*t, reduction="mean"), (first, second, *more), whole),
        Case(lambda *t: call(*t, reduction="sum"), (first, second, *more), whole),
    ]


POINTWISE: dict[str, list[Case]] = {
    "where": [
        *_same(torch.where, b(4, 8, 6), f(4, 8, 6), f(4, 8, 6)),
        Case(lambda m, x: torch.where(m, x, 0.0), (b(8, 6), f(4, 8, 6)), "xx,xxx"),
        Case(lambda m, x: torch.where(m, x, 0.0), (b(8, 1), f(4, 8, 6)), "x.,xxx"),
    ],
    "masked_fill": [
        *_same(lambda x, m: x.masked_fill(m, -1.0), f(4, 8, 6), b(4, 8, 6)),
        Case(lambda x, m: x.masked_fill(m, -1.0), (f(4, 8, 6), b(6)), "xxx,x"),
        Case(_written(lambda x, m: x.masked_fill_(m, -1.0)), (f(4, 8), b(4, 1)), "xx,x."),
    ],
    "clamp": [
        *_same(lambda x: x.clamp(-0.5, 0.5)),
        *_same(lambda x, m: x.clamp(min=m), f(4, 8), f(4, 8)),
    ],
    "clip": _same(lambda x: x.clip(-0.5, 0.5)),
    "copy": _same(_written(lambda x, y: x.copy_(y)), f(4, 8), f(4, 8)),
    "fill": _same(_written(lambda x: x.fill_(2.0))),
    "zero": _same(_written(lambda x: x.zero_())),
    "to": _same(lambda x: x.to(torch.float32)),
    "type_as": [
        *_same(lambda x, y: x.type_as(y), f(4, 8), i(4, 8)),
        Case(lambda x, y: x.type_as(y), (f(4, 8), i(8)), "xx,x"),
    ],
    "float": _same(lambda x: x.float()),
    "double": _same(lambda x: x.double(), i(4, 8)),
    "half": _same(lambda x: x.half()),
    "bfloat16": _same(lambda x: x.bfloat16()),
    "bool": _same(lambda x: x.bool(), i(4, 8)),
    "int": _same(lambda x: x.int()),
    "long": _same(lambda x: x.long()),
    "type": _same(lambda x: x.type(torch.float32)),
    "contiguous": _same(lambda x: x.transpose(0, 1).contiguous()),
    "clone": _same(lambda x: x.clone()),
    "detach": _same(lambda x: x.detach()),
    "zeros_like": _same(torch.zeros_like),
    "ones_like": _same(torch.ones_like),
    "full_like": _same(lambda x: torch.full_like(x, 3.0)),
    "empty_like": _random(torch.empty_like, f(4, 8), dims="xx"),
    "rand_like": _random(torch.rand_like, f(4, 8), dims="xx"),
    "randn_like": _random(torch.randn_like, f(4, 8), dims="xx"),
    "randint_like": _random(lambda x: torch.randint_like(x, 9), f(4, 8), dims="xx"),
    "dropout": [
        *_random(lambda x: F.dropout(x, 0.5), f(4, 8), dims="xx"),
        *_same(lambda x: F.dropout(x, 1.0), f(4, 8)),
    ],
    "alpha_dropout": _random(lambda x: F.alpha_dropout(x, 0.5, True), f(4, 8), dims="xx"),
    "bernoulli": _random(torch.bernoulli, u(4, 8), dims="xx"),
    "normal": _random(_written(lambda x: x.normal_()), f(4, 8), dims="xx"),
    "uniform": _random(_written(lambda x: x.uniform_()), f(4, 8), dims="xx"),
    "exponential": _random(_written(lambda x: x.exponential_()), f(4, 8), dims="xx"),
    "lerp": [
        *_same(lambda x, y: torch.lerp(x, y, 0.3), f(4, 8), f(4, 8)),
        *_same(torch.lerp, f(4, 8), f(4, 8), u(4, 8)),
    ],
    "addcmul": _same(torch.addcmul, f(4, 8), f(4, 8), f(4, 8)),
    "addcdiv": _same(torch.addcdiv, f(4, 8), f(4, 8), u(4, 8) + 1),
    "nan_to_num": _same(torch.nan_to_num, torch.where(b(4, 8), f(4, 8), torch.nan)),
    "hardswish": _same(F.hardswish),
    "log_sigmoid": _same(F.logsigmoid),
    "mish": [*_same(F.mish), *_same(_written(lambda x: F.mish(x, inplace=True)))],
    "floor_divide": [
        *_same(torch.floor_divide, i(4, 8, high=90), i(4, 8) + 1),
    ],
    "floordiv": _same(lambda x: x // 2, i(4, 8)),
    "rfloordiv": _same(lambda x: 7 // x, i(4, 8) + 1),
    "complex": [
        *_same(torch.complex, f(4, 8), f(4, 8)),
        Case(torch.complex, (f(4, 8), f(8)), "xx,x"),
    ],
    "polar": _same(torch.polar, u(4, 8), f(4, 8)),
    "mse_loss": _loss("mse_loss", f(4, 8), f(4, 8)),
    "l1_loss": _loss("l1_loss", f(4, 8), f(4, 8)),
    "smooth_l1_loss": _loss("smooth_l1_loss", f(4, 8), f(4, 8)),
    "huber_loss": _loss("huber_loss", f(4, 8), f(4, 8)),
    "binary_cross_entropy": _loss("binary_cross_entropy", u(4, 8), u(4, 8)),
    "binary_cross_entropy_with_logits": [
        *_loss("binary_cross_entropy_with_logits", f(4, 8), u(4, 8)),
        Case(
            lambda x, y, p: F.binary_cross_entropy_with_logits(
                x, y, pos_weight=p, reduction="none"
            ),
            (f(4, 8), u(4, 8), u(8)),
            "xx,xx,x",
        ),
    ],
    "kl_div": [
        *_loss("kl_div", f(4, 8), u(4, 8)),
        Case(lambda x, y: F.kl_div(x, y, reduction="batchmean"), (f(4, 8), u(4, 8)), "..,.."),
    ],
    "soft_margin_loss": _loss("soft_margin_loss", f(4, 8), f(4, 8).sign()),
    "poisson_nll_loss": _loss("poisson_nll_loss", f(4, 8), u(4, 8)),
}

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


def _along(call: Callable[[Tensor, int], Any]) -> list[Case]:
    """An operation that reads one dim whole."""
    return [
        Case(lambda x: call(x, 1), _ONE, "x.x"),
        Case(lambda x: call(x, -1), _ONE, "xx."),
        Case(lambda x: call(x, 0), _ONE, ".xx"),
    ]


def _axis(call: Callable[..., Any]) -> list[Case]:
    """numpy's name for dim, which torch takes everywhere."""
    return [Case(lambda x: call(x, axis=1), _ONE, "x.x")]


def _reduce(call: Callable[..., Any]) -> list[Case]:
    """Local on the dims that stay."""
    return [
        Case(lambda x: call(x, dim=1), _ONE, "x.x"),
        Case(lambda x: call(x, dim=-1, keepdim=True), _ONE, "xx."),
        Case(lambda x: call(x, axis=0, keepdims=True), _ONE, ".xx"),
    ]


def _reduce_many(call: Callable[..., Any]) -> list[Case]:
    return [*_reduce(call), Case(lambda x: call(x, dim=(0, 2)), _ONE, ".x.")]


def _reduce_all(call: Callable[..., Any]) -> list[Case]:
    return [Case(call, _ONE, "...")]


def _nothing(call: Callable[..., Any]) -> list[Case]:
    """Reads no value: takes its tensor as it is (`as_is`), so no dim of it has to be split."""
    return [Case(call, (f(4, 8),), "..")]


_INDEX = i(4, 5, 6, high=8)

ALONG: dict[str, list[Case]] = {
    "softmax": [
        *_along(F.softmax),
        *_along(torch.softmax),
        *_axis(torch.Tensor.softmax),
        *_axis(torch.softmax),
    ],
    "log_softmax": [*_along(F.log_softmax), *_axis(torch.log_softmax)],
    "softmin": _along(F.softmin),
    "cumsum": [*_along(torch.cumsum), *_axis(torch.cumsum), *_axis(torch.Tensor.cumsum)],
    "cumprod": [*_along(torch.cumprod), *_axis(torch.cumprod)],
    "logcumsumexp": [*_along(torch.logcumsumexp), *_axis(torch.logcumsumexp)],
    "cummax": [*_along(torch.cummax), *_axis(torch.cummax)],
    "cummin": [*_along(torch.cummin), *_axis(torch.cummin)],
    "glu": _along(F.glu),
    "gumbel_softmax": [
        Case(lambda x: F.gumbel_softmax(x, dim=1), _ONE, "x.x", drawn=True),
        Case(lambda x: F.gumbel_softmax(x, 0.5, True, 1e-10, 0), _ONE, ".xx", drawn=True),
    ],
    "diff": [
        *_along(lambda x, d: torch.diff(x, dim=d)),
        Case(lambda x: x.diff(2, 1), _ONE, "x.x"),
        Case(lambda x, y: x.diff(dim=1, prepend=y), (f(4, 8, 6), f(4, 1, 6)), "x.x,x.x"),
    ],
    "unfold": [
        Case(lambda x: x.unfold(1, 3, 2), _ONE, "x.x"),
        Case(lambda x: x.unfold(-1, 2, 1), _ONE, "xx."),
    ],
    "group_norm": [
        Case(lambda x: F.group_norm(x, 2), _ONE, "x.."),
        Case(lambda x, w, o: F.group_norm(x, 4, w, o), (f(4, 8, 6), f(8), f(8)), "x..,.,."),
    ],
    "instance_norm": [
        Case(F.instance_norm, _ONE, "x.."),
        Case(F.instance_norm, (f(4, 8, 6), f(8), u(8)), "...,.,."),  # it updates the statistics
    ],
    "new_zeros": _nothing(lambda x: x.new_zeros(3, 5)),
    "new_ones": _nothing(lambda x: x.new_ones((4, 8), dtype=torch.int64)),
    "new_full": _nothing(lambda x: x.new_full((4, 8), 2.0)),
    "new_empty": [Case(lambda x: x.new_empty(4, 8), (f(4, 8),), "..", drawn=True)],
    "new_tensor": _nothing(lambda x: x.new_tensor([1.0, 2.0])),
    "normalize": [
        Case(F.normalize, _ONE, "x.x"),
        Case(lambda x: F.normalize(x, dim=-1), _ONE, "xx."),
        Case(lambda x: F.normalize(x, 2.0, 0), _ONE, ".xx"),
    ],
    "flip": [
        Case(lambda x: x.flip(1), _ONE, "x.x"),
        Case(lambda x: x.flip((2, 1)), _ONE, "x.."),
        Case(lambda x: x.flip(2, 1), _ONE, "x.."),
        Case(lambda x: torch.flip(x, dims=[0]), _ONE, ".xx"),
    ],
    "roll": [
        Case(lambda x: x.roll(1, 1), _ONE, "x.x"),
        Case(lambda x: torch.roll(x, shifts=(1, 2), dims=(0, 1)), _ONE, "..x"),
        Case(lambda x: x.roll(1), _ONE, "..."),
    ],
    "sort": [
        *_along(torch.sort),
        *_axis(torch.sort),
        Case(lambda x: x.sort(descending=True), _ONE, "xx."),
        Case(lambda x: torch.sort(x, stable=True, dim=1), _ONE, "x.x"),
    ],
    "argsort": [*_along(torch.argsort), *_axis(torch.argsort)],
    "topk": [
        Case(lambda x: x.topk(3), _ONE, "xx."),
        Case(lambda x: torch.topk(x, 3, dim=1), _ONE, "x.x"),
        Case(lambda x: torch.topk(x, 3, axis=1), _ONE, "x.x"),
    ],
    "kthvalue": [
        Case(lambda x: x.kthvalue(2, 1, keepdim=True), _ONE, "x.x"),
        Case(lambda x: x.kthvalue(2, 1), _ONE, "..."),
    ],
    "layer_norm": [
        Case(lambda x: F.layer_norm(x, (6,)), _ONE, "xx."),
        Case(lambda x: F.layer_norm(x, (8, 6)), _ONE, "x.."),
        Case(lambda x, w, o: F.layer_norm(x, (6,), w, o), (f(4, 8, 6), f(6), f(6)), "xx.,.,."),
    ],
    "rms_norm": [
        Case(lambda x: F.rms_norm(x, (6,)), _ONE, "xx."),
        Case(lambda x, w: F.rms_norm(x, (6,), w), (f(4, 8, 6), f(6)), "xx.,."),
    ],
    "tril": [Case(torch.tril, _ONE, "x.."), Case(lambda x: x.tril(-1), (f(6, 6),), "..")],
    "triu": [Case(torch.triu, _ONE, "x.."), Case(lambda x: x.triu(1), (f(6, 6),), "..")],
    "sum": [
        Case(torch.sum, _ONE, _ALL),
        Case(lambda x: x.sum(1), _ONE, _ALL),
        Case(lambda x: x.sum((0, 2), keepdim=True), _ONE, _ALL),
        Case(lambda x: x.sum(axis=1), _ONE, _ALL),
        Case(lambda x: x.sum(dim=-1, dtype=torch.float32), (f(4, 8),), "xx"),
        Case(lambda x: x.sum(1), (i(4, 8, 6),), _ALL),
        Case(lambda x: (x > 0).sum(), (i(4, 8, 6),), _ALL),
    ],
    "mean": [
        Case(torch.mean, _ONE, _ALL),
        Case(lambda x: x.mean(1), _ONE, _ALL),
        Case(lambda x: x.mean((0, 1), keepdim=True), _ONE, _ALL),
        Case(lambda x: x.mean(axis=1), _ONE, _ALL),
        Case(lambda x: x.mean(1, dtype=torch.float64), (i(4, 8, 6),), _ALL),
    ],
    "prod": [*_reduce(torch.prod), *_reduce_all(torch.prod)],
    "amax": [*_reduce_many(torch.amax), *_reduce_all(torch.amax)],
    "amin": [*_reduce_many(torch.amin), *_reduce_all(torch.amin)],
    "argmax": [*_reduce(torch.argmax), *_reduce_all(torch.argmax)],
    "argmin": [*_reduce(torch.argmin), *_reduce_all(torch.argmin)],
    "any": [*_reduce(lambda x, **k: (x > 1.5).any(**k)), *_reduce_all(lambda x: (x > 1.5).any())],
    "all": [*_reduce(lambda x, **k: (x < 1.5).all(**k)), *_reduce_all(lambda x: (x < 1.5).all())],
    "std": [
        *_reduce_many(torch.std),
        *_reduce_all(torch.std),
        Case(lambda x: x.std(1, unbiased=False), _ONE, "x.x"),
        Case(lambda x: x.std(False), _ONE, "..."),
    ],
    "var": [
        *_reduce_many(torch.var),
        Case(lambda x: x.var(1, correction=0), _ONE, "x.x"),
        Case(lambda x: x.var(False), _ONE, "..."),
    ],
    "norm": [
        Case(lambda x: x.norm(dim=1), _ONE, "x.x"),
        Case(lambda x: torch.norm(x, 1, (0, 2), True), _ONE, ".x."),
        Case(lambda x: x.norm(), _ONE, "..."),
    ],
    "linalg_norm": [
        Case(lambda x: torch.linalg.norm(x, dim=1), _ONE, "x.x"),
        Case(lambda x: torch.linalg.norm(x, 1, -1, True), _ONE, "xx."),
        Case(lambda x: torch.linalg.norm(x, dim=(0, 2)), _ONE, ".x."),
        Case(torch.linalg.norm, _ONE, "..."),
    ],
    "linalg_vector_norm": [
        Case(lambda x: torch.linalg.vector_norm(x, dim=1), _ONE, "x.x"),
        Case(lambda x: torch.linalg.vector_norm(x, 1, (0, 2), True), _ONE, ".x."),
        Case(torch.linalg.vector_norm, _ONE, "..."),
    ],
    "logsumexp": _reduce_many(torch.logsumexp),
    "median": [*_reduce(torch.median), *_reduce_all(torch.median)],
    "count_nonzero": [
        Case(lambda x: torch.count_nonzero(x, 1), (i(4, 8, 6),), "x.x"),
        Case(torch.count_nonzero, (i(4, 8, 6),), "..."),
    ],
    "std_mean": [*_reduce_many(torch.std_mean), *_reduce_all(torch.std_mean)],
    "var_mean": [*_reduce_many(torch.var_mean), *_reduce_all(torch.var_mean)],
    "max": [
        *_reduce(torch.max),
        *_reduce_all(torch.max),
        *_same(torch.max, f(4, 8), f(4, 8) * 2),
        Case(torch.max, (f(4, 8), f(8)), "xx,x"),
    ],
    "min": [
        *_reduce(torch.min),
        *_reduce_all(torch.min),
        *_same(torch.min, f(4, 8), f(4, 8) * 2),
    ],
    "gather": [
        Case(lambda x, k: x.gather(1, k), (f(4, 8, 6), _INDEX), "x.x,x.x"),
        Case(lambda x, k: torch.gather(x, -2, k), (f(4, 8, 6), i(4, 5, 3, high=8)), "x..,x.."),
        Case(lambda x, k: torch.gather(x, axis=1, index=k), (f(4, 8), i(4, 8)), "x.,x."),
    ],
    "take_along_dim": [
        Case(lambda x, k: torch.take_along_dim(x, k, 1), (f(4, 8, 6), _INDEX), "x.x,x.x"),
        Case(
            lambda x, k: torch.take_along_dim(x, k, 1), (f(4, 8, 6), i(1, 5, 1, high=8)), "...,..."
        ),
        Case(torch.take_along_dim, (f(4, 8), i(5)), "..,."),
    ],
    "scatter": [
        Case(lambda x, k, y: x.scatter(1, k, y), (f(4, 8, 6), _INDEX, f(4, 5, 6)), "x.x,x.x,x.x"),
        Case(lambda x, k: x.scatter(1, k, 2.0), (f(4, 8, 6), i(3, 5, 6)), "..x,..x"),
    ],
    "scatter_add": [
        Case(lambda x, k, y: x.scatter_add(1, k, y), (f(4, 8), i(4, 5), f(4, 5)), "x.,x.,x."),
        Case(
            _written(lambda x, k, y: x.scatter_add_(0, k, y)),
            (f(4, 8), i(6, 8), f(6, 8)),
            ".x,.x,.x",
        ),
    ],
    "scatter_reduce": [
        Case(
            lambda x, k, y: x.scatter_reduce(1, k, y, "amax"),
            (f(4, 8), i(4, 5), f(4, 5)),
            "x.,x.,x.",
        ),
    ],
    "index_select": [
        Case(lambda x, k: x.index_select(1, k), (f(4, 8, 6), i(5, high=8)), "x.x,."),
        Case(lambda x, k: torch.index_select(x, axis=1, index=k), (f(4, 8, 6), i(5)), "x.x,."),
    ],
    "index_add": [
        Case(lambda x, k, y: x.index_add(1, k, y), (f(4, 8, 6), i(5), f(4, 5, 6)), "x.x,.,x.x"),
        Case(lambda x, k, y: x.index_add(0, k, y, alpha=2), (f(8), i(5), f(5)), ".,.,."),
    ],
    "index_copy": [
        Case(
            lambda x, k, y: x.index_copy(1, k, y),
            (f(4, 8, 6), torch.tensor([5, 1, 2]), f(4, 3, 6)),
            "x.x,.,x.x",
        ),
    ],
    "index_fill": [Case(lambda x, k: x.index_fill(1, k, 0.0), (f(4, 8, 6), i(5)), "x.x,.")],
    "pad": [
        Case(lambda x: F.pad(x, (1, 0)), _ONE, "xx."),
        Case(lambda x: F.pad(x, (0, 0, 2, 1)), _ONE, "x.x"),
        Case(lambda x: F.pad(x, (0, 0, -1, 1)), _ONE, "x.x"),
        Case(lambda x: F.pad(x, (1, 1), "replicate"), _ONE, "xx.", empty=False),
        Case(lambda x: F.pad(x, (0, 0)), _ONE, "xxx"),
    ],
    "cat": [
        Case(lambda x, y: torch.cat([x, y], 1), (f(4, 8, 6), f(4, 2, 6)), "x.x,x.x"),
        Case(lambda x, y: torch.cat([x, y], -1), (f(4, 8, 6), f(4, 8, 2)), "xx.,xx."),
        Case(lambda x, y: torch.cat((x, y), axis=1), (f(4, 8, 6), f(4, 8, 6)), "x.x,x.x"),
        Case(lambda x, y: torch.cat([x, y], -1), (f(4, 8, 6), f(4, 8, 0)), "xxx,xx."),
        Case(
            lambda x, y: torch.cat([x, y]), (f(4, 8), torch.empty(0, dtype=torch.float64)), "xx,."
        ),
        Case(lambda x: torch.cat([x, x], 1), (f(4, 8, 6),), "x.x,x.x"),
    ],
    "concat": [Case(lambda x, y: torch.concat([x, y], 1), (f(4, 8), f(4, 2)), "x.,x.")],
    "concatenate": [Case(lambda x, y: torch.concatenate([x, y], 1), (f(4, 8), f(4, 2)), "x.,x.")],
    "stack": [
        Case(lambda x, y: torch.stack([x, y]), (f(4, 8), f(4, 8)), "xx,xx"),
        Case(lambda x, y: torch.stack([x, y], 1), (f(4, 8), f(4, 8)), "xx,xx"),
        Case(lambda x, y: torch.stack([x, y], -1), (f(4, 8), f(4, 8)), "xx,xx"),
        Case(lambda x, y: torch.stack([x, y], axis=1), (f(4, 4), f(4, 4)), "xx,xx"),
        Case(lambda x, y: torch.stack([x, y], axis=-1), (f(2, 2), f(2, 2)), "xx,xx"),
    ],
    "split": [
        Case(lambda x: x.split(2, 1), _ONE, "x.x"),
        Case(lambda x: torch.split(x, [4, 2], dim=-1), _ONE, "xx."),
        Case(lambda x: x.split(2), _ONE, ".xx"),
    ],
    "chunk": [
        Case(lambda x: x.chunk(2, 1), _ONE, "x.x"),
        Case(lambda x: x.chunk(2, dim=-1), _ONE, "xx."),
        Case(lambda x: torch.chunk(x, 2, axis=1), _ONE, "x.x"),
    ],
    "unbind": [Case(lambda x: x.unbind(1), _ONE, "x.x"), Case(lambda x: x.unbind(), _ONE, ".xx")],
    "tensor_split": [
        Case(lambda x: x.tensor_split(3, 1), _ONE, "x.x"),
        Case(lambda x: x.tensor_split((1, 5), dim=1), _ONE, "x.x"),
    ],
    "split_with_sizes": [Case(lambda x: x.split_with_sizes([3, 5], 1), _ONE, "x.x")],
    "one_hot": [Case(lambda x: F.one_hot(x, 5), (i(4, 8),), "xx")],
    "repeat_interleave": [
        Case(lambda x: x.repeat_interleave(2, 1), _ONE, "x.x"),
        Case(lambda x: torch.repeat_interleave(x, 2, dim=-1), _ONE, "xx."),
        Case(lambda x: torch.repeat_interleave(x, repeats=2, dim=0, output_size=8), _ONE, ".xx"),
        Case(lambda x: x.repeat_interleave(2), _ONE, "..."),
    ],
    "repeat": [
        Case(lambda x: x.repeat(1, 2, 1), _ONE, "x.x"),
        Case(lambda x: x.repeat(3, 1, 1, 1), _ONE, "xxx"),
    ],
    "tile": [Case(lambda x: x.tile((2, 1)), _ONE, "x.x")],
}

VIEWS: dict[str, list[Case]] = {
    "view": [
        Case(lambda x: x.view(4, 48), _ONE, "xxx"),
        Case(lambda x: x.view(4, 6, 8), _ONE, "xx."),
        Case(lambda x: x.view(4, 8, 2, 3), _ONE, "xxx"),
        Case(lambda x: x.view(-1), _ONE, "xxx"),
        Case(lambda x: x.view(torch.int64), _ONE, "xxx"),
    ],
    "reshape": [
        Case(lambda x: x.reshape(4, 2, 4, 6), _ONE, "xxx"),
        Case(lambda x: x.reshape(32, 6), _ONE, "xxx"),
        Case(lambda x: x.transpose(0, 1).reshape(32, 6), _ONE, "xxx"),
        Case(lambda x: x.reshape(4, 8, 1, 6), _ONE, "xxx"),
    ],
    "flatten": [
        Case(torch.flatten, _ONE, "xxx"),
        Case(lambda x: x.flatten(1), _ONE, "xxx"),
        Case(lambda x: x.flatten(0, 1), _ONE, "xxx"),
    ],
    "unflatten": [
        Case(lambda x: x.unflatten(1, (2, 4)), _ONE, "xxx"),
        Case(lambda x: x.unflatten(-1, (-1, 3)), _ONE, "xxx"),
    ],
    "squeeze": [
        Case(torch.squeeze, (f(4, 1, 8),), "x.x"),
        Case(lambda x: x.squeeze(1), (f(4, 1, 8),), "x.x"),
        Case(lambda x: x.squeeze(0), (f(4, 1, 8),), "x.x"),
    ],
    "unsqueeze": [
        Case(lambda x: x.unsqueeze(1), _ONE, "xxx"),
        Case(lambda x: x.unsqueeze(-1), _ONE, "xxx"),
    ],
    "view_as": [Case(lambda x, y: x.view_as(y), (f(4, 8), f(32)), "xx,.")],
    "reshape_as": [Case(lambda x, y: x.reshape_as(y), (f(4, 8), f(2, 2, 8)), "xx,...")],
    "ravel": [Case(torch.ravel, _ONE, "xxx")],
    "transpose": [
        *_same(lambda x: x.transpose(1, 2)),
        *_same(lambda x: torch.transpose(x, dim0=0, dim1=-1)),
    ],
    "permute": [
        *_same(lambda x: x.permute(2, 0, 1)),
        *_same(lambda x: x.permute((0, -1, 1))),
        *_same(lambda x: torch.permute(x, dims=(2, 1, 0))),
    ],
    "swapaxes": [
        *_same(lambda x: x.swapaxes(1, 2)),
        *_same(lambda x: torch.swapaxes(x, axis0=0, axis1=1)),
    ],
    "swapdims": _same(lambda x: x.swapdims(0, -1)),
    "movedim": [
        *_same(lambda x: x.movedim(0, 2)),
        *_same(lambda x: x.movedim((0, 1), (-1, 0))),
        *_same(lambda x: torch.movedim(x, source=2, destination=0)),
    ],
    "moveaxis": _same(lambda x: x.moveaxis(2, 0)),
    "t": [*_same(lambda x: x.t(), f(4, 8)), *_same(lambda x: x.t(), f(4))],
    "T": _same(lambda x: x.T, f(4, 8)),
    "mT": _same(lambda x: x.mT),
    "adjoint": _same(lambda x: x.adjoint(), c(4, 8, 6)),
    "mH": _same(lambda x: x.mH, c(4, 8, 6)),
    "H": _same(lambda x: x.H, c(8, 6)),
    "expand": [
        Case(lambda x: x.expand(4, 8, 6), (f(1, 8, 6),), ".xx"),
        Case(lambda x: x.expand(2, -1, 8, -1), (f(4, 1, 6),), "x.x"),
        Case(lambda x: x.expand((3, 4, 8)), (f(4, 8),), "xx"),
    ],
    "expand_as": [Case(lambda x, y: x.expand_as(y), (f(1, 8, 6), f(4, 8, 6)), ".xx,xxx")],
    "broadcast_to": [
        Case(lambda x: x.broadcast_to((4, 8, 6)), (f(8, 1),), "x."),
        Case(lambda x: torch.broadcast_to(x, size=(4, 8)), (f(8),), "x"),
    ],
    "view_as_complex": [Case(torch.view_as_complex, (f(4, 8, 2),), "xx.")],
    "view_as_real": [Case(torch.view_as_real, (c(4, 8),), "xx")],
}

_ROWS = torch.tensor([3, 0, 2])

INDEX: dict[str, list[Case]] = {
    "getitem": [
        Case(lambda x: x[1], _ONE, "xxx"),
        Case(lambda x: x[:, 1:7:2], _ONE, "xxx"),
        Case(lambda x: x[:, -3:], _ONE, "xxx"),
        Case(lambda x: x[:, 3:3], _ONE, "xxx"),
        Case(lambda x: x[:, :-1], _ONE, "xxx"),
        Case(lambda x: x[..., 2:4], _ONE, "xxx"),
        Case(lambda x: x[:, None, :, 5], _ONE, "xxx"),
        Case(lambda x: x[..., None], _ONE, "xxx"),
        Case(lambda x: x[None, 1:3, -1], _ONE, "xxx"),
        Case(lambda x: x[1, 3], _ONE, "xxx"),
        Case(lambda x: x[3, -1, 2], _ONE, "xxx"),
        Case(lambda x: x[-1, :, -1], _ONE, "xxx"),
        Case(lambda x: x[:, 2], (i(4, 8, 6),), "x.x"),
        Case(lambda x: x[:, [0, 5]], _ONE, "x.x"),
        Case(operator.getitem, (f(4, 8), i(2, 6)), ".x,xx"),
        Case(lambda x, k: x[:, k], (f(4, 8, 6), _ROWS), "x.x,x"),
        Case(lambda x, k: x[:, k, 1:3], (f(4, 8, 6), i(8)), "x.x,x"),
        Case(lambda x, k, j: x[k, j], (f(4, 8, 6), i(8), i(8)), "..x,x,x"),
        Case(lambda x, k, j: x[k, j], (f(4, 8, 6), i(4, 1), i(1, 8)), "..x,x.,.x"),
        Case(lambda x, k, j: x[k, :, j], (f(4, 8, 6), i(4), i(4)), ".x.,x,x"),
        Case(lambda x, k: x[k, None, 2:5], (f(4, 8, 6), i(6)), ".xx,x"),
        Case(lambda x, k: x[0, k], (f(4, 8, 6), i(6)), "...,."),
    ],
    "select": [
        Case(lambda x: x.select(1, 2), _ONE, "xxx"),
        Case(lambda x: torch.select(x, dim=-1, index=-1), _ONE, "xxx"),
        Case(lambda x: x.select(1, 2), (i(4, 8),), "x."),
    ],
    "narrow": [
        Case(lambda x: x.narrow(1, 2, 5), _ONE, "xxx"),
        Case(lambda x: torch.narrow(x, dim=-1, start=1, length=2), _ONE, "xxx"),
        Case(lambda x: x.narrow(1, -3, 2), _ONE, "xxx"),
    ],
    "setitem": [
        Case(_written(lambda x: _set(x, (slice(None), 2), 0.0)), _ONE, "x.x"),
        Case(_written(lambda x: _set(x, (..., slice(1, 3)), 1.0)), _ONE, "xx."),
        Case(_written(lambda x, y: _set(x, (slice(None), 2), y)), (f(4, 8, 6), f(4, 6)), "x.x,xx"),
        Case(
            _written(lambda x, y: _set(x, (slice(None), slice(2, 5)), y)),
            (f(4, 8, 6), f(3, 6)),
            "x.x,.x",
        ),
        Case(
            _written(lambda x, y: _set(x, (slice(None), slice(2, 5)), y)),
            (f(4, 8, 6), f(4, 1, 1)),
            "x.x,x..",
        ),
        Case(_written(lambda x, k: _set(x, (slice(None), k), 0.0)), (f(4, 8, 6), _ROWS), "...,."),
    ],
}


def _tokens(call: Callable[..., Tensor], **options: Any) -> list[Case]:
    flat = (call(f(8, 5)), i(8, high=5))
    rows = (call(f(4, 5, 8)), i(4, 8, high=5))
    return [
        Case(_reduced(**options, reduction="sum"), flat, "x.,x"),
        Case(_reduced(**options, reduction="none"), flat, "x.,x"),
        Case(_reduced(**options, reduction="mean"), flat, "..,."),
        Case(_reduced(**options, reduction="sum", ignore_index=1), rows, "x.x,xx"),
        Case(_reduced(**options, reduction="none", ignore_index=1), rows, "x.x,xx"),
    ]


def _reduced(name: str, **options: Any) -> Callable[..., Tensor]:
    return lambda *t: getattr(F, name)(*t, **options)


LOSSES: dict[str, list[Case]] = {
    "cross_entropy": [
        *_tokens(lambda x: x, name="cross_entropy"),
        Case(_reduced("cross_entropy", reduction="sum"), (f(8, 5), i(8), u(5)), "x.,x,."),
        Case(
            _reduced("cross_entropy", reduction="sum", label_smoothing=0.1), (f(8, 5), i(8)), "x.,x"
        ),
        Case(_reduced("cross_entropy", reduction="sum"), (f(8, 5), u(8, 5)), "x.,x."),
        Case(_reduced("cross_entropy", reduction="none"), (f(4, 5, 8), u(4, 5, 8)), "x.x,x.x"),
        Case(_reduced("cross_entropy", reduction="sum"), (f(5), torch.tensor(2)), ".,"),
    ],
    "nll_loss": _tokens(lambda x: x.log_softmax(1), name="nll_loss"),
    "target_weight": [
        Case(
            lambda x, y: F.cross_entropy(x, y, ignore_index=1),
            (f(4, 5, 8), i(4, 8)),
            "xx",
            canonical=True,
        ),
        Case(
            lambda x, y, w: F.cross_entropy(x, y, w, ignore_index=1),
            (f(8, 5), i(8), u(5)),
            "x,.",
            canonical=True,
        ),
    ],
}

CASES: dict[str, list[Case]] = {**POINTWISE, **PRODUCTS, **ALONG, **VIEWS, **INDEX, **LOSSES}
