"""Running operations on some tokens at a time, forward and backward.

Forward keeps the inputs alone. Backward runs each tile again and goes through it at once, so that
what lies between exists for one tile. A chain that ends in one sum (a loss) has its gradients made
in forward, up to the factor that backward brings: nothing runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from .._torch import FakeTensor
from ..autocast import AutocastState, autocast_state, under
from ..lower.layout import expose, take_shard
from ..place.refuse import first_gradient_alone
from ..placement import Shard

__all__ = ["TiledCall", "takes_fp16"]

Tensors = Sequence[torch.Tensor]
_HALVES = (torch.float16, torch.bfloat16)


class TiledCall:
    """One rank's run of a chain.

    Args:
        calls: for each tile, the function of the inputs' parts that gives a tuple.
        cuts: for each input, how it is cut into tiles; None: taken whole by each.
        gives: for each output, how tiles make it up; None: it is the sum of theirs.
        trained: whether an output has a gradient.
        numbers: whether an output is a single number.
    """

    def __init__(
        self,
        calls: list[Callable[..., tuple[torch.Tensor, ...]]],
        cuts: tuple[Shard | None, ...],
        gives: tuple[Shard | None, ...],
        trained: tuple[bool, ...],
        numbers: tuple[bool, ...],
    ) -> None:
        self.calls, self.cuts, self.gives = calls, cuts, gives
        self.trained, self.numbers = trained, numbers
        sizes = next(cut for cut in cuts if cut is not None).sizes
        # A rank without tokens runs one empty tile: its results have shapes, and gradients a path.
        self.tiles = [k for k, size in enumerate(sizes) if size] or [0]

    @property
    def sums_once(self) -> bool:
        """Whether one sum, a single number, is all that has a gradient."""
        if sum(self.trained) != 1:
            return False
        only = self.trained.index(True)
        return self.gives[only] is None and self.numbers[only]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """On local tensors; results are whole on this rank, or its term of a sum."""
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        results = _Tiled.apply(self, *tensors) if grad and any(self.trained) else self.run(tensors)
        return results[0] if len(self.gives) == 1 else results

    def shown(self, tensors: Tensors) -> list[int]:
        """The tiles to run; without data, those in the middle would be like the second."""
        if len(self.tiles) > 3 and any(isinstance(t, FakeTensor) for t in tensors):
            return [*self.tiles[:2], self.tiles[-1]]
        return self.tiles

    def part(self, tensors: Tensors, tile: int) -> list[torch.Tensor]:
        """What one tile takes."""
        return [
            t if cut is None else take_shard(t, cut, tile)
            for t, cut in zip(tensors, self.cuts, strict=True)
        ]

    def run(self, tensors: Tensors) -> tuple[torch.Tensor, ...]:
        """All results, nothing kept."""
        results = _Results(self.gives)
        with torch.no_grad():
            for tile in self.shown(tensors):
                results.add(tile, self.calls[tile](*self.part(tensors, tile)))
        return results.done()

    def run_with_gradients(
        self,
        tensors: Tensors,
        wanted: Sequence[bool],
        incoming: Sequence[torch.Tensor | None] | None,
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor | None]]:
        """(results, gradients of the wanted inputs).

        incoming: gradients of the results, which are not made then; None: one, of the sum that has
        one.
        """
        results = _Results(self.gives)
        # One leaf for all tiles, so that autocast casts it once. (It keeps what it has cast.)
        whole = [
            t.detach().requires_grad_(w) if cut is None else t
            for t, cut, w in zip(tensors, self.cuts, wanted, strict=True)
        ]
        found = [_Gradient(t, cut) if w else None
                 for t, cut, w in zip(tensors, self.cuts, wanted, strict=True)]  # fmt: skip
        for tile in self.shown(tensors):
            parts = [
                p if cut is None else p.detach().requires_grad_(w)
                for p, cut, w in zip(self.part(whole, tile), self.cuts, wanted, strict=True)
            ]
            with torch.enable_grad(), saved_tensors_hooks(_without_graph, _as_it_is):
                outs = self.calls[tile](*parts)
            if incoming is None:
                results.add(tile, [out.detach() for out in outs])
            asked, given = self._asked(outs, incoming, tile)
            if not asked:
                continue
            inputs = [p for p in parts if p.requires_grad]
            grads = iter(torch.autograd.grad(asked, inputs, given, allow_unused=True))
            del outs, asked, given, inputs
            for each in found:
                if each is not None:
                    each.add(tile, next(grads))
        made = results.done() if incoming is None else ()
        return made, [None if each is None else each.total for each in found]

    def _asked(
        self,
        outs: Tensors,
        incoming: Sequence[torch.Tensor | None] | None,
        tile: int,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A tile's results that have a gradient, and that."""
        asked, given = [], []
        for k, (out, give) in enumerate(zip(outs, self.gives, strict=True)):
            if not self.trained[k] or not out.requires_grad:
                continue
            if incoming is None:
                grad = torch.ones_like(out)
            else:
                whole = incoming[k]
                if whole is None:
                    continue
                grad = whole if give is None else take_shard(whole, give, tile)
            asked.append(out)
            given.append(grad)
        return asked, given


class _Results:
    def __init__(self, gives: tuple[Shard | None, ...]) -> None:
        self.gives = gives
        self.held: list[torch.Tensor | None] = [None] * len(gives)
        self.dtypes: list[torch.dtype] = []

    def add(self, tile: int, outs: Tensors) -> None:
        self.dtypes = [out.dtype for out in outs]
        for k, (out, give) in enumerate(zip(outs, self.gives, strict=True)):
            held = self.held[k]
            if give is None:
                out = _wide(out)
                self.held[k] = out if held is None else held + out
                continue
            if held is None:
                shape = list(out.shape)
                shape[give.dim] = give.outer * sum(give.sizes)
                self.held[k] = held = out.new_empty(shape)
            _put(held, give, tile, out)

    def done(self) -> tuple[torch.Tensor, ...]:
        return tuple(
            held.to(dtype)
            for held, dtype in zip(self.held, self.dtypes, strict=True)
            if held is not None
        )


class _Gradient:
    """The gradient of one input; of one that is taken whole it is added up in fp32 or better."""

    def __init__(self, tensor: torch.Tensor, cut: Shard | None) -> None:
        self.like, self.cut = tensor, cut
        self.total: torch.Tensor | None = None
        self._own = False  # else autograd may have given the same memory for another input

    def add(self, tile: int, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if self.cut is not None:
            if self.total is None:
                self.total = torch.empty_like(self.like)
            _put(self.total, self.cut, tile, grad)
        elif self.total is None:
            self.total = _wide(grad)
            self._own = self.total is not grad
        elif self._own:
            self.total += grad
        else:
            self.total, self._own = self.total + grad, True


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """What a tile saves is gone with the tile: hooks around it, which keep and count what lives
    until backward, are not told. (An operation's own result would hold itself with its graph.)"""
    return tensor.detach()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in _HALVES else x


def takes_fp16(dtypes: Iterable[torch.dtype], autocast: AutocastState) -> bool:
    """Whether a loss of values of these dtypes is one that is scaled."""
    cast = autocast is not None and autocast[1] and autocast[2] == torch.float16
    return cast or torch.float16 in dtypes


def _scaled(grad: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """grad * factor, which bf16 would round and fp16 not hold; no copy of all of it is wide."""
    if grad.dtype not in _HALVES or not grad.dim():
        return grad * factor
    scaled = torch.empty_like(grad)
    dim = max(range(grad.dim()), key=lambda d: grad.shape[d])
    size = max(1, -(-grad.shape[dim] // 16))
    for to, part in zip(scaled.split(size, dim), grad.split(size, dim), strict=True):
        to.copy_(part.float() * factor)
    return scaled


def _put(whole: torch.Tensor, shard: Shard, tile: int, part: torch.Tensor) -> None:
    offset, size = shard.offsets[tile], shard.sizes[tile]
    if shard.outer == 1:
        whole.narrow(shard.dim, offset, size).copy_(part)
        return
    rows = expose(whole, shard, shard.block).narrow(shard.dim + 1, offset, size)
    rows.copy_(expose(part, shard, size))


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[1:]
        kinds = {t.device.type for t in tensors}
        ctx.autocast = autocast_state(next(iter(kinds)))
        ctx.dtypes = [t.dtype for t in tensors]
        # A loss is scaled so that fp16 holds its gradients: they cannot be made before.
        ctx.at_once = call.sums_once and not takes_fp16(ctx.dtypes, ctx.autocast)
        if ctx.at_once:
            results, grads = call.run_with_gradients(tensors, wanted, None)
            ctx.has = [grad is not None for grad in grads]
            ctx.save_for_backward(*(grad for grad in grads if grad is not None))
        else:
            results = call.run(tensors)
            ctx.save_for_backward(*tensors)
        fixed = [r for r, trained in zip(results, call.trained, strict=True) if not trained]
        ctx.mark_non_differentiable(*fixed)
        return results

    @staticmethod
    @first_gradient_alone("operations that run by tiles", 'parallelize(..., tile="none")')
    def backward(ctx: Any, *incoming: torch.Tensor | None):
        if ctx.at_once:
            (factor,) = [g for g in incoming if g is not None] or [None]
            held = iter(ctx.saved_tensors)
            grads = [next(held) if has else None for has in ctx.has]
            grads = [None if g is None or factor is None else _scaled(g, factor) for g in grads]
        else:
            with under(ctx.autocast):
                _, grads = ctx.call.run_with_gradients(
                    ctx.saved_tensors, ctx.needs_input_grad[1:], incoming
                )
        return None, *(
            None if g is None else g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )
