"""Attention for some heads at a time, forward and backward.

Forward calls the kernel on each group's heads and writes into one result. What the calls save is
what one call would have saved: views of queries, keys and values, and of the one result. Backward
goes through one group after another, so that the kernel's workspace exists for one group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.flash import FlashCall
from ..place.refuse import first_gradient_alone
from .head_groups import Group, call_of, groups_of, heads_of, named

__all__ = ["ByHeads"]

_HALVES = (torch.float16, torch.bfloat16)
_WHY = "each group of heads has a graph of its own, which is gone through once"


@dataclass(frozen=True)
class ByHeads:
    """An attention's function, as a node's target, that calls its kernel for groups of heads.

    most: bytes of workspace of one call's backward; None: a call for each query head.
    """

    target: Callable[..., Any]
    most: int | None

    @property
    def __name__(self) -> str:  # what explain prints, and Checkpoint keeps by name
        return getattr(self.target, "__name__", "attention")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self.target)
        given = None if call is None else named(call, args, kwargs)
        if call is None or given is None or not torch.is_grad_enabled():
            return self.target(*args, **kwargs)
        tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        sizes = heads_of(call, {k: v.shape for k, v in tensors.items()})
        if sizes is None or not any(t.requires_grad for t in tensors.values()):
            return self.target(*args, **kwargs)
        first = next(iter(tensors.values()))
        groups = groups_of(sizes, first.element_size(), self.most)
        if len(groups) == 1:
            return self.target(*args, **kwargs)
        rest = {k: v for k, v in given.items() if k not in tensors}
        run = _Run(self.target, call, tuple(tensors), rest, sizes.heads, groups)
        return _ByHeads.apply(run, *tensors.values())


@dataclass(frozen=True)
class _Run:
    """One call: the names of its tensors, its other arguments, and how it is cut."""

    target: Callable[..., Any]
    call: FlashCall
    names: tuple[str, ...]
    rest: dict[str, Any]
    heads: int
    groups: list[Group]

    @property
    def dim(self) -> int:
        """Of the result's heads, from its end."""
        return _dim(self.call.out, "h") or 0

    def cut(self, tensors: Sequence[torch.Tensor], group: Group) -> list[_Cut | None]:
        """Where each tensor holds what a group takes; None: it takes all of it."""
        found: list[_Cut | None] = []
        for name, tensor in zip(self.names, tensors, strict=True):
            terms = self.call.dims.get(name, "")
            dim, start_count = _dim(terms, "h"), group.queries
            if dim is None:
                dim, start_count = _dim(terms, "g"), group.keys
            if dim is None or tensor.dim() < -dim or (tensor.shape[dim] == 1 and "h" in terms):
                found.append(None)
            else:
                found.append(_Cut(dim, *start_count, tensor.shape[dim]))
        return found


@dataclass(frozen=True)
class _Cut:
    dim: int
    start: int
    count: int
    of: int

    def of_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.narrow(self.dim, self.start, self.count)


def _dim(terms: str, letter: str) -> int | None:
    letters = terms.split()
    return letters.index(letter) - len(letters) if letter in letters else None


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[1:]
        ctx.run, ctx.saves, ctx.edges = run, _Saves(), []
        whole: torch.Tensor | None = None
        for group in run.groups:
            cuts = run.cut(tensors, group)
            parts = [t if c is None else c.of_whole(t) for t, c in zip(tensors, cuts, strict=True)]
            with torch.enable_grad():
                begun = iter(_begin([p for p, w in zip(parts, wanted, strict=True) if w]))
                parts = [next(begun) if w else p for p, w in zip(parts, wanted, strict=True)]
                with ctx.saves.saving():
                    out = run.target(**dict(zip(run.names, parts, strict=True)), **run.rest)
            at = _Cut(run.dim, *group.queries, run.heads)
            whole = _around(out, at) if whole is None else whole
            place = at.of_whole(whole.detach())  # else autograd knows it for the result's view
            place.copy_(out.detach())
            ctx.saves.stands_for(out.detach(), place)
            asked = [_edge(p) for p, w in zip(parts, wanted, strict=True) if w]
            kept = [c for c, w in zip(cuts, wanted, strict=True) if w]
            ctx.edges.append((_edge(out), at, asked, kept))
            del parts, begun, out, place  # the next group's stand beside none of these
        assert whole is not None
        ctx.save_for_backward(*ctx.saves.give())
        return whole

    @staticmethod
    @first_gradient_alone("attention by groups of heads", 'parallelize(..., tile="none")', _WHY)
    def backward(ctx: Any, incoming: torch.Tensor | None):
        wanted = ctx.needs_input_grad[1:]
        found = [_Gradient() for w in wanted if w]
        if incoming is not None:
            with ctx.saves.given(ctx.saved_tensors):
                ends = _ends([cuts for *_, cuts in ctx.edges])
                for (out, at, asked, cuts), last in zip(ctx.edges, ends, strict=True):
                    given = [at.of_whole(incoming)]
                    # Retained: what it holds are numbers, and backward may come again.
                    grads = [*torch.autograd.grad(
                        [out], asked, given, retain_graph=True, allow_unused=True
                    )]  # fmt: skip
                    for each, cut, end in zip(found, cuts, last, strict=True):
                        each.add(cut, grads.pop(0), end)  # one after the other, none stays
        done = iter([each.done() for each in found])
        return None, *(next(done) if w else None for w in wanted)


class _Saves:
    """What the calls' own graphs save: they hold numbers, and the Function holds the tensors."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._since = 0
        self._given: Sequence[torch.Tensor] | None = None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        self._since = len(self._tensors)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> int:
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def _unpack(self, number: int) -> torch.Tensor:
        assert self._given is not None, "a group's graph is gone through in backward alone"
        return self._given[number]

    def stands_for(self, out: torch.Tensor, place: torch.Tensor) -> None:
        """The last call saved its result: that is in the whole one, and need not live twice."""
        for k in range(self._since, len(self._tensors)):
            if _is_same(self._tensors[k], out):
                self._tensors[k] = place

    def give(self) -> list[torch.Tensor]:
        tensors, self._tensors = self._tensors, []
        return tensors

    @contextlib.contextmanager
    def given(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        self._given = tensors
        try:
            yield
        finally:
            self._given = None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and a.storage_offset() == b.storage_offset()
    )


def _ends(cuts: list[list[_Cut | None]]) -> list[list[bool]]:
    """For each group and tensor, whether no later group takes the same part of it."""
    after = [*cuts[1:], [None] * len(cuts[0])]
    last = len(cuts) - 1
    return [
        [k == last or here != then for here, then in zip(own, following, strict=True)]
        for k, (own, following) in enumerate(zip(cuts, after, strict=True))
    ]


class _Gradient:
    """The gradient of one tensor. Groups that take the same part of it come one after another:
    theirs is added up in fp32 (or wider), and rounded once, into its place."""

    def __init__(self) -> None:
        self._whole: torch.Tensor | None = None
        self._first: tuple[_Cut, torch.Tensor] | None = None
        self._sum: torch.Tensor | None = None
        self._dtype: torch.dtype | None = None
        self._own = False

    def add(self, cut: _Cut | None, grad: torch.Tensor | None, end: bool) -> None:
        """end: whether this is the last group that takes this part."""
        if grad is not None and self._sum is None:
            self._sum, self._dtype, self._own = grad, grad.dtype, False
        elif grad is not None:
            assert self._sum is not None
            if not self._own:  # autograd may have given the same memory for another input
                wide = torch.float32 if grad.dtype in _HALVES else grad.dtype
                self._sum, self._own = self._sum.to(wide, copy=True), True
            self._sum += grad
        if end and self._sum is not None and cut is not None:
            part, self._sum = self._sum, None  # beside the next group's there is none of it
            if self._whole is None and self._first is None:
                self._first = cut, part.to(self._dtype)  # no room for all before there is more
            else:
                self._write(cut, part)

    def _write(self, cut: _Cut, part: torch.Tensor) -> None:
        if self._whole is None:
            self._whole = _around(part, cut, self._dtype)
        self._write_first()
        cut.of_whole(self._whole).copy_(part)

    def _write_first(self) -> None:
        if self._first is not None:
            (cut, part), self._first = self._first, None
            self._write(cut, part)

    def done(self) -> torch.Tensor | None:
        self._write_first()
        whole = self._sum if self._whole is None else self._whole
        return whole if whole is None or self._dtype is None else whole.to(self._dtype)


def _around(part: torch.Tensor, cut: _Cut, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An empty tensor that a part is cut out of, with the part's order of dims in memory."""
    shape = list(part.shape)
    shape[cut.dim] = cut.of
    # A dim of one entry has any stride: it comes after one that has the same.
    order = sorted(range(part.dim()), key=lambda d: (-part.stride(d), part.shape[d] == 1))
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return part.new_empty_strided(shape, strides, dtype=dtype or part.dtype)


_edge = torch.autograd.graph.get_gradient_edge


def _begin(parts: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The parts as results of a node that holds none of them; a leaf would hold its memory."""
    return _Begin.apply(torch.empty(0, requires_grad=True), *parts)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.detach() for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        raise AssertionError("gradients are taken where they come to this node")
