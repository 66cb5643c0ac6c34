"""Products: linear, matmul, einsum, embedding, convolutions."""

from __future__ import annotations

from ...placement import Shard
from ..rule import FactorRule, Factors, Local, Op, Option, argument

__all__ = ["RULES"]


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" for i in range(count))


def linear_factors(op: Op) -> Factors:
    """x [..., k], w [n, k], bias [n] -> [..., n]. Local on all; k leaves a sum, if no bias."""
    lead = _numbered("i", len(op.ins[0].shape) - 1)
    weight = ("n", "k") if len(op.ins[1].shape) == 2 else ("k",)
    bias = (("n",),) if len(op.ins) > 2 else ()
    out = (*lead, "n") if len(weight) == 2 else lead
    sums = frozenset() if bias else frozenset({"k"})
    return Factors(
        ((*lead, "k"), weight, *bias), (out,), frozenset((*lead, "n")) | sums, sums, (*lead, "n")
    )


def matmul_factors(op: Op) -> Factors:
    """[..., m, k] @ [..., k, n], leading dims broadcast. Local on all but k, which leaves a sum.

    Preferred, when both operands are sharded on the sequence: the last leading dim, which is heads
    in attention.
    """
    a, b = (len(meta.shape) for meta in op.ins[-2:])
    lead = _numbered("i", max(a, b, 2) - 2)
    left = (*lead[len(lead) - max(a - 2, 0) :], "m", "k") if a > 1 else ("k",)
    right = (*lead[len(lead) - max(b - 2, 0) :], "k", "n") if b > 1 else ("k",)
    out = (*lead, *(("m",) if a > 1 else ()), *(("n",) if b > 1 else ()))
    if op.name in ("rmatmul",):
        left, right = right, left
    added = op.ins[:-2]  # baddbmm and addmm add their first argument
    extra = tuple(out[len(out) - len(meta.shape) :] for meta in added)
    sums = frozenset() if added else frozenset({"k"})
    local = frozenset((*lead, "m", "n")) | sums
    return Factors((*extra, left, right), (out,), local, sums, (*reversed(lead), "m", "n"))


def einsum_factors(op: Op) -> Factors:
    """Letters are factors: one that the result lacks leaves a sum, a repeated one is whole."""
    equation = str(op.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - set(",."))
        right = ("..." if "..." in left else "") + "".join(x for x in letters if left.count(x) == 1)
    dots = max(
        (
            len(m.shape) - len(t.replace("...", ""))
            for t, m in zip(terms, op.ins, strict=True)
            if "..." in t
        ),
        default=0,
    )

    def names(term: str, rank: int) -> tuple[str, ...]:
        if "..." not in term:
            return tuple(term)
        before, after = term.split("...")
        width = rank - len(before) - len(after)
        return (*before, *(f".{dots - width + i}" for i in range(width)), *after)

    ins = tuple(names(t, len(m.shape)) for t, m in zip(terms, op.ins, strict=True))
    out = names(right, len(op.outs[0].shape))
    every = {name for each in (*ins, out) for name in each}
    whole = {name for each in (*ins, out) for name in each if each.count(name) > 1}
    local = frozenset(every - whole)
    shared = [name for name in out if all(name in each for each in ins)]
    rest = [name for name in out if name not in shared]
    return Factors(ins, (out,), local, frozenset(local - set(out)), (*reversed(shared), *rest))


def embedding_factors(op: Op) -> Factors:
    """ids [...], table [v, d] -> [..., d]. Local on the dims of ids, and on d."""
    lead = _numbered("i", len(op.ins[0].shape))
    if argument(op, 5, "scale_grad_by_freq", False):  # the gradient counts ids over all tokens
        return Factors((lead, ("v", "d")), ((*lead, "d"),), frozenset("d"), prefer=("d",))
    return Factors(
        (lead, ("v", "d")), ((*lead, "d"),), frozenset((*lead, "d")), prefer=(*lead, "d")
    )


def convolution_factors(op: Op) -> Factors:
    """x [b, c, ...], w [o, c / groups, ...]. Local on b, on channels if depthwise, else o."""
    x, w = op.ins[0], op.ins[1]
    space = _numbered("s", len(w.shape) - 2)
    batched = len(x.shape) == len(w.shape)
    groups = argument(op, 6, "groups", 1)
    depthwise = groups == x.shape[-len(space) - 1] == w.shape[0]
    channel = "o" if depthwise else "c"
    lead = ("b",) if batched else ()
    bias = (("o",),) if len(op.ins) > 2 else ()
    kernel = tuple(None for _ in space)
    local = {"b"} | ({"o"} if depthwise or groups == 1 else set())
    return Factors(
        ((*lead, channel, *space), ("o", None, *kernel), *bias),
        ((*lead, "o", *space),),
        frozenset(local),
        prefer=("o", "b") if depthwise else ("b", "o"),
    )


def localize_convolution(op: Op, option: Option) -> Local:
    """Where channels are split, each with its own filter, a rank has as many groups as channels."""
    channels = option.ins[1]
    if not isinstance(channels, Shard) or argument(op, 6, "groups", 1) == 1:
        return Local(op.target, op.args, op.kwargs)
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs, "groups": channels.length()}
    return Local(op.target, (given.pop("input"), given.pop("weight")), given)


def outer_factors(op: Op) -> Factors:
    return Factors((("m",), ("n",)), (("m", "n"),), frozenset(("m", "n")))


_LINEAR = FactorRule(linear_factors)
_MATMUL = FactorRule(matmul_factors)
RULES = {
    "linear": _LINEAR,
    "matmul": _MATMUL,
    "rmatmul": _MATMUL,
    "mm": _MATMUL,
    "bmm": _MATMUL,
    "mv": _MATMUL,
    "dot": _MATMUL,
    "baddbmm": _MATMUL,
    "addmm": _MATMUL,
    "outer": FactorRule(outer_factors),
    "ger": FactorRule(outer_factors),
    "einsum": FactorRule(einsum_factors),
    "embedding": FactorRule(embedding_factors),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d"), FactorRule(convolution_factors, localize_convolution)
    ),
}
