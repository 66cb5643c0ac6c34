"""Operations that treat every element alike, with broadcasting; most are found by ATen's tag."""

from __future__ import annotations

from typing import Any

import torch

from ...capture.targets import OutOfPlace
from ..rule import FactorRule, Factors, Op

__all__ = ["POINTWISE", "RULES", "is_pointwise"]

_aten = torch.ops.aten
_HARMLESS = {
    _aten.detach,
    _aten.alias,
    _aten._to_copy,
    _aten.clone,
    _aten.lift_fresh,
    _aten.scalar_tensor,
    _aten.empty_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.copy,
    _aten.copy_,
    _aten.fill,
    _aten.fill_,
    _aten.zero_,
    _aten.expand,
    _aten.where,
    _aten._unsafe_view,
    _aten.leaky_relu,  # without the tag in torch 2.11
    _aten.leaky_relu_,
}


def is_pointwise(target: Any, ops: tuple[Any, ...]) -> bool:
    """Whether a call is made of operations that ATen tags as pointwise, and of copies."""
    if isinstance(target, OutOfPlace):  # after a write to a view, autograd makes it once more
        writes = [k for k, op in enumerate(ops) if op.overloadpacket.__name__.endswith("_")]
        ops = ops[: writes[-1] + 1] if writes else ops
    return bool(ops) and all(_is_tagged(op) or op.overloadpacket in _HARMLESS for op in ops)


def _is_tagged(op: Any) -> bool:
    """Tagged itself, or in place of one that is (torch 2.11 tags elu, not elu_)."""
    if torch.Tag.pointwise in op.tags:
        return True
    name = op.overloadpacket.__name__
    plain = getattr(_aten, name[:-1], None) if name.endswith("_") else None
    return plain is not None and any(
        torch.Tag.pointwise in getattr(plain, overload).tags for overload in plain.overloads()
    )


def broadcast_factors(op: Op) -> Factors:
    """The i-th dim from the right of every tensor is one factor. Local on all of them."""
    rank = max((len(meta.shape) for meta in op.outs), default=0)

    def names(shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(str(rank - len(shape) + dim) for dim in range(len(shape)))

    return Factors(
        tuple(names(meta.shape) for meta in op.ins),
        tuple(names(meta.shape) for meta in op.outs),
        frozenset(str(dim) for dim in range(rank)),
    )


def element_loss_factors(op: Op) -> Factors:
    """Losses by element: local once `place/losses.py` has made them reduction="none"."""
    if op.outs[0].shape != torch.broadcast_shapes(*(meta.shape for meta in op.ins[:2])):
        blank = tuple((None,) * len(meta.shape) for meta in op.ins)
        return Factors(blank, ((None,) * len(op.outs[0].shape),), frozenset())
    return broadcast_factors(op)


POINTWISE = FactorRule(broadcast_factors, cheap=True)

# Pointwise in meaning, but without the tag in some torch version, or drawn at random per element.
_NAMES = (
    "where masked_fill clamp clip copy fill zero to type_as float double half bfloat16 bool int "
    "long type contiguous clone detach zeros_like ones_like full_like empty_like rand_like "
    "randn_like randint_like dropout alpha_dropout bernoulli normal uniform exponential lerp "
    "addcmul addcdiv nan_to_num hardswish log_sigmoid "
    "floor_divide floordiv rfloordiv mish complex polar conj conj_physical "
    "resolve_conj resolve_neg real imag"
)
RULES = {name: POINTWISE for name in _NAMES.split()}
_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div soft_margin_loss poisson_nll_loss"
)
RULES.update({name: FactorRule(element_loss_factors) for name in _LOSSES.split()})
RULES["dropout"] = RULES["alpha_dropout"] = RULES["bernoulli"] = FactorRule(broadcast_factors)
