"""Operations that read one or more dims whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import ALL, ONE, Case, f, i, same, u, written


def _along(call: Callable[[Tensor, int], Any]) -> list[Case]:
    """An operation that reads one dim whole."""
    return [
        Case(lambda x: call(x, 1), ONE, "x.x"),
        Case(lambda x: call(x, -1), ONE, "xx."),
        Case(lambda x: call(x, 0), ONE, ".xx"),
    ]


def _axis(call: Callable[..., Any]) -> list[Case]:
    """numpy's name for dim, which torch takes everywhere."""
    return [Case(lambda x: call(x, axis=1), ONE, "x.x")]


def _reduce(call: Callable[..., Any]) -> list[Case]:
    """Local on the dims that stay."""
    return [
        Case(lambda x: call(x, dim=1), ONE, "x.x"),
        Case(lambda x: call(x, dim=-1, keepdim=True), ONE, "xx."),
        Case(lambda x: call(x, axis=0, keepdims=True), ONE, ".xx"),
    ]


def _reduce_many(call: Callable[..., Any]) -> list[Case]:
    return [*_reduce(call), Case(lambda x: call(x, dim=(0, 2)), ONE, ".x.")]


def _reduce_all(call: Callable[..., Any]) -> list[Case]:
    return [Case(call, ONE, "...")]


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
    "special_softmax": _along(torch.special.softmax),
    "special_log_softmax": _along(torch.special.log_softmax),
    "log_softmax": [*_along(F.log_softmax), *_axis(torch.log_softmax)],
    "softmin": _along(F.softmin),
    "cumsum": [*_along(torch.cumsum), *_axis(torch.cumsum), *_axis(torch.Tensor.cumsum)],
    "cumprod": [*_along(torch.cumprod), *_axis(torch.cumprod)],
    "logcumsumexp": [*_along(torch.logcumsumexp), *_axis(torch.logcumsumexp)],
    "cummax": [*_along(torch.cummax), *_axis(torch.cummax)],
    "cummin": [*_along(torch.cummin), *_axis(torch.cummin)],
    "glu": _along(F.glu),
    "gumbel_softmax": [
        Case(lambda x: F.gumbel_softmax(x, dim=1), ONE, "x.x", drawn=True),
        Case(lambda x: F.gumbel_softmax(x, 0.5, True, 1e-10, 0), ONE, ".xx", drawn=True),
    ],
    "diff": [
        *_along(lambda x, d: torch.diff(x, dim=d)),
        Case(lambda x: x.diff(2, 1), ONE, "x.x"),
        Case(lambda x, y: x.diff(dim=1, prepend=y), (f(4, 8, 6), f(4, 1, 6)), "x.x,x.x"),
    ],
    "unfold": [
        Case(lambda x: x.unfold(1, 3, 2), ONE, "x.x"),
        Case(lambda x: x.unfold(-1, 2, 1), ONE, "xx."),
    ],
    "group_norm": [
        Case(lambda x: F.group_norm(x, 2), ONE, "x.."),
        Case(lambda x, w, o: F.group_norm(x, 4, w, o), (f(4, 8, 6), f(8), f(8)), "x..,.,."),
    ],
    "instance_norm": [
        Case(F.instance_norm, ONE, "x.."),
        Case(F.instance_norm, (f(4, 8, 6), f(8), u(8)), "...,.,."),  # it updates the statistics
    ],
    "new_zeros": _nothing(lambda x: x.new_zeros(3, 5)),
    "new_ones": _nothing(lambda x: x.new_ones((4, 8), dtype=torch.int64)),
    "new_full": _nothing(lambda x: x.new_full((4, 8), 2.0)),
    "new_empty": [Case(lambda x: x.new_empty(4, 8), (f(4, 8),), "..", drawn=True)],
    "new_tensor": _nothing(lambda x: x.new_tensor([1.0, 2.0])),
    "normalize": [
        Case(F.normalize, ONE, "x.x"),
        Case(lambda x: F.normalize(x, dim=-1), ONE, "xx."),
        Case(lambda x: F.normalize(x, 2.0, 0), ONE, ".xx"),
    ],
    "flip": [
        Case(lambda x: x.flip(1), ONE, "x.x"),
        Case(lambda x: x.flip((2, 1)), ONE, "x.."),
        Case(lambda x: x.flip(2, 1), ONE, "x.."),
        Case(lambda x: torch.flip(x, dims=[0]), ONE, ".xx"),
    ],
    "roll": [
        Case(lambda x: x.roll(1, 1), ONE, "x.x"),
        Case(lambda x: torch.roll(x, shifts=(1, 2), dims=(0, 1)), ONE, "..x"),
        Case(lambda x: x.roll(1), ONE, "..."),
    ],
    "sort": [
        *_along(torch.sort),
        *_axis(torch.sort),
        Case(lambda x: x.sort(descending=True), ONE, "xx."),
        Case(lambda x: torch.sort(x, stable=True, dim=1), ONE, "x.x"),
    ],
    "argsort": [*_along(torch.argsort), *_axis(torch.argsort)],
    "topk": [
        Case(lambda x: x.topk(3), ONE, "xx."),
        Case(lambda x: torch.topk(x, 3, dim=1), ONE, "x.x"),
        Case(lambda x: torch.topk(x, 3, axis=1), ONE, "x.x"),
    ],
    "kthvalue": [
        Case(lambda x: x.kthvalue(2, 1, keepdim=True), ONE, "x.x"),
        Case(lambda x: x.kthvalue(2, 1), ONE, "..."),
    ],
    "layer_norm": [
        Case(lambda x: F.layer_norm(x, (6,)), ONE, "xx."),
        Case(lambda x: F.layer_norm(x, (8, 6)), ONE, "x.."),
        Case(lambda x, w, o: F.layer_norm(x, (6,), w, o), (f(4, 8, 6), f(6), f(6)), "xx.,.,."),
    ],
    "rms_norm": [
        Case(lambda x: F.rms_norm(x, (6,)), ONE, "xx."),
        Case(lambda x, w: F.rms_norm(x, (6,), w), (f(4, 8, 6), f(6)), "xx.,."),
    ],
    "tril": [Case(torch.tril, ONE, "x.."), Case(lambda x: x.tril(-1), (f(6, 6),), "..")],
    "triu": [Case(torch.triu, ONE, "x.."), Case(lambda x: x.triu(1), (f(6, 6),), "..")],
    "sum": [
        Case(torch.sum, ONE, ALL),
        Case(lambda x: x.sum(1), ONE, ALL),
        Case(lambda x: x.sum((0, 2), keepdim=True), ONE, ALL),
        Case(lambda x: x.sum(axis=1), ONE, ALL),
        Case(lambda x: x.sum(dim=-1, dtype=torch.float32), (f(4, 8),), "xx"),
        Case(lambda x: x.sum(1), (i(4, 8, 6),), ALL),
        Case(lambda x: (x > 0).sum(), (i(4, 8, 6),), ALL),
    ],
    "mean": [
        Case(torch.mean, ONE, ALL),
        Case(lambda x: x.mean(1), ONE, ALL),
        Case(lambda x: x.mean((0, 1), keepdim=True), ONE, ALL),
        Case(lambda x: x.mean(axis=1), ONE, ALL),
        Case(lambda x: x.mean(1, dtype=torch.float64), (i(4, 8, 6),), ALL),
    ],
    "nansum": [
        Case(torch.nansum, ONE, ALL),
        Case(lambda x: x.nansum(1), (f(4, 8, 6).masked_fill(f(4, 8, 6) > 1, torch.nan),), ALL),
    ],
    "nanmean": [*_reduce_many(torch.nanmean), *_reduce_all(torch.nanmean)],
    "nanmedian": [*_reduce(torch.nanmedian), *_reduce_all(torch.nanmedian)],
    "aminmax": [
        Case(lambda x: torch.aminmax(x, dim=1), ONE, "x.x"),
        Case(lambda x: x.aminmax(dim=-1, keepdim=True), ONE, "xx."),
        Case(torch.aminmax, ONE, "..."),
    ],
    "special_logsumexp": _reduce_many(torch.special.logsumexp),
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
        Case(lambda x: x.std(1, unbiased=False), ONE, "x.x"),
        Case(lambda x: x.std(False), ONE, "..."),
    ],
    "var": [
        *_reduce_many(torch.var),
        Case(lambda x: x.var(1, correction=0), ONE, "x.x"),
        Case(lambda x: x.var(False), ONE, "..."),
    ],
    "norm": [
        Case(lambda x: x.norm(dim=1), ONE, "x.x"),
        Case(lambda x: torch.norm(x, 1, (0, 2), True), ONE, ".x."),
        Case(lambda x: x.norm(), ONE, "..."),
    ],
    "linalg_norm": [
        Case(lambda x: torch.linalg.norm(x, dim=1), ONE, "x.x"),
        Case(lambda x: torch.linalg.norm(x, 1, -1, True), ONE, "xx."),
        Case(lambda x: torch.linalg.norm(x, dim=(0, 2)), ONE, ".x."),
        Case(torch.linalg.norm, ONE, "..."),
    ],
    "linalg_vector_norm": [
        Case(lambda x: torch.linalg.vector_norm(x, dim=1), ONE, "x.x"),
        Case(lambda x: torch.linalg.vector_norm(x, 1, (0, 2), True), ONE, ".x."),
        Case(torch.linalg.vector_norm, ONE, "..."),
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
        *same(torch.max, f(4, 8), f(4, 8) * 2),
        Case(torch.max, (f(4, 8), f(8)), "xx,x"),
    ],
    "min": [
        *_reduce(torch.min),
        *_reduce_all(torch.min),
        *same(torch.min, f(4, 8), f(4, 8) * 2),
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
            written(lambda x, k, y: x.scatter_add_(0, k, y)),
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
        Case(lambda x: F.pad(x, (1, 0)), ONE, "xx."),
        Case(lambda x: F.pad(x, (0, 0, 2, 1)), ONE, "x.x"),
        Case(lambda x: F.pad(x, (0, 0, -1, 1)), ONE, "x.x"),
        Case(lambda x: F.pad(x, (1, 1), "replicate"), ONE, "xx.", empty=False),
        Case(lambda x: F.pad(x, (0, 0)), ONE, "xxx"),
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
        Case(lambda x: x.split(2, 1), ONE, "x.x"),
        Case(lambda x: torch.split(x, [4, 2], dim=-1), ONE, "xx."),
        Case(lambda x: x.split(2), ONE, ".xx"),
    ],
    "chunk": [
        Case(lambda x: x.chunk(2, 1), ONE, "x.x"),
        Case(lambda x: x.chunk(2, dim=-1), ONE, "xx."),
        Case(lambda x: torch.chunk(x, 2, axis=1), ONE, "x.x"),
    ],
    "unsafe_split": [Case(lambda x: x.unsafe_split(2, 1), ONE, "x.x")],
    "unsafe_chunk": [Case(lambda x: x.unsafe_chunk(2, -1), ONE, "xx.")],
    "unbind": [Case(lambda x: x.unbind(1), ONE, "x.x"), Case(lambda x: x.unbind(), ONE, ".xx")],
    "tensor_split": [
        Case(lambda x: x.tensor_split(3, 1), ONE, "x.x"),
        Case(lambda x: x.tensor_split((1, 5), dim=1), ONE, "x.x"),
    ],
    "split_with_sizes": [Case(lambda x: x.split_with_sizes([3, 5], 1), ONE, "x.x")],
    "one_hot": [Case(lambda x: F.one_hot(x, 5), (i(4, 8),), "xx")],
    "repeat_interleave": [
        Case(lambda x: x.repeat_interleave(2, 1), ONE, "x.x"),
        Case(lambda x: torch.repeat_interleave(x, 2, dim=-1), ONE, "xx."),
        Case(lambda x: torch.repeat_interleave(x, repeats=2, dim=0, output_size=8), ONE, ".xx"),
        Case(lambda x: x.repeat_interleave(2), ONE, "..."),
    ],
    "repeat": [
        Case(lambda x: x.repeat(1, 2, 1), ONE, "x.x"),
        Case(lambda x: x.repeat(3, 1, 1, 1), ONE, "xxx"),
    ],
    "tile": [Case(lambda x: x.tile((2, 1)), ONE, "x.x")],
}
