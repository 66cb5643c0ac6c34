"""Bounds hold, and rectangles are parts of the whole: on masks drawn by a seed, all ways to spell.

What is drawn uses every rule of bounds and every view, in all dtypes that masks come in.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.graph import facts
from autosp_dtensor.place.masks import bounds as rules
from autosp_dtensor.place.masks.expression import Expression, NotStatic
from autosp_dtensor.place.masks.frame import Rect

QUERIES, KEYS, HEADS = 7, 9, 3
IDS = torch.zeros(1)
INF = float("inf")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
COMPARISONS = [torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]
NUMBERS = [0, 1, 2, -1, 3, 5, 0.5, 0.1, -1e9, 257.5, 49, -3.3, 100]


class Drawn:
    """A mask [.., S, T] of a few operations."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.depth = self.draw.randrange(1, 7)
        self.state = self.draw.getstate()

    def __call__(self, _: Tensor) -> Tensor:
        self.draw.setstate(self.state)  # the same each time
        x = self.tree(self.depth)
        x = x.expand(torch.broadcast_shapes(x.shape, (QUERIES, KEYS)))
        return x & True if x.dtype == torch.bool else x + 0

    def leaf(self) -> Tensor:
        q, k = torch.arange(QUERIES)[:, None], torch.arange(KEYS)[None]
        made: list[Any] = [
            lambda: q,
            lambda: k,
            lambda: q * self.draw.choice([1, -1, 3]) - k * self.draw.choice([1, 2]),
            lambda: torch.tensor([1, 4])[:, None, None, None],
            lambda: torch.arange(HEADS)[None, :, None, None],
            lambda: torch.tensor([[0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 5]])[:, None, :, None],
            lambda: torch.tensor([0.0, -INF, 1.5, 300.25, -7, 0, 1e9, 0, 1]),
            lambda: torch.tensor([0.1, 257.0, -3, 0.5, 0, 0, 2])[:, None],
            lambda: torch.zeros(QUERIES, KEYS),
            lambda: torch.full((QUERIES, KEYS), self.draw.choice([0.0, 1.0, -1e9, -INF, 257, 0.1])),
        ]
        x = self.draw.choice(made)()
        if self.draw.random() < 0.3:
            return self.cast(x)
        return x

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.draw.choice(FLOATS if x.is_floating_point() else FLOATS + INTS))

    def viewed(self, x: Tensor) -> Tensor:
        at = self.draw.randrange(20)
        if x.dim() == 2 and at < 2:
            return x[None, None] if at else x.unsqueeze(0)
        if x.dim() == 3 and at == 0:
            return x[0:1]
        if x.dim() == 4 and at < 5:
            i, j = self.draw.randrange(x.shape[0]), self.draw.randrange(x.shape[1])
            return [x[i], x[:, j:], x.squeeze(0), x[i:][:1], x[:, j : j + 1]][at]
        if x.dim() >= 2 and at == 5:
            return x.mT.contiguous().mT
        if at == 6:
            return x[..., None, :].squeeze(-2)
        if at == 7:
            return x.expand(torch.broadcast_shapes(x.shape, (QUERIES, KEYS)))
        return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape)) if at == 8 else x

    def tree(self, depth: int) -> Tensor:
        if depth == 0:
            return self.leaf()
        draw = self.draw
        x, number = self.viewed(self.tree(depth - 1)), draw.choice(NUMBERS)

        def other() -> Tensor:
            return self.viewed(self.tree(draw.randrange(depth)))

        full = torch.broadcast_shapes(x.shape, (QUERIES, KEYS))
        made: list[Any] = [
            lambda: draw.choice(COMPARISONS)(x, other()),
            lambda: draw.choice(COMPARISONS)(x, number),
            lambda: draw.choice([torch.add, torch.mul])(x, other()),
            lambda: x + number,
            lambda: x + number if x.dtype == torch.bool else number - x,
            lambda: x * number,
            lambda: x / draw.choice([3, 7, 49, 0.1, -2]),
            lambda: torch.where(other().bool(), x, draw.choice([0.0, -INF, 1, -1e9])),
            lambda: torch.where(x.bool(), other(), number),
            lambda: x.masked_fill(self.leaf()[..., :1].bool(), 1),
            lambda: ~x if not x.is_floating_point() else x.logical_not(),
            lambda: x.bool() & other().bool(),
            lambda: x.bool() | other().bool(),
            lambda: torch.logical_and(x, other()),
            lambda: self.cast(x),
            lambda: x.bool() if x.dtype == torch.bool else draw.choice([torch.abs, torch.neg])(x),
            lambda: draw.choice([torch.tril, torch.triu])(x.expand(full), draw.randrange(-3, 4)),
        ]
        return draw.choice(made)()


def rectangles(draw: random.Random, shape: tuple[int, ...]) -> list[Rect]:
    found = []
    for number in range(12):
        top, bottom = sorted(draw.sample(range(QUERIES + 1), 2))
        left, right = sorted(draw.sample(range(KEYS + 1), 2))
        heads = batch = None
        if number % 3 == 1 and shape[1] > 1:
            first = draw.randrange(shape[1])
            heads = (first, draw.randrange(first, shape[1]) + 1)
        if number % 4 >= 2 and shape[0] > 1:
            row = draw.randrange(shape[0])
            batch = (row, row + 1)
        found.append(Rect(top, bottom, left, right, heads, batch))
    return found


def check(seed: int) -> bool:
    """Whether the seed gives an expression; that it holds."""
    drawn = Drawn(seed)
    try:
        want = drawn(IDS)
    except RuntimeError:
        return False  # shapes that do not fit
    if want.dim() > 4:
        return False
    captured = capture(read_call(drawn, (IDS,), {}, lambda _: None))
    output = next(node for node in captured.graph.nodes if node.op == "output")
    (root,) = output.args[0]  # type: ignore[misc]
    assert isinstance(root, Node) and facts(root).meta.shape == tuple(want.shape)
    try:
        expression = Expression(root, lambda origin: captured.consts.get(origin.name))
    except NotStatic:
        return False
    want = want[(None,) * (4 - want.dim())]
    for rect in rectangles(random.Random(seed), tuple(want.shape)):
        part = want[tuple(slice(*span) if span is not None else slice(None) for span in rect.spans)]
        found = expression.exact(rect)
        assert found.dtype == part.dtype
        torch.testing.assert_close(found.expand(part.shape), part, rtol=0, atol=0, equal_nan=True)
        limits = rules.bounds(expression, rect)
        if limits is not None and not part.isnan().any():
            assert limits[0] <= part.min().item() and part.max().item() <= limits[1], rect
        check_sides(expression, rect, part)
    return True


def check_sides(expression: Expression, rect: Rect, part: Tensor) -> None:
    """Bounds of the elements up to the diagonal, and of those after it."""
    rows, columns = torch.arange(*rect.spans[2])[:, None], torch.arange(*rect.spans[3])
    for side in (True, False):
        chosen = (columns <= rows) == side
        if chosen.any() and not part.isnan().any():
            limits = rules.bounds(expression, rect, side)
            values = part[..., chosen]
            if limits is not None:
                assert limits[0] <= values.min().item() and values.max().item() <= limits[1], rect


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_bounds_and_parts_of_drawn_masks_hold(first: int) -> None:
    assert sum(check(seed) for seed in range(first, first + 100)) > 60


# Each is True on the whole, or on none of it, and one rounding more or less would change that.
ROUNDED: dict[str, Any] = {
    "a cast to bf16": lambda: torch.full((2, 2), 257).to(torch.bfloat16) <= 256,
    "a quotient": lambda: torch.full((2, 2), 49, dtype=torch.float64) / 49 < 1,
    "a number in fewer bits": lambda: torch.full((2, 2), 3.0) * 0.1 <= 0.3,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_bounds_round_as_torch_does(name: str) -> None:
    captured = capture(read_call(lambda _: ROUNDED[name](), (IDS,), {}, lambda _: None))
    output = next(node for node in captured.graph.nodes if node.op == "output")
    (root,) = output.args[0]  # type: ignore[misc]
    assert isinstance(root, Node)
    limits = rules.bounds(Expression(root), Rect(0, 2, 0, 2))
    want = float(ROUNDED[name]().double().mean())
    assert limits is not None and limits[0] <= want <= limits[1]
