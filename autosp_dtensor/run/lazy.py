"""Results that are made when they are looked at, and their gradient."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import fsdp_begin_backward, fsdp_parameters, fsdp_policy
from ..autocast import autocast_state, under
from ..capture import Call
from ..checkpoint import Deferred, Later
from ..errors import UsageError
from ..graph import Meta, Origin, describe, facts, parents
from ..lazy_dtensor import LazyDTensor
from ..place.refuse import first_gradient_alone
from ..placement import Shard
from .border import as_dtensor

__all__ = ["Recipe", "begins_backward", "lazy_dtensor", "openable", "opened"]


# How often optimizers have changed a parameter. Tensors' own counts do not tell of fused ones, nor,
# of FSDP2's parameters, of those that take many at a time.
_steps: Any = WeakIdKeyDictionary()


@functools.cache
def _count_steps() -> None:
    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _steps[parameter] = _steps.get(parameter, 0) + 1

    register_optimizer_step_post_hook(count)


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    own = 0 if tensor.is_inference() else tensor._version  # those have none
    return own, _steps.get(tensor, 0)


@dataclass(frozen=True)
class Held:
    """A tensor that a result is made of. owner: the FSDP2 module that gathers it; counted: what
    tells that it was changed.
    """

    tensor: torch.Tensor
    owner: Any
    counted: torch.Tensor
    version: tuple[int, int]

    @staticmethod
    def of(tensor: torch.Tensor, origin: Origin | None, live: nn.Module | None) -> Held:
        owner, counted = None, tensor if tensor.is_leaf else tensor.detach()
        if live is not None and origin is not None and origin.kind == "param":
            parameter = getattr(live.get_submodule(origin.module), origin.name)
            for module in live.modules():
                for managed in fsdp_parameters(module):
                    if any(each is parameter for each in managed.tensors):
                        owner, counted = module, managed.part
        return Held(tensor.detach(), owner, counted, _version(counted))

    @property
    def changed(self) -> bool:
        return _version(self.counted) != self.version

    @property
    def gone(self) -> bool:
        return self.tensor.numel() > 0 and not self.tensor.untyped_storage().nbytes()


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a result is made of, and how. key: the same for results of one program.

    around: FSDP2's modules that give it, from the outside in. FSDP2 waits at what they give for
    backward to come by, to gather parameters and, at the end, to reduce gradients.
    """

    later: Later
    held: list[Held]
    name: str
    around: list[nn.Module]

    @property
    def key(self) -> Deferred:
        return self.later.deferred


def lazy_dtensor(
    later: Later,
    mesh: DeviceMesh,
    meta: Meta,
    placement: Shard,
    live: nn.Module | None,
    name: str,
) -> DTensor:
    """A result as the user sees it; its values are made by the first operation that reads them.

    Parameters that FSDP2 has resharded by then are gathered for it, which all ranks take part in.

    Args:
        name: what makes it, for errors.

    Raises:
        UsageError: when it is read after the optimizer has changed a parameter that it is made of.
    """
    _count_steps()
    held = [
        Held.of(t, origin, live)
        for t, origin in zip(later.tensors, later.deferred.origins, strict=True)
    ]
    recipe = Recipe(later, held, name, _around(later.deferred.origins, live))
    return _Made.apply(recipe, mesh, meta, placement, *later.tensors)


def _around(origins: tuple[Origin | None, ...], live: nn.Module | None) -> list[nn.Module]:
    if live is None:
        return []
    paths = [""]
    for origin in origins:
        if origin is not None and origin.kind == "param" and origin.module:
            paths += [*parents(origin.module), origin.module]
    modules = [live.get_submodule(path) for path in dict.fromkeys(paths)]
    return [module for module in modules if fsdp_policy(module) is not None]


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recipe: Recipe,
        mesh: DeviceMesh,
        meta: Meta,
        placement: Shard,
        *tensors: torch.Tensor,
    ) -> DTensor:
        rank = mesh.get_local_rank()
        call = recipe.key.tile.bind(rank)
        ctx.call, ctx.factor, ctx.around = call, recipe.key.factor, recipe.around
        ctx.autocast = autocast_state(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        shape = list(meta.shape)
        shape[placement.dim] = placement.local(rank)
        stand_in = torch.empty((), dtype=meta.dtype, device=meta.device).expand(shape)
        make = _maker(call, recipe, ctx.autocast, describe(meta, placement))
        shown = as_dtensor(stand_in, mesh, meta, placement)
        lazy = LazyDTensor.like(shown, make, recipe)
        ctx.placements = lazy.placements
        if not meta.requires_grad:
            ctx.mark_non_differentiable(lazy)
        return lazy

    @staticmethod
    @first_gradient_alone("results made by tiles", 'parallelize(..., tile="none")')
    def backward(ctx: Any, grad: Any):
        _begin(ctx.around)
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=ctx.placements).to_local()
        with under(ctx.autocast):
            _, grads = ctx.call.run_with_gradients(
                ctx.saved_tensors, ctx.needs_input_grad[4:], (grad * ctx.factor,)
            )
        given = zip(grads, ctx.saved_tensors, strict=True)
        return *[None] * 4, *(g if g is None else g.to(t.dtype) for g, t in given)


def _maker(call: Any, recipe: Recipe, autocast: Any, shown: str) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        with gathered(recipe.held, recipe.name, shown), under(autocast):
            return call.run([each.tensor for each in recipe.held])[0]

    return make


@contextlib.contextmanager
def gathered(held: list[Held], name: str, shown: str) -> Iterator[None]:
    """What a result is made of is there, and as it was."""
    for each in held:
        if each.changed or (each.gone and each.owner is None):
            raise UsageError(
                f"{name} is read after what it is made of has changed.",
                where=name,
                have=f"{shown}, of a tensor {tuple(each.tensor.shape)} that was changed since",
                why="wide results (logits) are made when they are first read, so that a step "
                "need not hold them; now they would be others",
                fix="read them before the optimizer's step (.detach() is enough), or make all "
                'results at once: parallelize(..., tile="none")',
            )
    owners = list(dict.fromkeys(each.owner for each in held if each.gone))
    try:
        for owner in owners:
            owner.unshard()
        yield
    finally:
        for owner in owners:
            owner.reshard()


def openable(call: Call) -> dict[int, Deferred]:
    """The inputs of a call, by number, that its program can make of what they are made of."""
    found = {}
    for number, (tensor, placement) in enumerate(zip(call.tensors, call.placements, strict=True)):
        if isinstance(tensor, LazyDTensor) and tensor.openable:
            deferred: Deferred = tensor.recipe.key
            made = facts([*deferred.source.nodes][-1])
            if not isinstance(placement, Shard) or made.placement != placement:
                continue
            # A program without factors at its border counts gradients in another way.
            if deferred.factor == len(placement.sizes) or not made.meta.requires_grad:
                found[number] = deferred
    return found


@contextlib.contextmanager
def opened(lazy: list[LazyDTensor]) -> Iterator[list[torch.Tensor]]:
    """What some results are made of, for a program that makes them itself.

    Raises:
        UsageError: as reading them does.
    """
    with contextlib.ExitStack() as stack:
        for each in lazy:
            recipe: Recipe = each.recipe
            stack.enter_context(gathered(recipe.held, recipe.name, f"{tuple(each.shape)}"))
            if torch.is_grad_enabled() and each.requires_grad:
                each.opened()
        yield [t for each in lazy for t in each.recipe.later.tensors]


def begins_backward(around: list[nn.Module], results: list[Any]) -> list[Any]:
    """Results at which backward begins for these modules of FSDP2, which will not see it."""
    asked = [k for k, r in enumerate(results) if isinstance(r, torch.Tensor) and r.requires_grad]
    if not around or not asked:
        return results
    begun = dict(zip(asked, _Begin.apply(around, *(results[k] for k in asked)), strict=True))
    return [begun.get(k, result) for k, result in enumerate(results)]


def _begin(around: list[nn.Module]) -> None:
    for module in around:
        fsdp_begin_backward(module)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, around: list[nn.Module], *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.around = around
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any):
        _begin(ctx.around)
        return None, *grads
