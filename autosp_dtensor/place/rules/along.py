"""Operations along one or some dims, which must be whole there, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...graph import Meta
from ...placement import Partial, Placement, Replicate, Shard
from ..rule import FactorRule, Factors, Local, Op, Option, Rule, Slot, argument, dims_of

__all__ = ["RULES"]


def _names(count: int) -> list[str]:
    return [str(dim) for dim in range(count)]


def along(position: int, default: Any = None, keyword: str = "dim") -> FactorRule:
    """Same shape out as in; the named dims stay whole (softmax, cumsum, flip), others are local."""

    def factors(op: Op) -> Factors:
        rank = len(op.ins[0].shape)
        given = argument(op, position, keyword, default)
        if len(op.args) > position + 1 and keyword == "dims" and isinstance(given, int):
            given = op.args[position:]  # x.flip(1, 2)
        dims = dims_of(given, rank)
        names = _names(rank)
        outs = []
        for meta in op.outs:
            same = len(meta.shape) == rank
            outs.append(
                tuple(
                    n if meta.shape[d] == op.ins[0].shape[d] else None for d, n in enumerate(names)
                )
                if same
                else (None,) * len(meta.shape)
            )
        others = tuple(_aligned(op, i) for i in range(1, len(op.ins)))
        local = frozenset(n for d, n in enumerate(names) if d not in dims)
        return Factors((tuple(names), *others), tuple(outs), local)

    return FactorRule(factors)


def _aligned(op: Op, i: int) -> tuple[str | None, ...]:
    """Further tensors (index, source) share a dim with the first one where rank and size agree."""
    first, other = op.ins[0].shape, op.ins[i].shape
    if len(first) != len(other):
        return (None,) * len(other)
    return tuple(
        str(d) if a == b else None for d, (a, b) in enumerate(zip(first, other, strict=True))
    )


def last_dims_whole(op: Op) -> Factors:
    """layer_norm and rms_norm: the normalized dims are whole, every leading dim is local."""
    rank = len(op.ins[0].shape)
    width = len(tuple(argument(op, 1, "normalized_shape")))
    names = _names(rank)
    params = tuple((None,) * len(meta.shape) for meta in op.ins[1:])
    return Factors((tuple(names), *params), (tuple(names),), frozenset(names[: rank - width]))


def matrix_whole(op: Op) -> Factors:
    """tril and triu: the last two dims are whole."""
    names = _names(len(op.ins[0].shape))
    return Factors((tuple(names),), (tuple(names),), frozenset(names[:-2]))


def _reduced(op: Op) -> tuple[tuple[int, ...], bool]:
    rank = len(op.ins[0].shape)
    position = 2 if op.name.endswith("norm") else 1
    dim = argument(op, position, "dim", None)
    if isinstance(dim, (torch.dtype, bool)):  # x.sum(dtype), x.std(unbiased)
        dim = None
    dims = dims_of(dim, rank)
    keep = bool(op.outs) and len(op.outs[0].shape) == rank and rank > 0
    return dims, keep


def reduction_factors(op: Op) -> Factors:
    """Local on every dim that is kept."""
    dims, keep = _reduced(op)
    names = _names(len(op.ins[0].shape))
    kept = [n for d, n in enumerate(names) if d not in dims]
    out = tuple(None if d in dims else n for d, n in enumerate(names)) if keep else tuple(kept)
    return Factors((tuple(names),), (out,) * len(op.outs), frozenset(kept))


def sum_factors(op: Op) -> Factors:
    """Local on every dim; a reduced one leaves a partial sum."""
    known = reduction_factors(op)
    every = frozenset(_names(len(op.ins[0].shape)))
    return Factors(known.ins, known.outs, every, every - known.local)


def localize_mean(op: Op, option: Option) -> Local:
    """The mean over a sharded dim: this rank's sum over the count of all ranks."""
    if not isinstance(option.outs[0], Partial):
        return Local(op.target, op.args, op.kwargs)
    dims, keep = _reduced(op)
    count = 1
    for dim in dims:
        count *= op.ins[0].shape[dim]
    return Local(mean_term, (Slot(0), tuple(dims), keep, count, op.kwargs.get("dtype")))


def mean_term(
    x: torch.Tensor, dims: tuple[int, ...], keepdim: bool, count: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """A rank's term of a mean over `count` elements in all."""
    # A sum may overflow where the mean does not.
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None
    return (x.sum(dims, keepdim=keepdim, dtype=dtype or wide) / count).to(dtype or x.dtype)


class OneOrTwo(Rule):
    """`max` and `min`: a reduction of one tensor, or pointwise on two."""

    def __init__(self, one: Rule, two: Rule) -> None:
        self.one, self.two = one, two

    def _rule(self, op: Op) -> Rule:
        return self.two if len(op.ins) == 2 else self.one

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        return self._rule(op).from_input(op, i, shard, local=local)

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        return self._rule(op).from_output(op, shard)

    def fresh(self, op: Op):
        return self._rule(op).fresh(op)


def gather_factors(op: Op) -> Factors:
    """gather, scatter: dim `dim` whole; on others local where all tensors have the same size."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 2 if op.name == "take_along_dim" else 1, "dim", None)
    if not isinstance(dim, int):  # take_along_dim without a dim flattens
        return Factors(
            tuple((None,) * len(m.shape) for m in op.ins),
            ((None,) * len(op.outs[0].shape),),
            frozenset(),
        )
    dim %= max(rank, 1)
    names = _names(rank)
    alike = all(len(m.shape) == rank for m in op.ins[1:])
    sizes = [{m.shape[d] for m in op.ins} for d in range(rank)] if alike else []
    same = [d for d, found in enumerate(sizes) if d != dim and len(found) == 1]

    def dims(meta: Meta) -> tuple[str | None, ...]:
        return tuple(names[d] if d in same else None for d in range(len(meta.shape)))

    return Factors(
        tuple(dims(meta) for meta in op.ins),
        tuple(dims(meta) for meta in op.outs),
        frozenset(names[d] for d in same),
    )


def index_select_factors(op: Op) -> Factors:
    """index_select, index_add, index_copy: `dim` whole, others local."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 1, "dim") % rank
    names = tuple(None if d == dim else str(d) for d in range(rank))
    ins: list[tuple[str | None, ...]] = [names]
    for meta in op.ins[1:]:
        ins.append(names if len(meta.shape) == rank and rank > 1 else (None,) * len(meta.shape))
    return Factors(tuple(ins), (names,), frozenset(n for n in names if n))


def pad_factors(op: Op) -> Factors:
    """Padded dims are whole."""
    names = _names(len(op.ins[0].shape))
    same = frozenset(
        n
        for d, n in enumerate(names)
        if op.outs[0].shape[d] == op.ins[0].shape[d] and not _is_padded(op, d, len(names))
    )
    return Factors((tuple(names),), (tuple(n if n in same else None for n in names),), same)


def _is_padded(op: Op, dim: int, rank: int) -> bool:
    pads = tuple(argument(op, 1, "pad"))
    at = 2 * (rank - 1 - dim)
    return any(pads[at : at + 2])


def cat_factors(op: Op) -> Factors:
    """cat: the joined dim is whole, others local. Legacy tensors of shape (0,) do not count."""
    rank = len(op.outs[0].shape)
    dim = argument(op, 1, "dim", 0) % rank
    others = tuple(None if d == dim else str(d) for d in range(rank))
    alone = sum(meta.numel > 0 for meta in op.ins) == 1  # joined with nothing: the same tensor
    every = tuple(str(d) for d in range(rank))

    def names(meta: Meta) -> tuple[str | None, ...]:
        if len(meta.shape) != rank:
            return (None,) * len(meta.shape)
        return every if alone and meta.numel else others

    out = every if alone else others
    return Factors(tuple(names(meta) for meta in op.ins), (out,), frozenset(n for n in out if n))


def stack_factors(op: Op) -> Factors:
    rank = len(op.outs[0].shape)
    dim = argument(op, 1, "dim", 0) % rank
    names = _names(rank - 1)
    out = (*names[:dim], None, *names[dim:])
    return Factors((tuple(names),) * len(op.ins), (tuple(out),), frozenset(names))


def split_factors(op: Op) -> Factors:
    """split, chunk, unbind: `dim` whole, others local."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 1 if op.name == "unbind" else 2, "dim", 0) % rank
    names = tuple(None if d == dim else str(d) for d in range(rank))
    kept = tuple(n for n in names if n)
    out = kept if op.name == "unbind" else names
    return Factors((names,), (out,) * len(op.outs), frozenset(kept))


def one_hot_factors(op: Op) -> Factors:
    names = tuple(_names(len(op.ins[0].shape)))
    return Factors((names,), ((*names, None),), frozenset(names))


def repeat_interleave_factors(op: Op) -> Factors:
    """Dims other than the repeated one are local; with a tensor of counts, or flattened, none."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 2, "dim")
    names = _names(rank)
    if dim is None or len(op.ins) > 1 or len(op.outs[0].shape) != rank:
        nothing = tuple((None,) * len(meta.shape) for meta in op.ins)
        return Factors(nothing, ((None,) * len(op.outs[0].shape),), frozenset())
    kept = tuple(None if d == dim % rank else n for d, n in enumerate(names))
    return Factors((kept,), (kept,), frozenset(n for n in kept if n))


def same_size_factors(op: Op) -> Factors:
    """repeat, tile: dims that keep their size, counted from the right, are local."""
    rank = len(op.outs[0].shape)
    offset = rank - len(op.ins[0].shape)
    out = [
        str(d) if d >= offset and op.ins[0].shape[d - offset] == op.outs[0].shape[d] else None
        for d in range(rank)
    ]
    return Factors((tuple(out[offset:]),), (tuple(out),), frozenset(n for n in out if n))


def unfold_factors(op: Op) -> Factors:
    """x.unfold(dim, size, step): `dim` is whole; windows are a new last dim."""
    rank = len(op.ins[0].shape)
    dim = argument(op, 1, "dimension") % rank
    names = tuple(None if d == dim else str(d) for d in range(rank))
    return Factors((names,), ((*names, None),), frozenset(n for n in names if n))


def batch_alone(op: Op) -> Factors:
    """group_norm: local on the batch."""
    rank = len(op.ins[0].shape)
    names = ("b", *(None,) * (rank - 1))
    others = tuple((None,) * len(meta.shape) for meta in op.ins[1:])
    return Factors((names, *others), (names,), frozenset("b"))


class ReadsNothing(Rule):
    """x.new_zeros(shape) and the like take dtype and device from x, no value: always whole."""

    def as_is(self, op: Op, placements: Sequence[Placement]) -> Option:
        return Option(tuple(placements), (Replicate(),) * len(op.outs))


def _pointwise_on_two() -> Rule:
    from .pointwise import POINTWISE

    return POINTWISE


_KEEP = FactorRule(reduction_factors)
_SUM = FactorRule(sum_factors)
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "cummax",
         "cummin", "glu", "special_softmax", "special_log_softmax"),
        along(1, -1),
    ),
    "gumbel_softmax": along(4, -1),
    "diff": along(2, -1),
    "unfold": FactorRule(unfold_factors),
    "group_norm": FactorRule(batch_alone),
    **dict.fromkeys(
        ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"), ReadsNothing()
    ),
    "normalize": along(2, 1),
    "flip": along(1, keyword="dims"),
    "roll": along(2, None, keyword="dims"),
    "sort": along(1, -1),
    "argsort": along(1, -1),
    "topk": along(2, -1),
    "kthvalue": along(2, -1),
    "layer_norm": FactorRule(last_dims_whole),
    "rms_norm": FactorRule(last_dims_whole),
    "tril": FactorRule(matrix_whole, cheap=True),
    "triu": FactorRule(matrix_whole, cheap=True),
    "sum": _SUM,
    "nansum": _SUM,
    "mean": FactorRule(sum_factors, localize_mean),
    **dict.fromkeys(
        ("prod", "amax", "amin", "argmax", "argmin", "any", "all", "std", "var", "norm",
         "linalg_norm", "linalg_vector_norm", "logsumexp", "median", "count_nonzero", "std_mean",
         "var_mean", "aminmax", "nanmean", "nanmedian", "special_logsumexp"),
        _KEEP,
    ),
    "max": OneOrTwo(_KEEP, _pointwise_on_two()),
    "min": OneOrTwo(_KEEP, _pointwise_on_two()),
    **dict.fromkeys(
        ("gather", "take_along_dim", "scatter", "scatter_add", "scatter_reduce"),
        FactorRule(gather_factors),
    ),
    **dict.fromkeys(
        ("index_select", "index_add", "index_copy", "index_fill"), FactorRule(index_select_factors)
    ),
    "pad": FactorRule(pad_factors, cheap=True),
    "cat": FactorRule(cat_factors, cheap=True),
    "concat": FactorRule(cat_factors, cheap=True),
    "concatenate": FactorRule(cat_factors, cheap=True),
    "stack": FactorRule(stack_factors, cheap=True),
    **dict.fromkeys(
        ("split", "chunk", "unbind", "tensor_split", "split_with_sizes", "unsafe_split",
         "unsafe_chunk"),
        FactorRule(split_factors),
    ),
    "one_hot": FactorRule(one_hot_factors),
    "repeat_interleave": FactorRule(repeat_interleave_factors),
    "repeat": FactorRule(same_size_factors, cheap=True),
    "tile": FactorRule(same_size_factors, cheap=True),
}  # fmt: skip
