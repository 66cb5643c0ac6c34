"""The forms of flash-attn's entry points: any order of dims, whole or packed, variable lengths."""

from __future__ import annotations

from ...capture.flash import ENTRIES
from ...capture.targets import Opaque
from ..rule import Factors, Op, Slot
from .form import HEADS, KEY_HEADS, Form

__all__ = ["flash_form"]


def flash_form(op: Op) -> Form:
    """Local on heads alone: what cu_seqlens and masks count are tokens and rows of the whole."""
    target = op.target
    assert isinstance(target, Opaque)
    call = ENTRIES[target.form]
    named = {v.index: name for name, v in op.kwargs.items() if isinstance(v, Slot)}
    terms = [_term(call.dims.get(named[i], ""), len(meta.shape)) for i, meta in enumerate(op.ins)]
    heads = {name: _size(op, terms, name) for name in (HEADS, KEY_HEADS)}
    group = heads[HEADS] // heads[KEY_HEADS] if heads[KEY_HEADS] else 1
    if group == 1:
        terms = [tuple(HEADS if name == KEY_HEADS else name for name in term) for term in terms]
    out = _term(call.out, len(op.outs[0].shape))
    rest = [name for name in call.out.split() if name not in (HEADS, "e", "d")]
    rest.insert(1 if rest[0] == "b" else 0, HEADS)  # of log-sum-exp, [b, h, m] or [h, m]
    outs = (out, *(tuple(rest) for _ in op.outs[1:]))
    local = frozenset({HEADS}) if group == 1 else frozenset()
    factors = Factors(tuple(terms), outs, local, prefer=(HEADS,) if group == 1 else ())
    return Form(factors, group, target.without_data)


def _term(text: str, rank: int) -> tuple[str | None, ...]:
    """Names of a tensor's dims; what has fewer dims lacks the first ones (slopes [H])."""
    names = text.split()
    if len(names) < rank:
        return (None,) * rank
    return tuple(None if name in ("n", "d", "e") else name for name in names[len(names) - rank :])


def _size(op: Op, terms: list[tuple[str | None, ...]], name: str) -> int:
    for term, meta in zip(terms, op.ins, strict=True):
        if name in term:
            return meta.shape[term.index(name)]
    return 0
