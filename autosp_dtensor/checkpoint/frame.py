"""One run of a region whose saved tensors are in part computed again when backward asks for them.

Autograd saves tensors while an operation runs. Each belongs to the operation that made its memory.
If that one is kept, or is an input of the region, the tensor is saved as ever. Otherwise autograd
gets a note instead: which operation to run again, and which of its tensors is meant. The first note
of a stage (stages.py) that backward redeems runs the operations that are needed, once for all notes
of that stage. What is kept, and what the region was given, may wait on the host (host.py).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..autocast import autocast_state, under
from .host import Host, Moved, Seen, changed, version_of
from .stages import Stages
from .view import View

__all__ = ["Frame", "Own", "Part", "Recompute", "Value"]


@dataclass(frozen=True)
class Own:
    """The k-th tensor that operation `at` saves of itself (a norm's statistics, for example)."""

    at: int
    k: int


@dataclass(frozen=True)
class Value:
    """A view of the memory of result `index` of operation `at`, for the backward of a stage."""

    at: int
    index: int
    view: View
    stage: int = 0


@dataclass(frozen=True)
class _Kept:
    """A tensor that is saved itself. Autograd leaves it to hooks to notice that it was changed."""

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _Kept:
        # An operation's own result comes with its graph, which would then hold itself: nodes are
        # out of reach of Python's collector. What is detached counts changes with the tensor.
        own = tensor if tensor.is_leaf else tensor.detach()
        return _Kept(own, version_of(tensor))

    def unchanged(self) -> torch.Tensor:
        changes = version_of(self.tensor) - self.version
        if changes:
            raise changed(f"{self.tensor.dtype} {tuple(self.tensor.shape)}", changes)
        return self.tensor


_Use = tuple[int, int, int]  # a stage asks for result k of operation `at`: (stage, at, k)

# Runs some operations again: (frame, seed, values that they take) -> None; and which values.
Part = tuple[Callable[..., Any], tuple[int, ...]]


@dataclass(eq=False)
class Recompute:
    """What is kept of a region, and how the rest is had again.

    keep: operations whose memory is kept. stages: in which the rest is had. part: makes a stage's
    function for a set of operations whose tensors are asked for. sends: each stage's exchanges, the
    same on every rank. local: whether an operation is had again in a stage without any other
    exchange. moves: operations, and values that the region is given, whose memory goes to the host.
    fetch: the stage at whose start the moved values of the region before this one are fetched.
    """

    keep: frozenset[int]
    stages: Stages
    part: Callable[[int, frozenset[int]], Part]
    sends: tuple[frozenset[int], ...]
    local: Callable[[int, int], bool]
    moves: frozenset[int] = frozenset()
    fetch: int = 0
    parts: dict[tuple[int, frozenset[int]], Part] = field(default_factory=dict)

    def part_for(self, stage: int, wanted: frozenset[int]) -> Part:
        if (stage, wanted) not in self.parts:
            self.parts[stage, wanted] = self.part(stage, wanted)
        return self.parts[stage, wanted]

    @property
    def begins(self) -> dict[int, int]:
        """Operations whose result's gradient begins a stage that exchanges."""
        return {at: stage for at, stage in self.stages.begins.items() if self.sends[stage]}


class Frame:
    """`at` is the operation that runs; generated code sets it, and calls `made` after each.

    given: the region's values (parameters, then inputs), by the number of their node.
    """

    def __init__(
        self, recompute: Recompute, seed: int, given: dict[int, Any], host: Host | None = None
    ) -> None:
        self.recompute, self.seed, self.given, self.host = recompute, seed, dict(given), host
        self.at = -1
        self.held: dict[int, Any] = {}
        self.moved: list[weakref.ref[Moved]] = []
        self.previous: weakref.ref[Any] | None = None
        if host is not None:
            host.enter()
        self._given: dict[int, _Kept | Moved] = {}
        for k, tensor in given.items():
            if isinstance(tensor, torch.Tensor):
                saved = self._saved(tensor, k in recompute.moves, soon=True)
                if isinstance(saved, Seen):
                    self.given[k] = saved
                self._given[_key(tensor)] = saved.moved if isinstance(saved, Seen) else saved
        self._owners: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._counts: Counter[int] = Counter()
        self._own: set[Own] = set()
        self._uses: Counter[_Use] = Counter()
        self._left: Counter[Any] = Counter()
        self._found: dict[Any, torch.Tensor] = {}
        kinds = {t.device.type for t in given.values() if isinstance(t, torch.Tensor)} | {"cpu"}
        self._autocast = [autocast_state(kind) for kind in sorted(kinds)]

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Operations inside save their tensors through this frame."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield
        self._owners.clear()

    def made(self, at: int, result: Any) -> None:
        """Operation `at` has run."""
        for index, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if isinstance(tensor, torch.Tensor):
                key = _key(tensor)
                if key not in self._owners and key not in self._given:
                    self._owners[key] = (StorageWeakRef(tensor.untyped_storage()), at, index)
        if at in self.recompute.stages.hold:
            self.held[at] = self._hold(at, result)

    def cut(self, at: int, result: Any) -> Any:
        """The result of an operation behind which a stage begins."""
        results = result if isinstance(result, tuple) else (result,)
        begun = self._begun(results, self.recompute.begins[at])
        return begun if isinstance(result, tuple) else begun[0]

    def results(self, results: tuple[Any, ...]) -> tuple[Any, ...]:
        """The region's results. Where exchanges run again, that is when backward comes to these:
        which note it redeems first differs by rank (what is a view here is a copy there). So it is
        with what is fetched.
        """
        fetches = self.host is not None and self.host.passed(self)
        return self._begun(results, 0) if self.recompute.sends[0] or fetches else results

    def _begun(self, results: tuple[Any, ...], stage: int) -> tuple[Any, ...]:
        asked = [
            k for k, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad
        ]
        if not asked:
            return results
        # What a Function keeps of itself lives as long as the loss; what it saves, until backward.
        with torch.autograd.graph.saved_tensors_hooks(lambda _: (self, stage), _begin):
            begun = dict(zip(asked, _Begin.apply(*(results[k] for k in asked)), strict=True))
        return tuple(begun.get(k, result) for k, result in enumerate(results))

    # -- what autograd saves --------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The tensor itself, or a note of how to have it again."""
        at = self.at
        k = self._counts[at]
        self._counts[at] += 1
        key = _key(tensor)
        if key in self._given:
            saved = self._given[key]
            return Seen.of(saved, tensor) if isinstance(saved, Moved) else _Kept.of(tensor)
        keep, moves = self.recompute.keep, self.recompute.moves
        stage = self.recompute.stages.of[at]
        owner = self._owners.get(key)
        if owner is None:  # made inside of the operation that runs
            if at in keep or not self.recompute.local(stage, at):
                return self._saved(tensor, at in moves)
            self._own.add(Own(at, k))
            return Own(at, k)
        _, maker, index = owner
        if maker in keep or not self.recompute.local(stage, maker):
            return self._saved(tensor, maker in moves)
        self._uses[stage, maker, index] += 1
        return Value(maker, index, View.of(tensor), stage)

    def _saved(self, tensor: torch.Tensor, moves: bool, *, soon: bool = False) -> _Kept | Seen:
        """The tensor itself, or where it goes."""
        if self.host is None:
            return _Kept.of(tensor)
        found = self.host.move(tensor, soon=soon) if moves else self.host.find(tensor)
        if found is None:
            return _Kept.of(tensor)
        if not any(ref() is found for ref in self.moved):
            self.moved.append(weakref.ref(found))
        return Seen.of(found, tensor)

    def _hold(self, at: int, value: Any) -> Any:
        """A result that what runs again takes."""
        if isinstance(value, (tuple, list)):
            return tuple(self._hold(at, each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        given = self._given.get(_key(value))
        if isinstance(given, Moved):
            return Seen.of(given, value)
        owner = self._owners.get(_key(value))
        moves = self.recompute.moves
        goes = given is None and (at in moves or (owner is not None and owner[1] in moves))
        saved = self._saved(value, goes)
        return saved if isinstance(saved, Seen) else _detached(value)

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, _Kept):
            return saved.unchanged()
        if isinstance(saved, Seen):
            return saved.tensor()
        stage = self.recompute.stages.of[saved.at] if isinstance(saved, Own) else saved.stage
        place = saved if isinstance(saved, Own) else (stage, saved.at, saved.index)
        self._reach(stage)
        if place not in self._found:
            self.run_again(self._had_in(stage, saved.at))
        if isinstance(saved, Own):
            return self._found.pop(saved)
        base = self._found[place]
        self._left[place] -= 1
        if not self._left[place]:
            del self._found[place]
        return saved.view.seen(base)

    # -- having it again ------------------------------------------------------------------------

    def _had_in(self, stage: int, at: int) -> int:
        """The stage that gives what a stage asks for of an operation."""
        each = self.recompute.stages.each
        return next((k for k in range(stage) if at in each[k].leaves), stage)

    def _reach(self, stage: int) -> None:
        """What earlier stages left is let go of where nothing that is still to run takes it."""
        stages = self.recompute.stages
        if self.host is not None and stage >= self.recompute.fetch:
            self.host.fetch_next(self)
        for at in stages.left_before(stage):
            if not stages.takes(stage, at):
                self.held.pop(at, None)

    def wanted(self, stage: int) -> frozenset[int]:
        """The operations whose tensors are to be had again in a stage."""
        of = self.recompute.stages.of
        own = {own.at for own in self._own if of[own.at] == stage}
        taken = {at for number, at, _ in self._uses if number == stage}
        return frozenset(own | taken) - self.recompute.stages.left_before(stage)

    def begin(self, stage: int) -> None:
        """Backward comes to the region, or to a cut in it."""
        if self.host is not None and not stage:
            self.host.returned(self)
        self._reach(stage)
        if self.recompute.sends[stage]:
            self.run_again(stage)

    def run_again(self, stage: int) -> None:
        stages = self.recompute.stages
        self._reach(stage)
        for at in stages.left_before(stage):
            if stages.takes(stage, at) and at not in self.held:
                self.run_again(self._had_in(stage, at))
        function, takes = self.recompute.part_for(stage, self.wanted(stage))
        leaves = stages.each[stage].leaves
        again = _Again(
            {own for own in self._own if own.at in leaves or stages.of[own.at] == stage},
            {use for use in self._uses if use[1] in leaves or use[0] == stage},
            leaves,
        )
        for k in takes:
            if k not in self.held and isinstance(self.given[k], torch.Tensor):
                kept = self._given[_key(self.given[k])]
                assert isinstance(kept, _Kept)
                kept.unchanged()
        values = [_detached(self.held[k] if k in self.held else self.given[k]) for k in takes]
        with contextlib.ExitStack() as stack:
            for state in self._autocast:
                stack.enter_context(under(state))
            stack.enter_context(torch.enable_grad())
            hooks = torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)
            stack.enter_context(hooks)
            function(self.seed, (), again, *values)
        self._found.update(again.found)
        self.held.update(again.left)
        for use in again.uses:
            self._left[use] = self._uses[use]


def _begin(saved: tuple[Frame, int]) -> torch.Tensor:
    """Backward asks for a tensor, which nobody reads."""
    frame, stage = saved
    frame.begin(stage)
    return torch.empty(0)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(torch.empty(0))
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)  # no views: FSDP2 warns of those

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        _ = ctx.saved_tensors  # asks the frame to begin
        return grads


class _Again:
    """The frame of a stage's run: it notes the tensors that are asked for."""

    def __init__(self, own: set[Own], uses: set[_Use], leaves: frozenset[int]) -> None:
        self.at = -1
        self.own, self.uses, self.leaves = own, uses, leaves
        self.found: dict[Any, torch.Tensor] = {}
        self.left: dict[int, Any] = {}
        self._places: dict[tuple[int, int], list[_Use]] = {}
        for use in uses:
            self._places.setdefault(use[1:], []).append(use)
        self._counts: Counter[int] = Counter()

    def made(self, at: int, result: Any) -> None:
        for index, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            for use in self._places.get((at, index), ()):
                self.found[use] = tensor.detach()
        if at in self.leaves:
            self.left[at] = _detached(result)

    def pack(self, tensor: torch.Tensor) -> None:
        own = Own(self.at, self._counts[self.at])
        self._counts[self.at] += 1
        if own in self.own:
            self.found[own] = tensor.detach()

    def unpack(self, saved: None) -> torch.Tensor:
        raise AssertionError("backward does not go through the second run")


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _detached(value: Any) -> Any:
    """The same values, of no graph, that ask for a gradient where they did."""
    if isinstance(value, (tuple, list)):
        return tuple(_detached(each) for each in value)
    if isinstance(value, Seen):
        return value.tensor().requires_grad_(value.requires_grad)
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
