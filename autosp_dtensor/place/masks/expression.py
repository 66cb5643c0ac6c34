"""A mask, or what is done to scores, as an expression that can be evaluated on any rectangle of it.

Masks are built from small tensors (positions, document ids, flags) by broadcasting, lookups and
pointwise operations. Small tensors are computed once; what is as large as the mask itself is
computed only rectangle by rectangle. The product of queries and keys may be part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.node import map_aggregate

from ...capture.targets import OutOfPlace, UnderAutocast
from ...graph import Origin, callee, facts, short_name
from ..rules.pointwise import RULES, is_pointwise
from .frame import Frame, NotStatic, Rect, View, view_of

__all__ = ["Expression", "NotStatic", "ReadState", "Rect", "Step"]

ReadState = Callable[[Origin], torch.Tensor | None]
_SMALL = 1 << 24
_EMBEDDING = (
    "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
)  # fmt: skip
_FILLED = {
    "ones": 1.0,
    "zeros": 0.0,
    "new_ones": 1.0,
    "new_zeros": 0.0,
    "ones_like": 1.0,
    "zeros_like": 0.0,
}


@dataclass(frozen=True, eq=False)
class Step:
    """How one node is had on a rectangle, given the same of its inputs.

    kind: "small" (a tensor that is cut), "buffer" (the same, of the mask's own size), "product"
    (given), "constant", "view", "triangle", "lookup" (a small table at the elements of an index),
    "pointwise".
    """

    kind: str
    node: Node
    frame: Frame
    inputs: tuple[Step, ...] = ()
    detail: Any = field(default=None)

    @property
    def is_plane(self) -> bool:
        """Whether the node has the size of the mask."""
        return self.frame.holds_plane(facts(self.node).meta.shape)

    def walk(self) -> Iterator[Step]:
        """It and all that it is made of; inputs first, each once."""
        seen: set[int] = set()

        def visit(step: Step) -> Iterator[Step]:
            if id(step) not in seen:
                seen.add(id(step))
                for each in step.inputs:
                    yield from visit(each)
                yield step

        return visit(self)


class Expression:
    """One mask. `rows` and `columns` are the lengths of its last two dims.

    product: the node that holds queries times keys, where the expression is of scores.

    Raises:
        NotStatic: the mask is built by an operation that cannot be evaluated on a part.
    """

    def __init__(
        self, node: Node, read: ReadState | None = None, product: Node | None = None
    ) -> None:
        self.node = node
        self.read = read
        self.product = product
        self.device = torch.device("cpu")
        self.blank = False
        shape = facts(node).meta.shape
        if not 2 <= len(shape) <= 4:
            raise NotStatic(node.name)
        self.rows, self.columns = shape[-2:]
        self._small: dict[Node, Any] = {}
        self.lines: dict[Step, Any] = {}  # what `line_of` has found
        self._steps: dict[tuple[Node, Frame], Step] = {}
        self._after_product: dict[Node, bool] = {}
        self.root = self._step(node, Frame.of(shape))

    def given(self, values: dict[Node, torch.Tensor], device: torch.device) -> Expression:
        """The same with values of small nodes that depend on data, on a device."""
        other = copy.copy(self)
        other._small, other.device = dict(values), device
        other.lines = {}
        return other

    def blank_scores(self) -> Expression:
        """The same of scores that are all 0: what is added to them, where that is all."""
        other = copy.copy(self)
        other.blank, other.lines = True, {}
        return other

    def rows_apart(self) -> int:
        """How many batch rows are evaluated one by one: all, if some tensor tells them apart."""
        size = Frame.of(facts(self.node).meta.shape).sizes[0]
        for step in self.root.walk():
            shape, dim = facts(step.node).meta.shape, step.frame.dims[0]
            if step.kind in ("small", "buffer") and dim is not None and -dim <= len(shape):
                if shape[dim] == size:
                    return size
        return 1

    def exact(self, rect: Rect, product: torch.Tensor | None = None) -> torch.Tensor:
        """The values on a rectangle (leading dims may be broadcast).

        product: queries times keys there [B, H, rows, columns], where the expression is of scores.
        """
        return self._exact(self.root, rect, {}, product)

    def cut(self, step: Step, rect: Rect) -> torch.Tensor:
        """The part of a small tensor, or of a buffer."""
        value = self._value(step.node)
        if not isinstance(value, torch.Tensor):
            raise NotStatic(step.node.name)
        return step.frame.cut(value, rect)

    # -- what is large, and how it is made ------------------------------------------------------

    def _step(self, node: Node, frame: Frame) -> Step:
        key = node, frame
        if key not in self._steps:
            try:
                step = self._find_step(node, frame)
            except NotStatic:  # had whole, if need be, unless scores are in it
                if self._holds_product(node):
                    raise
                step = Step("small", node, frame)
            if step.kind == "small" and self._holds_product(node):
                # A tile's product may round otherwise than the one that this is made of: scores
                # compared with their own largest ones would differ from them.
                raise NotStatic(f"{node.name} is made of scores")
            self._steps[key] = step
        return self._steps[key]

    def _holds_product(self, node: Node) -> bool:
        if self.product is None or node is self.product:
            return node is self.product
        if node not in self._after_product:
            inputs = node.all_input_nodes
            self._after_product[node] = any(self._holds_product(each) for each in inputs)
        return self._after_product[node]

    def _find_step(self, node: Node, frame: Frame) -> Step:
        """A node is large if it was broadcast to the mask's size; what was given so is not."""
        small = Step("small", node, frame)
        if node is self.product:
            if not frame.is_whole(facts(node).meta.shape):
                raise NotStatic("queries times keys in another order")
            return Step("product", node, frame)
        if not facts(node).single or not small.is_plane:
            return small
        if node.op == "get_attr" and self.read is not None:
            return Step("buffer", node, frame)
        if node.op != "call_function":
            return small
        name = short_name(node.target)
        if (number := _constant(node, name)) is not None:
            return Step("constant", node, frame, detail=number)
        if not node.all_input_nodes:
            return small
        return self._made_of_others(node, name, frame)

    def _made_of_others(self, node: Node, name: str, frame: Frame) -> Step:
        if name in ("tril", "triu"):
            return self._triangle(node, name, frame)
        view = view_of(node)
        if view is not None:
            return self._view(node, view, frame)
        lookup = self._lookup(node, name, frame)
        return self._pointwise(node, name, frame) if lookup is None else lookup

    def _view(self, node: Node, view: View, frame: Frame) -> Step:
        source = self._step(view.source, frame.moved(view))
        if source.kind == "small" and source.is_plane:
            return Step("small", node, frame)  # given whole, or made so elsewhere
        return Step("view", node, frame, (source,), view)

    def _triangle(self, node: Node, name: str, frame: Frame) -> Step:
        source = node.args[0]
        if not isinstance(source, Node) or frame.dims[2:] != (-2, -1):
            raise NotStatic(node.name)
        diagonal = node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0)
        if not isinstance(diagonal, int):
            raise NotStatic(node.name)
        inner = self._step(source, frame)
        if inner.kind == "small":
            return Step("small", node, frame)
        return Step("triangle", node, frame, (inner,), (name, diagonal))

    def _lookup(self, node: Node, name: str, frame: Frame) -> Step | None:
        """table[i, j, ..] and embedding(i, table), where i, j are as large as the mask."""
        if name == "embedding":
            given = dict(zip(_EMBEDDING, node.args, strict=False)) | node.kwargs
            indices, table = given["input"], given["weight"]
            plain = given.get("padding_idx") is None and given.get("max_norm") is None
            if not plain or given.get("scale_grad_by_freq") or given.get("sparse"):
                raise NotStatic(node.name)
            if not isinstance(indices, Node) or not isinstance(table, Node):
                raise NotStatic(node.name)
            at: tuple[Any, ...] = (indices,)
        elif name in ("getitem", "index") and isinstance(node.args[0], Node):
            table, index = node.args[0], node.args[1]
            at = tuple(index) if isinstance(index, (tuple, list)) else (index,)
            if not all(isinstance(i, (Node, int)) and not isinstance(i, bool) for i in at):
                raise NotStatic(node.name)
            if any(isinstance(i, Node) and facts(i).meta.dtype == torch.bool for i in at):
                raise NotStatic(node.name)
        else:
            return None
        kept = len(facts(table).meta.shape) - len(at)
        inner = frame.shifted_left(kept)
        inputs = tuple(self._step(i, inner) for i in at if isinstance(i, Node))
        if all(step.kind == "small" for step in inputs) and any(i.is_plane for i in inputs):
            return Step("small", node, frame)
        whole = Step("small", table, Frame((None,) * 4, *frame[1:]))
        return Step("lookup", node, frame, (whole, *inputs), (at, kept))

    def _pointwise(self, node: Node, name: str, frame: Frame) -> Step:
        inputs = tuple(self._step(each, frame) for each in node.all_input_nodes)
        if all(i.kind == "small" for i in inputs) and any(i.is_plane for i in inputs):
            return Step("small", node, frame)
        known = facts(node)
        shapes = [facts(each).meta.shape for each in node.all_input_nodes]
        if not known.single or known.meta.shape != _broadcast(shapes):
            raise NotStatic(node.name)  # flatten, repeat: copies, as far as ATen tells
        plain = name in RULES or is_pointwise(node.target, known.aten)
        if not plain or known.random or isinstance(node.target, UnderAutocast):
            raise NotStatic(node.name)
        return Step("pointwise", node, frame, inputs)

    # -- small tensors ------------------------------------------------------------------------

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

    # -- large ones ---------------------------------------------------------------------------

    def _exact(
        self, step: Step, rect: Rect, known: dict[int, Any], product: torch.Tensor | None
    ) -> torch.Tensor:
        if id(step) not in known:
            known[id(step)] = self._compute(step, rect, known, product)
        return known[id(step)]

    def _compute(
        self, step: Step, rect: Rect, known: dict[int, Any], product: torch.Tensor | None
    ) -> torch.Tensor:
        if step.kind in ("small", "buffer"):
            return self.cut(step, rect)
        if step.kind == "product":
            if self.blank:
                dtype = facts(step.node).meta.dtype
                return torch.zeros((1, 1), dtype=dtype, device=self.device)
            assert product is not None
            return product
        if step.kind == "constant":
            dtype = facts(step.node).meta.dtype
            return torch.full((1, 1), step.detail, dtype=dtype, device=self.device)
        inputs = [self._exact(each, rect, known, product) for each in step.inputs]
        if step.kind == "view":
            part = inputs[0]
            missing = len(facts(step.detail.source).meta.shape) - part.dim()
            return step.detail.apply(part[(None,) * missing])
        if step.kind == "triangle":
            return self._cut_triangle(step, rect, inputs[0])
        if step.kind == "lookup":
            return self._look_up(step, rect, inputs)
        return self._call(step, rect, inputs)

    def _cut_triangle(self, step: Step, rect: Rect, inner: torch.Tensor) -> torch.Tensor:
        name, diagonal = step.detail
        full = inner.expand(*inner.shape[:-2], rect.bottom - rect.top, rect.right - rect.left)
        starts = step.frame.starts
        return getattr(torch, name)(full, diagonal + rect.top + starts[2] - rect.left - starts[3])

    def _look_up(self, step: Step, rect: Rect, inputs: list[torch.Tensor]) -> torch.Tensor:
        (table, *indices), (at, kept) = inputs, step.detail
        # Heads may be what each lookup gives: then only those asked for are looked up.
        heads = step.frame.dims[1]
        if kept and heads is not None and -heads <= kept and rect.heads is not None:
            if table.shape[heads] == step.frame.sizes[1] > 1:
                table = table.narrow(heads, rect.heads[0], rect.heads[1] - rect.heads[0])
        given = iter(indices)
        index = tuple(next(given) if isinstance(i, Node) else i for i in at)
        if kept == 1 and len(index) == 1 and table.is_floating_point():
            number = index[0].to(torch.int64)
            if short_name(step.node.target) != "embedding":  # it may count from the end
                number = torch.where(number < 0, number + table.shape[0], number)
            return F.embedding(number, table)
        return table[index]

    def _call(self, step: Step, rect: Rect, inputs: list[torch.Tensor]) -> torch.Tensor:
        values = dict(zip(step.node.all_input_nodes, inputs, strict=True))

        def value_of(each: Any) -> Any:
            return values[each] if isinstance(each, Node) else self._argument(each)

        given: tuple[Any, ...] = step.node.args
        args, kwargs = map_aggregate((given, step.node.kwargs), value_of)
        if isinstance(step.node.target, OutOfPlace):  # it writes to its first argument
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            args = (args[0].expand(torch.broadcast_shapes(*(t.shape for t in tensors))), *args[1:])
        return callee(step.node)(*args, **kwargs)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None


def _constant(node: Node, name: str) -> float | None:
    if name in _FILLED:
        return _FILLED[name]
    if name in ("full", "new_full", "full_like"):
        at = 1 if name == "full" else 2 if name == "new_full" else 1
        value = node.args[at] if len(node.args) > at else node.kwargs.get("fill_value")
        return float(value) if isinstance(value, (bool, int, float)) else None
    return None
