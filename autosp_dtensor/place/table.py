"""Which rule an operation has: the user's, then by name, then pointwise by ATen's tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..capture.tap import Tap
from ..capture.targets import Opaque, OutOfPlace, UnderAutocast
from ..graph import Facts
from . import attention
from .rule import Rule
from .rules import along, index, linear, loss, pointwise, rows, views
from .rules.tap import TapRule

__all__ = ["USER_RULES", "find_rule"]

_BY_NAME: dict[str, Rule] = {
    **pointwise.RULES,
    **linear.RULES,
    **along.RULES,
    **views.RULES,
    **index.RULES,
    **rows.RULES,
    **attention.RULES,
    **loss.RULES,
}
USER_RULES: dict[Any, Rule] = {}
_TAP = TapRule()


def find_rule(target: Callable[..., Any], name: str, known: Facts) -> Rule | None:
    """The operation's rule or None; names count for torch's own functions, never for a user's."""
    key = target.func if isinstance(target, (Opaque, UnderAutocast)) else target
    if isinstance(key, Tap):
        return _TAP
    for each in (key, getattr(key, "overloadpacket", None)):
        if each is not None and each in USER_RULES:
            return USER_RULES[each]
    if isinstance(target, Opaque):
        return attention.FLASH if target.form else None
    if key in rows.BY_FUNCTION:
        return rows.BY_FUNCTION[key]
    if _is_torch(target) and name in _BY_NAME:
        return _BY_NAME[name]
    return pointwise.POINTWISE if pointwise.is_pointwise(target, known.aten) else None


def _is_torch(target: Callable[..., Any]) -> bool:
    if isinstance(target, (OutOfPlace, UnderAutocast)):
        target = target.func
    module = getattr(target, "__module__", None) or "torch"
    return module.split(".")[0] in ("torch", "autosp_dtensor", "_operator") and not hasattr(
        target, "_qualified_op_name"
    )
