"""Interval arithmetic: the least and the greatest value of an expression on a rectangle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ...graph import facts, short_name
from .expression import Expression, Step
from .frame import Rect
from .lines import Side, constant_line, line_of, reach

__all__ = ["Bounds", "bounds", "forbidden_below"]

Bounds = tuple[float, float]
Known = Bounds | None  # None: nothing is known


def forbidden_below(dtype: torch.dtype, least: float) -> float:
    """From where down a score counts as forbidden by a finite number: half of `least` or of the
    dtype's range. `bounds` takes scores to be an eighth of that at most.
    """
    return max(least, torch.finfo(dtype).min) / 2 if dtype.is_floating_point else least


def bounds(expression: Expression, rect: Rect, side: Side = None) -> Known:
    """Least and greatest value on a rectangle, True as 1; None where they are not known.

    side: only of the elements with column <= row (True), or > (False), of which it has some.

    Scores themselves are taken to be below 1e8, or an eighth of their dtype's range.
    """
    return _bounds(expression, expression.root, rect, side)


def _bounds(expression: Expression, step: Step, rect: Rect, side: Side) -> Known:
    node = step.node
    if step.kind in ("small", "buffer"):
        value = expression.cut(step, rect)
        return None if value.numel() == 0 else _clean(value.min().item(), value.max().item())
    if step.kind == "product":
        return _scores(expression, facts(node).meta.dtype)
    if step.kind == "constant":
        return _fitted((step.detail, step.detail), facts(node).meta.dtype)
    if step.kind == "view":
        return _bounds(expression, step.inputs[0], rect, side)
    if step.kind == "triangle":
        return _triangle(expression, step, rect, side)
    return _pointwise(expression, step, rect, side) if step.kind == "pointwise" else None


def _pointwise(expression: Expression, step: Step, rect: Rect, side: Side) -> Known:
    node = step.node
    name = short_name(node.target)
    rule = _RULES.get(name)
    is_cast = name in _CASTS
    if rule is None or (node.kwargs and not is_cast):
        return None
    dtype = facts(node).meta.dtype
    if (name in _LOGIC and dtype != torch.bool) or (is_cast and not dtype.is_floating_point):
        return None
    values = dict(zip(node.all_input_nodes, step.inputs, strict=True))
    if side is not None and name in _COMPARISONS:
        apart = _apart(
            expression, [values[a] if isinstance(a, Node) else a for a in node.args], rect, side
        )
        if apart is not None:
            return rule(apart, (0.0, 0.0))
    inputs = [
        _bounds(expression, values[a], rect, side) if isinstance(a, Node) else _scalar(a)
        for a in node.args
    ]
    if name in _LOGIC:
        inputs = [None if each is None else _as_bool(each) for each in inputs]
    kinds = {dtype, *(facts(a).meta.dtype for a in values)}
    for kind in sorted((k for k in kinds if k.is_floating_point), key=str):
        inputs = [None if each is None else _near(each, kind) for each in inputs]
    found = rule(*inputs)
    return None if found is None else _fitted(found, dtype)


def _scores(expression: Expression, dtype: torch.dtype) -> Bounds:
    most = 0.0 if expression.blank else min(1e8, torch.finfo(dtype).max / 8)
    return -most + 0.0, most


def _clean(least: float, most: float) -> Known:
    """Bounds without NaN; True as 1."""
    return None if least != least or most != most else (least + 0, most + 0)


def _near(a: Bounds, dtype: torch.dtype) -> Bounds:
    """Wide enough for those who round numbers to this dtype first, and for those who do not."""
    return min(a[0], _rounded(a[0], dtype)), max(a[1], _rounded(a[1], dtype))


def _fitted(a: Bounds, dtype: torch.dtype) -> Known:
    """The bounds of a result as its dtype holds it. Rounding keeps order; integers wrap."""
    if dtype == torch.bool:
        return _as_bool(a)
    if not dtype.is_floating_point:
        info = None if dtype.is_complex else torch.iinfo(dtype)
        return a if info and info.min <= a[0] <= a[1] <= info.max else None
    if dtype.itemsize < 4:  # in fp32 first, on most devices
        a = _near(a, torch.float32)
    return _clean(_rounded(a[0], dtype), _rounded(a[1], dtype))


def _rounded(value: float, dtype: torch.dtype) -> float:
    if dtype == torch.float64 or (abs(value) <= 256 and value == int(value)):
        return value
    return _rounded_by_torch(float(value), dtype)


@functools.lru_cache(maxsize=1 << 16)
def _rounded_by_torch(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def _apart(expression: Expression, pair: list[Any], rect: Rect, side: Side) -> Known:
    """Least and greatest difference of what is compared, where both are lines in the position."""
    lines = [
        line_of(expression, each) if isinstance(each, Step) else constant_line(each)
        for each in pair
    ]
    if len(lines) != 2 or lines[0] is None or lines[1] is None:
        return None
    return (lines[0] + -lines[1]).bounds(rect, side)


def _triangle(expression: Expression, step: Step, rect: Rect, side: Side) -> Known:
    inner = _bounds(expression, step.inputs[0], rect, side)
    name, diagonal = step.detail
    shift = step.frame.starts[3] - step.frame.starts[2]
    span = reach(rect, side)
    assert span is not None, "a side without elements"
    lowest, highest = span[0] + shift, span[1] + shift
    kept = highest <= diagonal if name == "tril" else lowest >= diagonal
    dropped = lowest > diagonal if name == "tril" else highest < diagonal
    if dropped:
        return 0.0, 0.0
    if inner is None or kept:
        return inner
    return min(inner[0], 0.0), max(inner[1], 0.0)


def _scalar(value: Any) -> Known:
    return _clean(value, value) if isinstance(value, (bool, int, float)) else None


def _known(rule: Callable[..., Known]) -> Callable[..., Known]:
    """A rule that needs to know all of its inputs."""

    def checked(*inputs: Known) -> Known:
        return None if any(each is None for each in inputs) else rule(*inputs)

    return checked


def _compare(
    holds: Callable[[Bounds, Bounds], bool], fails: Callable[[Bounds, Bounds], bool]
) -> Callable[..., Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        return (1.0, 1.0) if holds(a, b) else (0.0, 0.0) if fails(a, b) else (0.0, 1.0)

    return rule


def _products(a: Bounds, b: Bounds) -> Known:
    for x, y in ((a, b), (b, a)):
        if -_INF in x or _INF in x:
            if y[0] <= 0 <= y[1]:
                return None  # infinity times 0
    each = [x * y for x in a for y in b]
    return min(each), max(each)


def _quotient(a: Known, b: Known) -> Known:
    if not (a and b and b[0] == b[1] != 0):
        return None
    each = [x / b[0] for x in a]
    return min(each), max(each)


def _sum(a: Known, b: Known) -> Known:
    """Minus infinity wins over whatever else is added; what is not known is not infinite."""
    for x, y in ((a, b), (b, a)):
        if x and x[1] == -_INF and (y is None or y[1] < _INF):
            return -_INF, -_INF
    return (a[0] + b[0], a[1] + b[1]) if a and b else None


def _select(condition: Known, yes: Known, no: Known) -> Known:
    if condition == (1.0, 1.0):
        return yes
    if condition == (0.0, 0.0):
        return no
    return (min(yes[0], no[0]), max(yes[1], no[1])) if yes and no else None


def _as_bool(a: Bounds) -> Bounds:
    return (1.0, 1.0) if a[0] > 0 or a[1] < 0 else (0.0, 0.0) if a == (0.0, 0.0) else (0.0, 1.0)


def _and(a: Known, b: Known) -> Known:
    if a == (0.0, 0.0) or b == (0.0, 0.0):
        return 0.0, 0.0
    return (min(a[0], b[0]), min(a[1], b[1])) if a and b else None


def _or(a: Known, b: Known) -> Known:
    if a == (1.0, 1.0) or b == (1.0, 1.0):
        return 1.0, 1.0
    return (max(a[0], b[0]), max(a[1], b[1])) if a and b else None


def _same(a: Known, *_: Known) -> Known:
    return a


_INF = float("inf")
_LE = _compare(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1])
_LT = _compare(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1])
_EQ = _compare(lambda a, b: a[0] == a[1] == b[0] == b[1], lambda a, b: a[1] < b[0] or b[1] < a[0])


def _not(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


_NEGATION = _known(_not)
_RULES: dict[str, Callable[..., Known]] = {
    "le": _known(_LE),
    "lt": _known(_LT),
    "ge": _known(lambda a, b: _LE(b, a)),
    "gt": _known(lambda a, b: _LT(b, a)),
    "eq": _known(_EQ),
    "ne": _known(lambda a, b: _not(_EQ(a, b))),
    "and": _and,
    "or": _or,
    "logical_not": _NEGATION,
    "invert": _NEGATION,
    "bitwise_not": _NEGATION,
    "add": _sum,
    "sub": _known(lambda a, b: (a[0] - b[1], a[1] - b[0])),
    "rsub": _known(lambda a, b: (b[0] - a[1], b[1] - a[0])),
    "mul": _known(_products),
    "div": _quotient,
    "truediv": _quotient,
    "neg": _known(lambda a: (-a[1], -a[0])),
    "abs": _known(lambda a: (max(a[0], -a[1], 0.0), max(abs(a[0]), abs(a[1])))),
    "tanh": lambda a: (-1.0, 1.0),
    "where": _select,
    "masked_fill": lambda a, m, v: _select(m, v, a),
    "bool": _known(_as_bool),
    "to": _same,
    "float": _same,
    "double": _same,
    "half": _same,
    "bfloat16": _same,
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
}  # fmt: skip
_COMPARISONS = {
    "le",
    "lt",
    "ge",
    "gt",
    "eq",
    "ne",
    "less_equal",
    "less",
    "greater_equal",
    "greater",
}
_CASTS = {"to", "float", "double", "half", "bfloat16"}
for _alias, _name in (
    ("bitwise_and", "and"), ("logical_and", "and"), ("bitwise_or", "or"), ("logical_or", "or"),
    ("less_equal", "le"), ("less", "lt"), ("greater_equal", "ge"), ("greater", "gt"),
    ("rmul", "mul"), ("radd", "add"), ("rand", "and"), ("ror", "or"),
):  # fmt: skip
    _RULES[_alias] = _RULES[_name]
_LOGIC = {name for name, rule in _RULES.items() if rule in (_and, _or, _NEGATION)}
