"""A mask, or what is done to scores, cut out of its graph, and the tiles there is work in.

What it is made of (positions, document ids, padding flags, tables) is given as tensors while the
program runs. A first pass bounds every tile, so that tiles that allow nothing are skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ...graph import facts, set_facts, short_name
from .bounds import bounds, forbidden_below
from .expression import Expression, Step
from .frame import NotStatic, Rect
from .prove import MASKED_BELOW
from .runs import Pass, passes_of, runs_of
from .spans import spans

__all__ = ["Band", "TileMask", "forget_bands", "tile_mask", "tile_scores"]

TILE = 512
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Band:
    """Queries rows[0]:rows[1] of batch row `batch` (None: of all) and the keys that they may read.

    masked: whether some of those keys are forbidden to some of the queries.
    """

    batch: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    masked: bool


@dataclass(frozen=True)
class _Known:
    """What was found for given tensors, which are not kept alive for it."""

    leaves: tuple[weakref.ref[torch.Tensor], ...]
    made: tuple[Any, ...]
    found: dict[Any, Any]

    def fits(self, leaves: Sequence[torch.Tensor], made: tuple[Any, ...]) -> bool:
        same = all(a() is b for a, b in zip(self.leaves, leaves, strict=True))
        return same and made == self.made


def forget_bands() -> None:
    """A program's call begins: the same tensors may hold other values, written past autograd (by
    `.data`, or into NumPy's memory)."""
    _calls[0] += 1


_calls = [0]


class TileMask:
    """The expression of one mask or score; calls give `leaves` in order.

    product: the placeholder of queries times keys, where it is of scores.
    """

    def __init__(self, root: Node, leaves: list[Node], product: Node | None) -> None:
        self.root, self.leaves, self.product = root, leaves, product
        self.is_bool = facts(root).meta.dtype == torch.bool
        self.trained = tuple(i for i, n in enumerate(leaves) if facts(n).meta.requires_grad)
        self._expression = Expression(root, product=product)
        self._known: _Known | None = None
        self._text = _text(root, product)

    def __repr__(self) -> str:
        """All that it computes: ranks compare it."""
        return self._text

    def values(
        self,
        leaves: Sequence[torch.Tensor],
        rect: Rect,
        device: torch.device,
        product: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The mask on a rectangle, or the scores made of `product` [B, H, rows, columns] there.

        device: that of queries; what has no leaves (tril of ones) is made there.
        """
        found = self._given(leaves, device).exact(rect, product)
        rows, columns = rect.bottom - rect.top, rect.right - rect.left
        return found.expand(*found.shape[:-2], rows, columns)

    def bands(self, leaves: Sequence[torch.Tensor]) -> list[Band]:
        """Which tiles there is work in; looked for once in a call for all layers that are given the
        same tensors."""
        return self._once("bands", leaves, lambda: self._find_bands(leaves))

    def passes(self, leaves: Sequence[torch.Tensor], rows: int, device: torch.device) -> list[Pass]:
        """The same mask as calls of a variable-length kernel for `rows` batch rows; empty where it
        is none of those. Looked for once in a call, with a few results read from the device."""
        return self._once((rows, device), leaves, lambda: self._find_passes(leaves, rows, device))

    def _once(self, what: Any, leaves: Sequence[torch.Tensor], find: Callable[[], Any]) -> Any:
        versions = [0 if leaf.is_inference() else leaf._version for leaf in leaves]
        made = _calls[0], TILE, versions
        known = self._known
        if known is None or not known.fits(leaves, made):
            held = tuple(weakref.ref(leaf) for leaf in leaves)
            self._known = known = _Known(held, made, {})
        if what not in known.found:
            known.found[what] = find()
        return known.found[what]

    def _given(self, leaves: Sequence[torch.Tensor], device: torch.device) -> Expression:
        return self._expression.given(dict(zip(self.leaves, leaves, strict=True)), device)

    def _find_passes(
        self, leaves: Sequence[torch.Tensor], rows: int, device: torch.device
    ) -> list[Pass]:
        given = [leaf.detach() for leaf in leaves]
        exact = self._given(given, device).blank_scores()
        bounded = self._given([leaf.cpu() for leaf in given], _CPU).blank_scores()
        # Where launches count more than elements, parts are larger.
        leaf = TILE if device.type == "cpu" else 4 * TILE
        apart = self._expression.rows_apart()
        found = []
        for row in range(apart) if apart > 1 else [None]:
            each = spans(bounded, exact, row, leaf)
            if each is None:
                return []
            found.append(each)
        first, last = (torch.stack(part) for part in zip(*found, strict=True))
        if apart == 1:
            first, last = (x.expand(rows, -1) for x in (first, last))
        sizes = rows, exact.rows, exact.columns
        return passes_of(runs_of(first, last), *sizes, device) or []

    def fullest(self) -> Band:
        """The most that a band can be, for tensors without data: a strip that may read all keys but
        some. What a strip takes is free before the next, so this one stands for all."""
        expression = self._expression
        batch = 0 if expression.rows_apart() > 1 else None
        return Band(batch, (0, min(TILE, expression.rows)), (0, expression.columns), True)

    def _find_bands(self, leaves: Sequence[torch.Tensor]) -> list[Band]:
        rows = self._expression.rows_apart()
        expression = self._given([leaf.detach().cpu() for leaf in leaves], _CPU)
        return [
            self._band(expression, top, batch)
            for batch in (range(rows) if rows > 1 else [None])
            for top in range(0, expression.rows, TILE)
        ]

    def _band(self, expression: Expression, top: int, batch: int | None) -> Band:
        """The span of columns that may be read in a strip of rows."""
        rows = (top, min(top + TILE, expression.rows))
        span = None if batch is None else (batch, batch + 1)
        parts = list(self._parts(expression, Rect(*rows, 0, expression.columns, None, span)))
        read = [part for part in parts if part[1] != "none"]
        if any(verdict == "less" for _, verdict in parts):
            # A finite number only outweighs: a query that has nothing else reads all keys alike.
            kept = [part for part in parts if part[1] in ("all", "some")]
            read = kept if self._covers(expression, kept[::-1]) else read
        if not read:
            return Band(batch, rows, (0, 0), False)
        first, last = read[0][0].left, read[-1][0].right
        masked = any(v != "all" for rect, v in parts if first <= rect.left < last)
        return Band(batch, rows, (first, last), masked)

    def _parts(self, expression: Expression, rect: Rect) -> Iterator[tuple[Rect, str]]:
        """The columns of a strip, each part with its verdict: wide where bounds decide it at once,
        so that the work grows with the tiles that are in part allowed, not with all of them."""
        verdict = self._verdict(expression, rect)
        tiles = -(-(rect.right - rect.left) // TILE)
        if verdict != "some" or tiles <= 1:
            yield rect, verdict
            return
        middle = rect.left + tiles // 2 * TILE
        yield from self._parts(expression, rect._replace(right=middle))
        yield from self._parts(expression, rect._replace(left=middle))

    def _verdict(self, expression: Expression, rect: Rect) -> str:
        """What of it is allowed: all, none, less (outweighed by a finite number), or some."""
        found = bounds(expression, rect)
        if found is None:
            return "some"
        if self.is_bool:
            return "all" if found[0] > 0 else "none" if found[1] == 0 else "some"
        if found == (0.0, 0.0):
            return "all"
        if found[1] == float("-inf"):
            return "none"
        return "less" if found[1] <= self._least() else "some"

    def _least(self) -> float:
        return forbidden_below(facts(self.root).meta.dtype, MASKED_BELOW)

    def _covers(self, expression: Expression, parts: list[tuple[Rect, str]]) -> bool:
        """Whether each query, in each head and row, may read some key of these parts."""
        covered: torch.Tensor | None = None
        for rect, verdict in parts:
            if verdict == "all":
                return True
            zero = torch.zeros((), dtype=facts(self.product).meta.dtype) if self.product else None
            value = expression.exact(rect, zero)
            value = value.expand(*value.shape[:-2], rect.bottom - rect.top, rect.right - rect.left)
            allowed = (value if self.is_bool else value > self._least()).any(-1)
            covered = allowed if covered is None else covered | allowed
            if bool(covered.all()):
                return True
        return False


def _text(root: Node, product: Node | None) -> str:
    number = {node: f"%{k}" for k, node in enumerate(root.graph.nodes)}
    rows = []
    for node, name in number.items():
        args, kwargs = map_aggregate((node.args, node.kwargs), lambda v: number.get(v, v))
        target = getattr(node.target, "func", node.target)
        called = f"{getattr(target, '__module__', '')}.{short_name(target)}"
        rows.append(f"{name} = {called}{args}{kwargs or ''}: {facts(node).outs}")
    what = "mask" if product is None else f"scores of {number[product]}"
    return f"{what} {number[root]}: {'; '.join(rows)}"


def tile_mask(root: Node) -> tuple[TileMask, list[Node]] | None:
    """Cut a mask's expression out of its graph: (mask, the nodes whose values it is given).

    None where the mask is no expression: given whole, random, or built by an operation that cannot
    be evaluated on a part.
    """
    return _cut_out(root, None)


def tile_scores(root: Node, product: Node) -> tuple[TileMask, list[Node]] | None:
    """The same of scores: what the model makes of queries times keys before softmax."""
    return _cut_out(root, product)


def _cut_out(root: Node, product: Node | None) -> tuple[TileMask, list[Node]] | None:
    try:
        plan = Expression(root, product=product).root
    except NotStatic:
        return None
    if plan.kind == "small":
        return None
    steps = list(plan.walk())
    leaves = list(dict.fromkeys(s.node for s in steps if s.kind == "small"))
    inside = dict.fromkeys(s.node for s in steps if s.kind not in ("small", "product"))
    if any(node in inside for node in leaves):  # cut in two ways: one of them whole
        return None
    for leaf in leaves:
        if not facts(leaf).single or facts(leaf).meta.numel > _LEAF_LIMIT:
            return None
    mask = _copied(plan, leaves, inside, root, product)
    return (mask, leaves) if _runs(mask, leaves) else None


def _copied(
    plan: Step, leaves: list[Node], inside: dict[Node, None], root: Node, product: Node | None
) -> TileMask:
    """A graph of its own: the captured one goes on being rewritten."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for index, leaf in enumerate([*leaves, *([product] if product is not None else ())]):
        made[leaf] = graph.placeholder("product" if leaf is product else f"leaf_{index}")
        set_facts(made[leaf], facts(leaf))
    constants = {s.node: s.detail for s in plan.walk() if s.kind == "constant"}
    for node in inside:
        if node in constants:
            made[node] = graph.call_function(torch.full, ((1, 1), constants[node]))
        else:  # what only lends a view its shape is left out
            made[node] = graph.node_copy(node, lambda n: cast(Node, made.get(n)))
        set_facts(made[node], facts(node))
    own = None if product is None else made[product]
    return TileMask(made[root], [made[leaf] for leaf in leaves], own)


def _runs(mask: TileMask, leaves: list[Node]) -> bool:
    """Whether every operation on the way can be evaluated on a part."""
    try:
        probe = [
            torch.zeros(facts(leaf).meta.shape, dtype=facts(leaf).meta.dtype) for leaf in leaves
        ]
        shape = facts(mask.root).meta.shape
        rect = Rect(0, min(2, shape[-2]), 0, min(2, shape[-1]))
        part = None
        if mask.product is not None:
            meta = facts(mask.product).meta
            part = torch.zeros((*meta.shape[:-2], rect[1], rect[3]), dtype=meta.dtype)
        mask.values(probe, rect, _CPU, part)
    except (NotStatic, RuntimeError, IndexError):
        return False
    return True


_LEAF_LIMIT = 1 << 26
