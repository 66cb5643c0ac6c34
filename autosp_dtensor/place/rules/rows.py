"""Operations on rows, matrices or images that treat each one by itself: leading dims are local."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..rule import FactorRule, Factors, Op, Rule, argument, dims_of
from .along import along

__all__ = ["BY_FUNCTION", "RULES"]


def leading(count: Callable[[Op], int]) -> FactorRule:
    """The first `count` dims of the first tensor, and of results, are local; others are whole.

    Further tensors that have as many dims as the first one share them where sizes agree or are 1.
    """

    def factors(op: Op) -> Factors:
        rank, kept = len(op.ins[0].shape), max(count(op), 0)

        def names(shape: tuple[int, ...], width: int) -> tuple[str | None, ...]:
            return tuple(str(d) if d < width else None for d in range(len(shape)))

        ins = [names(op.ins[0].shape, kept)]
        for meta in op.ins[1:]:
            ins.append(names(meta.shape, kept if len(meta.shape) == rank else 0))
        outs = tuple(names(meta.shape, kept) for meta in op.outs)
        return Factors(tuple(ins), outs, frozenset(map(str, range(kept))))

    return FactorRule(factors)


def _before(width: int) -> FactorRule:
    """All but the last `width` dims, for operations that take any number before."""
    return leading(lambda op: len(op.ins[0].shape) - width)


def _solve(op: Op) -> Factors:
    """A [.., n, n] and B [.., n, k]; a B of fewer dims is a vector for each matrix."""
    rank = len(op.ins[0].shape)
    batch = rank - 2 if all(len(meta.shape) == rank for meta in op.ins) else 0
    return leading(lambda op: batch).factors(op)


def _transposed_convolution(op: Op) -> Factors:
    """x [b, c, ..], w [c, o / groups, ..], bias [o]. Local on b, and on o without groups."""
    x, w = op.ins[0], op.ins[1]
    space: tuple[str | None, ...] = (None,) * (len(w.shape) - 2)
    lead = ("b",) if len(x.shape) == len(w.shape) else ()
    out = "o" if argument(op, 6, "groups", 1) == 1 else None
    bias = ((out,),) if len(op.ins) > 2 else ()
    ins = ((*lead, None, *space), (None, out, *space), *bias)
    local = frozenset(name for name in ("b", out) if name)
    return Factors(ins, ((*lead, out, *space),), local)


def _of_two(position: int, default: int) -> FactorRule:
    """Two tensors that are broadcast, and one dim of that reduced (cosine_similarity)."""

    def factors(op: Op) -> Factors:
        shape = torch.broadcast_shapes(*(meta.shape for meta in op.ins))
        rank = len(shape)
        (dim,) = dims_of(argument(op, position, "dim", default), rank)
        names = tuple(None if d == dim else str(d) for d in range(rank))
        keeps = len(op.outs[0].shape) == rank
        out = names if keeps else tuple(n for n in names if n)
        ins = tuple(names[rank - len(meta.shape) :] for meta in op.ins)
        return Factors(ins, (out,), frozenset(n for n in names if n))

    return FactorRule(factors)


def _each(position: int) -> FactorRule:
    """Each element of one tensor against all of another one (isin, bucketize)."""

    def factors(op: Op) -> Factors:
        own = tuple(str(d) for d in range(len(op.outs[0].shape)))
        ins = [(None,) * len(meta.shape) for meta in op.ins]
        at = min(position, len(op.ins) - 1)
        if op.ins[at].shape != op.outs[0].shape:  # a number among the elements
            return Factors(tuple(ins), ((None,) * len(own),), frozenset())
        return Factors((*ins[:at], own, *ins[at + 1 :]), (own,), frozenset(own))

    return FactorRule(factors)


def _search(op: Op) -> Factors:
    """searchsorted: sequences [.., n], whole or one for all, and values [.., m]."""
    sequence, values = len(op.ins[0].shape), len(op.outs[0].shape)
    own = tuple(str(d) for d in range(values))
    if len(op.ins) != 2 or op.ins[1].shape != op.outs[0].shape:  # a sorter, or a number
        blank = tuple((None,) * len(meta.shape) for meta in op.ins)
        return Factors(blank, ((None,) * values,), frozenset())
    ordered = (None,) if sequence == 1 else (*own[:-1], None)
    return Factors((ordered, own), (own,), frozenset(own))


def _prelu(op: Op) -> Factors:
    """One weight for all, or one for each of dim 1."""
    names = tuple(str(d) for d in range(len(op.ins[0].shape)))
    shared = op.ins[1].numel == 1
    weight = tuple(None if shared else "1" for _ in op.ins[1].shape)
    return Factors((names, weight), (names,), frozenset(names))


_IMAGES = {"1d": 1, "2d": 2, "3d": 3}
RULES: dict[str, Rule] = {
    **{
        f"{kind}_pool{dims}": _before(width)
        for kind in ("avg", "max", "lp", "adaptive_avg", "adaptive_max")
        for dims, width in _IMAGES.items()
    },
    **{f"conv_transpose{dims}": FactorRule(_transposed_convolution) for dims in _IMAGES},
    "interpolate": leading(lambda op: 2),
    "pixel_shuffle": _before(3),
    "pixel_unshuffle": _before(3),
    **dict.fromkeys(
        ("inverse", "linalg_inv", "linalg_cholesky", "matrix_exp", "linalg_matrix_exp",
         "linalg_matrix_power", "matrix_power", "linalg_eigvalsh", "linalg_svdvals", "det",
         "linalg_det", "logdet", "linalg_slogdet"),
        _before(2),
    ),
    **dict.fromkeys(("linalg_solve", "linalg_solve_triangular"), FactorRule(_solve)),
    **dict.fromkeys(
        ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft"), along(2, -1)
    ),
    **dict.fromkeys(("fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2"), along(2, (-2, -1))),
    **dict.fromkeys(("fft_fftn", "fft_ifftn", "fft_rfftn", "fft_irfftn"), along(2, None)),
    "linalg_cross": along(2, -1),
    "cosine_similarity": _of_two(2, 1),
    "linalg_vecdot": _of_two(2, -1),
    "isin": _each(0),
    "bucketize": _each(0),
    "searchsorted": FactorRule(_search),
    "prelu": FactorRule(_prelu),
}  # fmt: skip
# Functions whose names mean something else elsewhere: Tensor.unfold takes windows of one dim.
BY_FUNCTION: dict[Callable[..., object], Rule] = {F.unfold: leading(lambda op: 1)}
