"""Which pattern a mask is, proved on every element: rectangles by bounds, borders one by one."""

from __future__ import annotations

from enum import Enum

import torch
from torch.fx import Node

from ...graph import facts
from .bounds import bounds
from .expression import Expression, NotStatic, ReadState
from .frame import Rect

__all__ = ["MASKED_BELOW", "Pattern", "decide", "forbids_from", "is_bool", "recognize"]

_LEAF = 512
# A float mask forbids by so much or more: exp(score + it) is then exactly 0 for any score below 5e8
# (models write -inf, the dtype's least value, or -1e9).
MASKED_BELOW = -1e9


class Pattern(Enum):
    """What a mask allows, of those for which kernels need no mask."""

    FULL = "full"
    CAUSAL = "causal"


def recognize(mask: Node, read: ReadState | None = None) -> Pattern | None:
    """FULL (every key allowed), CAUSAL (keys up to the query's own position), or None.

    Bool masks allow where True; float masks where 0, and forbid by -inf or the dtype's least value.
    Work grows with the length, not its square: a rectangle whose bounds decide it is not looked
    into.
    """
    meta = facts(mask).meta
    if len(meta.shape) < 2 or meta.requires_grad:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rectangles are small: threads would wait for each other
    try:
        expression = Expression(mask, read)
        if _holds(expression, Pattern.FULL):
            return Pattern.FULL
        if expression.rows == expression.columns and _holds(expression, Pattern.CAUSAL):
            return Pattern.CAUSAL
    except NotStatic:
        return None
    finally:
        torch.set_num_threads(threads)
    return None


class _TooMuch(Exception):
    pass


def _holds(expression: Expression, pattern: Pattern) -> bool:
    budget = [16 + 8 * (expression.rows + expression.columns) // _LEAF]
    whole = Rect(0, expression.rows, 0, expression.columns)
    if pattern is Pattern.CAUSAL and expression.rows > 1 and _by_sides(expression, whole):
        return True
    try:
        return _check(expression, pattern, whole, budget)
    except _TooMuch:
        return False


def _by_sides(expression: Expression, whole: Rect) -> bool:
    """Whether bounds tell at once that all on one side of the diagonal is allowed, and nothing on
    the other."""
    found = [bounds(expression, whole, side) for side in (True, False)]
    verdicts = [None if each is None else decide(expression, each) for each in found]
    return verdicts == [True, False]


def _check(expression: Expression, pattern: Pattern, rect: Rect, budget: list[int]) -> bool:
    wanted = _uniform(pattern, rect)
    found = bounds(expression, rect)
    if wanted is not None and found is not None:
        verdict = decide(expression, found)
        if verdict is not None:
            return verdict == wanted
    rows, columns = rect[1] - rect[0], rect[3] - rect[2]
    if rows <= _LEAF and columns <= _LEAF:
        budget[0] -= 1
        if budget[0] < 0:
            raise _TooMuch
        return _equal(expression, pattern, rect)
    middle_row = rect[0] + rows // 2 if rows > _LEAF else rect[1]
    middle_column = rect[2] + columns // 2 if columns > _LEAF else rect[3]
    parts = [
        Rect(r0, r1, c0, c1)
        for r0, r1 in ((rect[0], middle_row), (middle_row, rect[1]))
        for c0, c1 in ((rect[2], middle_column), (middle_column, rect[3]))
        if r0 < r1 and c0 < c1
    ]
    # Whole ones first: they refute cheaply.
    parts.sort(key=lambda part: _uniform(pattern, part) is None)
    return all(_check(expression, pattern, part, budget) for part in parts)


def _uniform(pattern: Pattern, rect: Rect) -> bool | None:
    """What the pattern says of a rectangle as a whole: allowed, forbidden, or mixed."""
    if pattern is Pattern.FULL or rect[3] - 1 <= rect[0]:
        return True
    return False if rect[2] > rect[1] - 1 else None


def is_bool(expression: Expression) -> bool:
    """Whether a mask allows where True, not where 0."""
    return facts(expression.node).meta.dtype == torch.bool


def decide(expression: Expression, bounds: tuple[float, float]) -> bool | None:
    """Allowed or forbidden throughout, as far as bounds can tell."""
    if is_bool(expression):
        return True if bounds[0] > 0 else False if bounds[1] == 0 else None
    if bounds == (0.0, 0.0):
        return True
    return False if bounds[1] <= forbids_from(expression) else None


def forbids_from(expression: Expression) -> float:
    """The greatest number by which a float mask forbids."""
    dtype = facts(expression.node).meta.dtype
    return max(MASKED_BELOW, torch.finfo(dtype).min) if dtype.is_floating_point else MASKED_BELOW


def _equal(expression: Expression, pattern: Pattern, rect: Rect) -> bool:
    value = expression.exact(rect)
    rows = torch.arange(rect[0], rect[1])[:, None]
    columns = torch.arange(rect[2], rect[3])[None, :]
    wanted = (
        columns <= rows
        if pattern is Pattern.CAUSAL
        else torch.ones(rows.numel(), columns.numel(), dtype=torch.bool)
    )
    if is_bool(expression):
        return bool((value == wanted).all())
    allowed, forbidden = value == 0, value <= forbids_from(expression)
    return bool(torch.where(wanted, allowed, forbidden).all())
