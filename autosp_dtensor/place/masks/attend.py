"""Attention by bands of queries, the mask made for one band at a time, forward and backward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..._torch import FakeTensor
from ...autocast import AutocastState, autocast_state, under
from ..refuse import first_gradient_alone
from .frame import Rect
from .runs import Pass, Runs
from .tiles import Band, TileMask
from .varlen import attend_runs

__all__ = ["Softmax", "tiled_attention"]

# Scores of one strip of queries are held at once; strips are made lower to stay below this.
SCORE_BYTES = 256 << 20


@dataclass(frozen=True)
class Softmax:
    """What stands around softmax in attention written by hand, where it is not the plain kernel.

    dtype: that softmax is computed in, None for that of the scores. weights: that its result is
    cast to, None for none. stats: log-sum-exp (and, "max", the greatest score) are results, too.
    """

    dtype: torch.dtype | None = None
    weights: torch.dtype | None = None
    stats: tuple[str, ...] = ()


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *leaves: torch.Tensor,
    mask: TileMask,
    own: tuple[int, int] | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    softmax: Softmax | None = None,
    sink: bool = False,
    runs: Runs | None = None,
) -> Any:
    """scaled_dot_product_attention(q, k, v, mask) without the mask, or any attention by hand.

    Args:
        q, k, v: [B, H, S, D], [B, Hkv, T, D], [B, Hkv, T, E]; or all without B.
        leaves: what the mask is made of, as `TileMask` lists it.
        mask: a mask, or an expression of the scores q @ k^T.
        own: which of the mask's heads q has, (from, to); None: all.
        sink: the last of `leaves` is no part of the mask, but one more score of each query, [1 or
            B, 1 or H, 1 or S, 1], whose weight is dropped.
        runs: given where a variable-length kernel may run it, if the mask is made of runs.

    Returns:
        [B, H, S, E]; with `softmax.stats` a tuple of it and statistics [B, H, S].

    Keys that no query of a band may read are not touched. In backward each band is computed again,
    so that neither scores nor masks are kept. A query that may read nothing gets zeros, as in SDPA.
    """
    kind = q.device.type
    state = autocast_state(kind)
    if state is not None and state[1]:  # as scaled_dot_product_attention does
        q, k, v = (x.to(state[2]) for x in (q, k, v))
    flat = q.dim() == 3
    if flat:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    factor: float = (
        scale if scale is not None else q.shape[-1] ** -0.5 if mask.product is None else 1.0
    )
    passes = _passes(mask, runs, leaves, q, k)
    if passes and runs:
        if runs.scale is not None:
            factor = runs.scale
        out = attend_runs(passes, runs.kernel, q, k, v, factor, dropout_p)
        return out.squeeze(0) if flat else out
    seed = int(torch.randint(1 << 31, ())) if dropout_p and _has_data(q) else 0
    call = _Call(mask, own, factor, enable_gqa, dropout_p, seed, softmax or Softmax(), sink)
    outs = _Tiled.apply(call, q, k, v, *leaves)
    if flat:
        outs = tuple(out.squeeze(0) for out in outs)
    return outs if call.softmax.stats else outs[0]


def _passes(
    mask: TileMask, runs: Runs | None, leaves: Sequence[torch.Tensor], q: torch.Tensor, k: Any
) -> list[Pass] | None:
    if runs is None or q.numel() == 0 or k.numel() == 0:
        return None
    if runs.known is None:
        if not _has_data(q):  # a plan
            return None
        return mask.passes(leaves, q.shape[0], q.device)
    return runs.passes(q.shape[0], q.shape[2], k.shape[2], q.device)


def _without_data(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **given: Any) -> Any:
    """The same shapes and the same tensors kept for backward, for tensors without data."""
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=bool(given.get("enable_gqa")))
    stats = given["softmax"].stats if given.get("softmax") else ()
    return (out, *(out.sum(-1).to(_stats_dtype(q)) for _ in stats)) if stats else out


cast(Any, tiled_attention).without_data = _without_data


def _has_data(x: torch.Tensor) -> bool:
    return not isinstance(x, FakeTensor)


def _stats_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Call:
    mask: TileMask
    own: tuple[int, int] | None
    scale: float
    enable_gqa: bool
    dropout_p: float
    seed: int
    softmax: Softmax
    sink: bool = False

    def split(self, leaves: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        """(what the mask is made of, the sink)"""
        return (leaves[:-1], leaves[-1]) if self.sink else (leaves, None)

    def sink_of(self, sink: torch.Tensor, rect: Rect) -> torch.Tensor:
        """The sink of a strip's queries."""
        each = zip(range(3), (rect.batch, rect.heads, (rect.top, rect.bottom)), strict=True)
        for dim, span in each:
            if span is not None and sink.shape[dim] > 1:
                sink = sink.narrow(dim, span[0], span[1] - span[0])
        return sink

    def rect(self, band: Band) -> Rect:
        batch = None if band.batch is None else (band.batch, band.batch + 1)
        return Rect(*band.rows, *band.columns, self.own, batch)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(q, k, v, *leaves)
        ctx.autocast = autocast_state(q.device.type)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        fills = {"lse": float("-inf"), "max": float("-inf")}
        stats = [
            torch.full(q.shape[:-1], fills[name], dtype=_stats_dtype(q), device=q.device)
            for name in call.softmax.stats
        ]
        if _has_data(q):
            ctx.bands = call.mask.bands(call.split(leaves)[0])
        else:  # a plan: what is allowed is not known
            ctx.bands = [call.mask.fullest()]
        for number, band in enumerate(_strips(call, ctx.bands, q)):
            _fill(call, number, band, (q, k, v), leaves, (out, *stats))
        return (out, *stats)

    @staticmethod
    @first_gradient_alone(
        "attention with a mask that is made by parts",
        "take such a gradient (a penalty on gradients) without parallelize",
    )
    def backward(ctx: Any, *incoming: torch.Tensor):
        call: _Call = ctx.call
        q, k, v, *leaves = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (q, k, v)]
        trained = [*call.mask.trained, *([len(leaves) - 1] if call.sink else [])]
        trained = [i for i in trained if ctx.needs_input_grad[4 + i]]
        leaf_grads = {i: torch.zeros_like(leaves[i]) for i in trained}
        for number, band in enumerate(_strips(call, ctx.bands, q)):
            made = functools.partial(_attend, call, number, band)
            _add_gradients(made, ctx.autocast, band, (q, k, v), leaves, incoming, grads, leaf_grads)
        return (None, *grads, *(leaf_grads.get(i) for i in range(len(leaves))))


def _fill(
    call: _Call,
    number: int,
    band: Band,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    wholes: Sequence[torch.Tensor],
) -> None:
    """A strip's rows of the results. A function, so that nothing of it is there in the next."""
    parts = _parts(band, *qkv)
    if parts is None:
        return
    found = _attend(call, number, band, leaves, *parts)
    for at, (whole, part) in enumerate(zip(wholes, found, strict=True)):
        _rows(band, whole, -2 if at == 0 else -1).copy_(part)


def _add_gradients(
    attend: Callable[..., tuple[torch.Tensor, ...]],
    autocast: AutocastState,
    band: Band,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor],
    leaf_grads: dict[int, torch.Tensor],
) -> None:
    """A strip again, and what it adds to the gradients of q, k, v and of trained leaves."""
    parts = _parts(band, *qkv)
    if parts is None:
        return
    inputs = [part.detach().requires_grad_() for part in parts]
    given = [x.detach() for x in leaves]
    for i in leaf_grads:
        given[i].requires_grad_()
    with torch.enable_grad(), under(autocast):
        outs = attend(given, *inputs)
    pairs = [
        (out, _rows(band, grad, -2 if at == 0 else -1))
        for at, (out, grad) in enumerate(zip(outs, incoming, strict=True))
        if out.requires_grad and grad is not None
    ]
    found = torch.autograd.grad(
        [out for out, _ in pairs],
        [*inputs, *(given[i] for i in leaf_grads)],
        [grad for _, grad in pairs],
        allow_unused=True,
    )
    places = [_rows(band, grads[0]), _columns(band, grads[1]), _columns(band, grads[2])]
    for place, each in zip([*places, *leaf_grads.values()], found, strict=True):
        if each is not None:
            place.add_(each)


def _strips(call: _Call, bands: list[Band], q: torch.Tensor) -> Iterator[Band]:
    """Bands, those whose scores are made here cut into strips that fit in SCORE_BYTES."""
    for band in bands:
        if not _by_hand(call):
            yield band
            continue
        rows = q.shape[0] if band.batch is None else 1
        bits = 8 if q.dtype == torch.float64 else 4
        one = max(1, rows * q.shape[1] * (band.columns[1] - band.columns[0]) * bits)
        height = max(1, SCORE_BYTES // one)
        for top in range(*band.rows, height):
            bottom = min(top + height, band.rows[1])
            yield Band(band.batch, (top, bottom), band.columns, band.masked)


def _by_hand(call: _Call) -> bool:
    """Where no kernel gives it: scores are changed, or the mask is trained."""
    changed = call.mask.product is not None or call.sink
    return changed or bool(call.mask.trained or call.softmax.stats)


def _rows(band: Band, x: torch.Tensor, dim: int = -2) -> torch.Tensor:
    x = x.narrow(dim, band.rows[0], band.rows[1] - band.rows[0])
    return x if band.batch is None else x[band.batch : band.batch + 1]


def _columns(band: Band, x: torch.Tensor) -> torch.Tensor:
    x = x[..., band.columns[0] : band.columns[1], :]
    return x if band.batch is None else x[band.batch : band.batch + 1]


def _parts(
    band: Band, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if band.columns[0] >= band.columns[1] or q.shape[1] == 0:
        return None
    return _rows(band, q), _columns(band, k), _columns(band, v)


def _attend(
    call: _Call,
    number: int,
    band: Band,
    leaves: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    with _drawing(call, number, q.device):
        if _by_hand(call):
            return _by_softmax(call, band, leaves, q, k, v)
        allowed = None
        if band.masked:
            allowed = call.mask.values(call.split(leaves)[0], call.rect(band), q.device)
            if allowed.dtype != torch.bool:
                allowed = allowed.to(q.dtype)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            allowed,
            dropout_p=call.dropout_p,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )
        return (out,)


@contextlib.contextmanager
def _drawing(call: _Call, number: int, device: torch.device) -> Iterator[None]:
    """The same draws for a strip in forward and in backward."""
    if not call.dropout_p:
        yield
        return
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(call.seed * 1_000_003 + number)
        yield


def _by_softmax(
    call: _Call,
    band: Band,
    leaves: Sequence[torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Scores, what the model makes of them, softmax and weights, all of one strip."""
    leaves, sink = call.split(leaves)
    scores = _grouped(q, k.mT)
    if call.scale != 1.0:
        scores = scores * call.scale
    if call.mask.product is not None:
        scores = call.mask.values(leaves, call.rect(band), q.device, scores)
    else:
        values = call.mask.values(leaves, call.rect(band), q.device)
        if call.mask.is_bool:
            scores = scores.masked_fill(~values, float("-inf"))
        else:
            scores = scores + values
    if sink is not None:
        column = call.sink_of(sink, call.rect(band)).to(scores.dtype)
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    if call.softmax.dtype is not None:
        scores = scores.to(call.softmax.dtype)
    stats = []
    for name in call.softmax.stats:
        stat = scores.logsumexp(-1) if name == "lse" else scores.amax(-1)
        stats.append(stat.to(_stats_dtype(q)))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if sink is not None:
        weights = weights[..., :-1]
    if call.dropout_p:
        weights = F.dropout(weights, call.dropout_p)
    weights = weights.to(call.softmax.weights or v.dtype)
    return (_grouped(weights, v).to(q.dtype), *stats)


def _grouped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, H, S, D] @ b [B, Hkv, D, T], each head of b shared by H / Hkv heads of a in a row."""
    heads, shared, rows = a.shape[1], b.shape[1], a.shape[2]
    if heads == shared:
        return a @ b
    together = a.reshape(a.shape[0], shared, heads // shared * rows, a.shape[3])
    return (together @ b).view(a.shape[0], heads, rows, b.shape[3])
