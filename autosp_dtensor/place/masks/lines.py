"""Values that are a line in the position, as indices are: a * row + b * column + c on all elements.

What compares two such values is then known on either side of the diagonal as a whole, however long
the sequence is: `key <= query` needs no look at the tiles along it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ...graph import facts, short_name
from .expression import Expression, Step
from .frame import NotStatic, Rect

__all__ = ["Line", "Side", "constant_line", "line_of", "reach"]

# Which elements of a rectangle: True: with column <= row; False: with column > row; None: all.
Side = bool | None
_MOST = 1 << 31  # far from where integers wrap


class Line(NamedTuple):
    rows: int
    columns: int
    start: int

    def __add__(self, other: Any) -> Line:
        return Line(*(a + b for a, b in zip(self, other, strict=True)))

    def __neg__(self) -> Line:
        return Line(*(-a for a in self))

    def bounds(self, rect: Rect, side: Side) -> tuple[int, int] | None:
        """On the elements of one side; None where it is no function of column - row there."""
        span = reach(rect, side)
        if span is None or self.rows != -self.columns:
            return None
        each = [self.columns * distance + self.start for distance in span]
        return min(each), max(each)


def reach(rect: Rect, side: Side) -> tuple[int, int] | None:
    """Least and greatest column - row of the elements on one side; None if there are none."""
    least, most = rect.left - (rect.bottom - 1), rect.right - 1 - rect.top
    if side is not None:
        least, most = (least, min(most, 0)) if side else (max(least, 1), most)
    return (least, most) if least <= most else None


def line_of(expression: Expression, step: Step) -> Line | None:
    """The line that an integer value is on the whole mask; None where it is none."""
    if step not in expression.lines:
        line = _find(expression, step)
        if line is not None:
            most = abs(line.rows) * expression.rows + abs(line.columns) * expression.columns
            line = line if most + abs(line.start) < _MOST else None
        expression.lines[step] = line
    return expression.lines[step]


def _find(expression: Expression, step: Step) -> Line | None:
    if facts(step.node).meta.dtype not in (torch.int64, torch.int32):
        return None
    if step.kind == "view":
        return line_of(expression, step.inputs[0])
    if step.kind == "small":
        return _of_values(expression, step)
    rule = _RULES.get(short_name(step.node.target))
    if step.kind != "pointwise" or rule is None or step.node.kwargs:
        return None
    known = dict(zip(step.node.all_input_nodes, step.inputs, strict=True))
    inputs = [
        line_of(expression, known[a]) if isinstance(a, Node) else constant_line(a)
        for a in step.node.args
    ]
    return None if any(each is None for each in inputs) else rule(*inputs)


def constant_line(value: Any) -> Line | None:
    return Line(0, 0, value) if type(value) is int else None


def _of_values(expression: Expression, step: Step) -> Line | None:
    """Of a vector along queries or keys, each element of it looked at."""
    try:
        part = expression.cut(step, Rect(0, expression.rows, 0, expression.columns))
    except NotStatic:
        return None
    if part.numel() == 0:
        return None
    values = part.flatten()
    start = int(values[0])
    if len(values) == 1:
        return Line(0, 0, start)
    long = [d - part.dim() for d, size in enumerate(part.shape) if size > 1]
    if len(long) != 1 or long[0] not in step.frame.dims[2:]:
        return None
    each = int(values[1]) - start
    if not bool((values.diff() == each).all()):
        return None
    return Line(each, 0, start) if long[0] == step.frame.dims[2] else Line(0, each, start)


_RULES: dict[str, Callable[..., Line]] = {
    "add": lambda a, b: a + b,
    "radd": lambda a, b: a + b,
    "sub": lambda a, b: a + -b,
    "rsub": lambda a, b: b + -a,
    "neg": lambda a: -a,
}
