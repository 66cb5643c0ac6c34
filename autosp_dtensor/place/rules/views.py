"""Operations that only rearrange dims; DTensor's own view rules differ by torch version."""

from __future__ import annotations

import math

import torch

from ...placement import Shard
from ..rule import FactorRule, Factors, Local, Op, Option, Rule, Slot, argument, local_shape

__all__ = ["RULES", "reshape_shard"]


def reshape_shard(source: tuple[int, ...], target: tuple[int, ...], shard: Shard) -> Shard | None:
    """Where a sharded dim goes in a row-major reshape; None: a part is no interval of one dim.

    In the flat order of elements a shard is `outer` blocks, of which each rank holds an interval.
    The same is said of the target with other numbers: [2, 8@sp, 6] -> [16@sp, 6] has outer 2,
    [12@sp] -> [4@sp, 3] divides the sizes by 3.
    """
    if source == target:
        return shard
    outer = math.prod(source[: shard.dim]) * shard.outer
    after = math.prod(source[shard.dim + 1 :])
    for dim, length in enumerate(target):
        before_here, after_here = math.prod(target[:dim]), math.prod(target[dim + 1 :])
        if outer % before_here or any(size * after % after_here for size in shard.sizes):
            continue
        sizes = tuple(size * after // after_here for size in shard.sizes)
        placed = Shard(dim, sizes, outer // before_here)
        if placed.outer * placed.block == length:
            return placed
    return None


class ReshapeRule(Rule):
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: the same elements in the same order.

    Arrives: x [..., S@sp, ...]
    Gives:   the dim that holds S, also merged with dims on either side: [B, S@sp] -> [B*S@sp]
    Costs:   nothing
    """

    cheap = True

    def from_input(self, op: Op, i: int, shard: Shard, *, local: bool = True) -> Option | None:
        if i > 0 or op.ins[0].numel != op.outs[0].numel:
            return None
        placed = reshape_shard(op.ins[0].shape, op.outs[0].shape, shard)
        whole = self.whole(op)
        return None if placed is None else Option((shard, *whole.ins[1:]), (placed,))

    def from_output(self, op: Op, shard: Shard) -> Option | None:
        placed = reshape_shard(op.outs[0].shape, op.ins[0].shape, shard)
        whole = self.whole(op)
        return None if placed is None else Option((placed, *whole.ins[1:]), (shard,))

    def fresh(self, op: Op):
        for dim, size in enumerate(op.outs[0].shape):
            if size >= op.axis_size:
                each, more = divmod(size, op.axis_size)
                sizes = tuple(each + (rank < more) for rank in range(op.axis_size))
                option = self.from_output(op, Shard(dim, sizes))
                if option is not None:
                    yield option

    def localize(self, op: Op, option: Option) -> Local:
        if any(isinstance(arg, torch.dtype) for arg in op.args):
            return Local(op.target, op.args, op.kwargs)
        return Local(torch.reshape, (Slot(0), local_shape(op.outs[0], option.outs[0])))


def permutation_factors(op: Op) -> Factors:
    """permute, transpose and the like: found by moving the names as the op moves the dims."""
    names = tuple(str(dim) for dim in range(len(op.ins[0].shape)))
    return Factors((names,), (_permuted(op, names),), frozenset(names))


def _permuted(op: Op, names: tuple[str, ...]) -> tuple[str, ...]:
    rank = len(names)
    order = list(range(rank))
    if op.name in ("transpose", "swapaxes", "swapdims"):
        first = argument(op, 1, "dim0", op.kwargs.get("axis0"))
        second = argument(op, 2, "dim1", op.kwargs.get("axis1"))
        order[first % rank], order[second % rank] = order[second % rank], order[first % rank]
    elif op.name in ("mT", "adjoint", "mH"):
        order[-2], order[-1] = order[-1], order[-2]
    elif op.name in ("t", "T", "H"):
        order.reverse()
    elif op.name in ("permute",):
        dims = (
            op.args[1:]
            if len(op.args) > 1 and isinstance(op.args[1], int)
            else argument(op, 1, "dims")
        )
        order = [dim % rank for dim in dims]
    else:  # movedim, moveaxis
        sources, targets = argument(op, 1, "source"), argument(op, 2, "destination")
        sources = (sources,) if isinstance(sources, int) else tuple(sources)
        targets = (targets,) if isinstance(targets, int) else tuple(targets)
        rest = [d for d in order if d not in [s % rank for s in sources]]
        moved = dict(zip([t % rank for t in targets], [s % rank for s in sources], strict=True))
        order = [moved[d] if d in moved else rest.pop(0) for d in range(rank)]
    return tuple(names[dim] for dim in order)


def expand_factors(op: Op) -> Factors:
    """expand: dims aligned from the right; a dim of size 1 is not cut, its copies are."""
    rank = len(op.outs[0].shape)

    def names(shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(str(rank - len(shape) + dim) for dim in range(len(shape)))

    out = names(op.outs[0].shape)
    return Factors(tuple(names(meta.shape) for meta in op.ins), (out,), frozenset(out))


def localize_expand(op: Op, option: Option) -> Local:
    return Local(torch.Tensor.expand, (Slot(0), local_shape(op.outs[0], option.outs[0])))


def complex_factors(op: Op) -> Factors:
    """view_as_complex and view_as_real: the dim of (real, imaginary) is whole."""
    wide = op.ins[0].shape if op.name == "view_as_complex" else op.outs[0].shape
    names = tuple(str(dim) for dim in range(len(wide) - 1))
    pair = (*names, None)
    if op.name == "view_as_complex":
        return Factors((pair,), (names,), frozenset(names))
    return Factors((names,), (pair,), frozenset(names))


_RESHAPE = ReshapeRule()
_PERMUTE = FactorRule(permutation_factors, cheap=True)
_EXPAND = FactorRule(expand_factors, localize_expand, cheap=True)
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
         "ravel"),
        _RESHAPE,
    ),
    **dict.fromkeys(
        ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT",
         "adjoint", "mH", "H"),
        _PERMUTE,
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _EXPAND),
    **dict.fromkeys(("view_as_complex", "view_as_real"), FactorRule(complex_factors, cheap=True)),
}  # fmt: skip
