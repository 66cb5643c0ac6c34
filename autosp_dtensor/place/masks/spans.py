"""The keys that each query reads, where they are neighbours: first and last, proved."""

from __future__ import annotations

import torch
from torch.fx import Node

from ...graph import facts
from .bounds import bounds
from .expression import Expression, NotStatic, ReadState
from .frame import Rect
from .prove import decide, forbids_from, is_bool
from .runs import Run, runs_of

__all__ = ["prove_runs", "spans"]

_LEAF = 512
_MOST_RUNS = 4096


def prove_runs(mask: Node, read: ReadState | None = None) -> tuple[Run, ...] | None:
    """The runs of a mask that no data says: a window, chunks, a prefix. Empty where it is made of
    something else, or batch rows or heads differ; None where data say it."""
    if facts(mask).meta.requires_grad:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rectangles are small: threads would wait for each other
    try:
        expression = Expression(mask, read)
        found = spans(expression, expression, None, _LEAF)
    except NotStatic:
        return None
    finally:
        torch.set_num_threads(threads)
    if found is None:
        return ()
    runs = runs_of(*(x[None] for x in found))
    if len(runs) > _MOST_RUNS:
        return None  # more than a program should hold: found while it runs
    return tuple(Run(*each) for each in runs.tolist())


def spans(
    bounded: Expression, exact: Expression, batch: int | None, leaf: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(first, last) key of each query [S]; last < first where it reads none.

    None where a query's keys have gaps, where a number is neither allowed nor forbidden, or where
    too much would have to be looked into. Rectangles that bounds do not decide are cut in four,
    down to `leaf`, and those are computed: work grows with the length, not with its square.

    Args:
        bounded: the mask on the CPU, for bounds. exact: the same on any device; two results are
            read from it.
        batch: the batch row; None: all rows are alike.
    """
    found = _Found(exact, leaf)
    row = None if batch is None else (batch, batch + 1)
    todo = [Rect(0, exact.rows, 0, exact.columns, None, row)]
    while todo:
        rect = todo.pop()
        known = bounds(bounded, rect)
        verdict = None if known is None else decide(bounded, known)
        if verdict is not None:
            found.add_whole(rect, verdict)
        elif rect.bottom - rect.top <= leaf and rect.right - rect.left <= leaf:
            if found.looks == 0:
                return None
            found.look_into(rect)
            if found.looked == 1 and bool(found.odd):  # a bias, or heads apart: it shows at once
                return None
        else:
            todo.extend(_quarters(rect, leaf))
    return found.result()


def _quarters(rect: Rect, leaf: int) -> list[Rect]:
    rows = _halves(rect.top, rect.bottom, leaf)
    columns = _halves(rect.left, rect.right, leaf)
    return [Rect(*r, *c, rect.heads, rect.batch) for r in rows for c in columns]


def _halves(start: int, stop: int, leaf: int) -> list[tuple[int, int]]:
    """Cut at a multiple of the leaf, so that leaves are few."""
    if stop - start <= leaf:
        return [(start, stop)]
    middle = start + -(-(stop - start) // (2 * leaf)) * leaf
    return [(start, middle), (middle, stop)]


class _Found:
    def __init__(self, mask: Expression, leaf: int) -> None:
        self.mask = mask
        options = {"dtype": torch.int64, "device": mask.device}
        self.first = torch.full((mask.rows,), mask.columns, **options)
        self.last = torch.full((mask.rows,), -1, **options)
        self.count = torch.zeros((mask.rows,), **options)
        self.odd = torch.zeros((), dtype=torch.bool, device=mask.device)
        self.looked = 0
        self.looks = 16 + 4 * (mask.rows + mask.columns) // leaf

    def add_whole(self, rect: Rect, allowed: bool) -> None:
        if allowed:
            rows = slice(rect.top, rect.bottom)
            self.first[rows].clamp_(max=rect.left)
            self.last[rows].clamp_(min=rect.right - 1)
            self.count[rows] += rect.right - rect.left

    def look_into(self, rect: Rect) -> None:
        self.looks -= 1
        self.looked += 1
        value = self.mask.exact(rect)
        while value.dim() > 2:
            if value.shape[0] > 1:  # heads, or rows, that have to be alike
                self.odd |= (value != value[:1]).any()
            value = value[0]
        value = value.expand(rect.bottom - rect.top, rect.right - rect.left)
        if is_bool(self.mask):
            allowed = value
        else:
            allowed = value == 0
            self.odd |= ~(allowed | (value <= forbids_from(self.mask))).all()
        rows = slice(rect.top, rect.bottom)
        at = torch.arange(rect.left, rect.right, device=value.device)
        first = torch.where(allowed, at, self.mask.columns).amin(-1)
        torch.minimum(self.first[rows], first, out=self.first[rows])
        torch.maximum(self.last[rows], torch.where(allowed, at, -1).amax(-1), out=self.last[rows])
        self.count[rows] += allowed.sum(-1)

    def result(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        length = (self.last - self.first + 1).clamp(min=0)
        odd = self.odd | (length != self.count).any()
        if not is_bool(self.mask):
            # A number that only outweighs: a query that has nothing else reads all keys alike.
            odd = odd | (length == 0).any()
        found = torch.stack([self.first, self.last, odd.expand_as(self.first).to(torch.int64)])
        first, last, wrong = found.cpu()
        return None if bool(wrong.any()) else (first, last)
