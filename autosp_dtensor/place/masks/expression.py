"""A mask [..., S, T] as an expression that can be evaluated, or bounded, on any rectangle of it.

Masks are built from small tensors (positions, document ids, flags) by broadcasting and pointwise
operations. Small tensors are computed once, on the CPU; what is as large as the mask itself is
computed only rectangle by rectangle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from ...capture.targets import OutOfPlace
from ...graph import Origin, arg, callee, facts, short_name
from ..rules.pointwise import RULES, is_pointwise

__all__ = ["Expression", "NotStatic", "ReadState", "Rect"]

ReadState = Callable[[Origin], torch.Tensor | None]
Rect = tuple[int, int, int, int]  # rows from, rows to, columns from, columns to
Bounds = tuple[float, float]
_SMALL = 1 << 24
_KEEP_LAST_TWO = {
    "expand",
    "expand_as",
    "broadcast_to",
    "contiguous",
    "clone",
    "detach",
    "unsqueeze",
    "view",
    "reshape",
}
_FILLED = {
    "ones": 1.0,
    "zeros": 0.0,
    "new_ones": 1.0,
    "new_zeros": 0.0,
    "ones_like": 1.0,
    "zeros_like": 0.0,
}


class NotStatic(Exception):
    """The mask depends on data, or is built by an operation that is not understood."""


class Expression:
    """One mask. `rows` and `columns` are the lengths of its last two dims."""

    def __init__(self, node: Node, read: ReadState | None = None) -> None:
        self.node = node
        self.read = read
        self.device = torch.device("cpu")
        self.rows, self.columns = facts(node).meta.shape[-2:]
        self._small: dict[Node, Any] = {}
        self._large: dict[Node, bool] = {}

    def give(self, values: dict[Node, torch.Tensor]) -> None:
        """Values of small nodes that depend on data."""
        self._small.update(values)
        for value in values.values():
            self.device = value.device

    def exact(self, rect: Rect) -> torch.Tensor:
        """The mask's values on a rectangle (leading dims may be broadcast)."""
        return self._exact(self.node, rect)

    def bounds(self, rect: Rect) -> Bounds | None:
        """Least and greatest value on a rectangle, True as 1; None where they are not known."""
        return self._bounds(self.node, rect)

    # -- small tensors ------------------------------------------------------------------------

    def _is_large(self, node: Node) -> bool:
        """Whether a node is as large as the mask because it was broadcast to it (not given so)."""
        if node not in self._large:
            self._large[node] = self._broadcast_to_plane(node)
        return self._large[node]

    def _broadcast_to_plane(self, node: Node) -> bool:
        shape = facts(node).meta.shape
        if len(shape) < 2 or shape[-2] < max(self.rows, 2) or shape[-1] < max(self.columns, 2):
            return False
        if node.op == "get_attr":
            return self.read is not None
        if node.op != "call_function":
            return False
        name = short_name(node.target)
        inputs = node.all_input_nodes
        if not inputs or _constant(node, name) is not None:
            return True
        if any(self._is_large(each) for each in inputs):
            return True
        return not any(_is_plane(facts(each).meta.shape) for each in inputs)

    def _value(self, node: Node) -> Any:
        """A small tensor, computed from factories and constants alone."""
        if node in self._small:
            return self._small[node]
        known = facts(node)
        if node.op == "get_attr":
            return self._buffer(node)
        if (
            node.op != "call_function"
            or known.random
            or known.meta.numel > _SMALL
            or known.meta.requires_grad
        ):
            raise NotStatic(node.name)
        args, kwargs = map_aggregate((node.args, node.kwargs), self._argument)
        with torch.no_grad():
            value = callee(node)(*args, **kwargs)
        self._small[node] = value
        return value

    def _buffer(self, node: Node) -> torch.Tensor:
        origin = facts(node).origin
        value = None if self.read is None or origin is None else self.read(origin)
        if value is None:
            raise NotStatic(node.name)
        self._small[node] = value
        return value

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Node):
            return self._value(value)
        return self.device if isinstance(value, torch.device) else value

    def _cut(self, node: Node, rect: Rect) -> torch.Tensor:
        value = self._value(node)
        if not isinstance(value, torch.Tensor):
            raise NotStatic(node.name)
        if value.dim() >= 1 and value.shape[-1] == self.columns and value.shape[-1] > 1:
            value = value[..., rect[2] : rect[3]]
        if value.dim() >= 2 and value.shape[-2] == self.rows and value.shape[-2] > 1:
            value = value[..., rect[0] : rect[1], :]
        return value

    # -- large ones ---------------------------------------------------------------------------

    def _exact(self, node: Node, rect: Rect) -> torch.Tensor:
        if facts(node).random:
            raise NotStatic(node.name)
        if not self._is_large(node):
            return self._cut(node, rect)
        if node.op == "get_attr":
            return self._value(node)[..., rect[0] : rect[1], rect[2] : rect[3]]
        name = short_name(node.target)
        if name in _KEEP_LAST_TWO or name == "getitem":
            return self._exact(self._same_plane(node), rect)
        if name in ("tril", "triu"):
            inner = self._exact(arg(node, 0), rect)
            full = inner.expand(*inner.shape[:-2], rect[1] - rect[0], rect[3] - rect[2])
            return getattr(torch, name)(full, _diagonal(node) + rect[0] - rect[2])
        constant = _constant(node, name)
        if constant is not None:
            return torch.full((1, 1), constant, dtype=facts(node).meta.dtype, device=self.device)
        if not (name in RULES or is_pointwise(facts(node).aten)) or facts(node).random:
            raise NotStatic(node.name)

        def value_of(each: Any) -> Any:
            return self._exact(each, rect) if isinstance(each, Node) else self._argument(each)

        given: tuple[Any, ...] = node.args
        args = map_aggregate(given, value_of)
        kwargs = map_aggregate(node.kwargs, value_of)
        if isinstance(node.target, OutOfPlace):
            # It writes to its first argument, which has the full shape.
            first = cast(torch.Tensor, args[0])
            first = first.expand(*first.shape[:-2], rect[1] - rect[0], rect[3] - rect[2])
            args = (first, *args[1:])
        return callee(node)(*args, **kwargs)

    def _same_plane(self, node: Node) -> Node:
        """The input of a call that changes, before the last two dims, sizes of 1 alone."""
        source = node.args[0]
        assert isinstance(source, Node)
        have, want = facts(source).meta.shape, facts(node).meta.shape
        name = short_name(node.target)
        if name == "getitem":
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            plain = all(
                i is None
                or i is Ellipsis
                or (isinstance(i, slice) and i.start in (None, 0) and i.step in (None, 1))
                for i in index
            )
            if not plain:
                raise NotStatic(node.name)
        elif have[-2:] != want[-2:] and name not in ("expand", "expand_as", "broadcast_to"):
            raise NotStatic(node.name)
        elif (
            name in ("view", "reshape", "unsqueeze")
            and facts(source).meta.numel != self.rows * self.columns
        ):
            raise NotStatic(node.name)
        return source

    def _bounds(self, node: Node, rect: Rect) -> Bounds | None:
        if facts(node).random:  # short names: torch.rand must not pass for the operator __rand__
            raise NotStatic(node.name)
        if not self._is_large(node):
            value = self._cut(node, rect)
            if value.numel() == 0:
                return None
            return float(value.min()), float(value.max())
        if node.op == "get_attr":
            part = self._value(node)[..., rect[0] : rect[1], rect[2] : rect[3]]
            return float(part.min()), float(part.max())
        name = short_name(node.target)
        if name in _KEEP_LAST_TWO or name == "getitem":
            return self._bounds(self._same_plane(node), rect)
        if name in ("tril", "triu"):
            return self._triangle(node, name, rect)
        constant = _constant(node, name)
        if constant is not None:
            return constant, constant
        rule = _BOUNDS.get(name)
        if rule is None or node.kwargs:
            return None
        inputs = [self._bounds(a, rect) if isinstance(a, Node) else _scalar(a) for a in node.args]
        if any(b is None for b in inputs):
            return None
        return rule(*inputs)

    def _triangle(self, node: Node, name: str, rect: Rect) -> Bounds | None:
        inner = self._bounds(arg(node, 0), rect)
        diagonal = _diagonal(node)
        # Least and greatest column - row.
        lowest, highest = rect[2] - (rect[1] - 1), rect[3] - 1 - rect[0]
        kept = highest <= diagonal if name == "tril" else lowest >= diagonal
        dropped = lowest > diagonal if name == "tril" else highest < diagonal
        if dropped:
            return 0.0, 0.0
        if inner is None or kept:
            return inner
        return min(inner[0], 0.0), max(inner[1], 0.0)


def _is_plane(shape: tuple[int, ...]) -> bool:
    return len(shape) >= 2 and shape[-2] > 1 and shape[-1] > 1


def _diagonal(node: Node) -> int:
    value = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
    if not isinstance(value, int):
        raise NotStatic(node.name)
    return value


def _constant(node: Node, name: str) -> float | None:
    if name in _FILLED:
        return _FILLED[name]
    if name in ("full", "new_full", "full_like"):
        at = 1 if name == "full" else 2 if name == "new_full" else 1
        value = node.args[at] if len(node.args) > at else node.kwargs.get("fill_value")
        return float(value) if isinstance(value, (bool, int, float)) else None
    return None


def _scalar(value: Any) -> Bounds | None:
    return (float(value), float(value)) if isinstance(value, (bool, int, float)) else None


def _compare(
    holds: Callable[[Bounds, Bounds], bool], fails: Callable[[Bounds, Bounds], bool]
) -> Callable[..., Bounds]:
    def rule(a: Bounds, b: Bounds) -> Bounds:
        return (1.0, 1.0) if holds(a, b) else (0.0, 0.0) if fails(a, b) else (0.0, 1.0)

    return rule


def _products(a: Bounds, b: Bounds) -> Bounds:
    each = [x * y for x in a for y in b]
    return min(each), max(each)


def _select(condition: Bounds, yes: Bounds, no: Bounds) -> Bounds:
    if condition == (1.0, 1.0):
        return yes
    if condition == (0.0, 0.0):
        return no
    return min(yes[0], no[0]), max(yes[1], no[1])


def _as_bool(a: Bounds) -> Bounds:
    return (1.0, 1.0) if a[0] > 0 or a[1] < 0 else (0.0, 0.0) if a == (0.0, 0.0) else (0.0, 1.0)


def _same(a: Bounds, *_: Bounds) -> Bounds:
    return a


_LE = _compare(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1])
_LT = _compare(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1])
_EQ = _compare(lambda a, b: a[0] == a[1] == b[0] == b[1], lambda a, b: a[1] < b[0] or b[1] < a[0])


def _not(a: Bounds) -> Bounds:
    return 1 - a[1], 1 - a[0]


_BOUNDS: dict[str, Callable[..., Bounds]] = {
    "le": _LE,
    "lt": _LT,
    "ge": lambda a, b: _LE(b, a),
    "gt": lambda a, b: _LT(b, a),
    "eq": _EQ,
    "ne": lambda a, b: _not(_EQ(a, b)),
    "and": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "or": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "logical_not": _not,
    "invert": _not,
    "bitwise_not": _not,
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "rsub": lambda a, b: (b[0] - a[1], b[1] - a[0]),
    "mul": _products,
    "neg": lambda a: (-a[1], -a[0]),
    "where": _select,
    "masked_fill": lambda a, m, v: _select(m, v, a),
    "bool": _as_bool,
    "float": _same,
    "double": _same,
    "half": _same,
    "bfloat16": _same,
}
for _alias, _name in (
    ("bitwise_and", "and"), ("logical_and", "and"), ("bitwise_or", "or"), ("logical_or", "or"),
    ("less_equal", "le"), ("less", "lt"), ("greater_equal", "ge"), ("greater", "gt"),
    ("rmul", "mul"), ("radd", "add"), ("rand", "and"), ("ror", "or"),
):  # fmt: skip
    _BOUNDS[_alias] = _BOUNDS[_name]
