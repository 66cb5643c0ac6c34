"""Results that are made when they are looked at, and their gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import LazyDTensor, fsdp_owner, once_differentiable
from ..autocast import autocast_state, under
from ..checkpoint import Later
from ..errors import UsageError
from ..graph import Meta, Origin, describe
from ..placement import Shard
from .border import as_dtensor

__all__ = ["lazy_dtensor"]


@dataclass(frozen=True)
class Held:
    """A tensor that a result is made of. owner: the FSDP2 module that gathers it; counted: what
    tells that it was changed.
    """

    tensor: torch.Tensor
    owner: Any
    counted: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor, origin: Origin | None, live: nn.Module | None) -> Held:
        tensor = tensor.detach()
        owned = None
        if live is not None and origin is not None and origin.kind == "param":
            owned = fsdp_owner(live, live.get_submodule(origin.module), origin.name)
        owner, counted = owned or (None, tensor)
        return Held(tensor, owner, counted, counted._version)

    @property
    def changed(self) -> bool:
        return self.counted._version != self.version

    @property
    def gone(self) -> bool:
        return self.tensor.numel() > 0 and not self.tensor.untyped_storage().nbytes()


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
    held = [
        Held.of(t, origin, live)
        for t, origin in zip(later.tensors, later.deferred.origins, strict=True)
    ]
    return _Made.apply(later, mesh, meta, placement, name, held, *later.tensors)


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        later: Later,
        mesh: DeviceMesh,
        meta: Meta,
        placement: Shard,
        name: str,
        held: list[Held],
        *tensors: torch.Tensor,
    ) -> DTensor:
        rank = mesh.get_local_rank()
        call = later.deferred.tile.bind(rank)
        ctx.call, ctx.factor = call, later.deferred.factor
        ctx.autocast = autocast_state(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        shape = list(meta.shape)
        shape[placement.dim] = placement.local(rank)
        stand_in = torch.empty((), dtype=meta.dtype, device=meta.device).expand(shape)
        make = _maker(call, held, ctx.autocast, name, describe(meta, placement))
        lazy = LazyDTensor.like(as_dtensor(stand_in, mesh, meta, placement), make)
        ctx.placements = lazy.placements
        if not meta.requires_grad:
            ctx.mark_non_differentiable(lazy)
        return lazy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any):
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=ctx.placements).to_local()
        with under(ctx.autocast):
            _, grads = ctx.call.run_with_gradients(
                ctx.saved_tensors, ctx.needs_input_grad[6:], (grad * ctx.factor,)
            )
        given = zip(grads, ctx.saved_tensors, strict=True)
        return *[None] * 6, *(g if g is None else g.to(t.dtype) for g, t in given)


def _maker(
    call: Any, held: list[Held], autocast: Any, name: str, shown: str
) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        gone = [each for each in held if each.gone]
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
        owners = list(dict.fromkeys(each.owner for each in gone))
        try:
            for owner in owners:
                owner.unshard()
            with under(autocast):
                return call.run([each.tensor for each in held])[0]
        finally:
            for owner in owners:
                owner.reshard()

    return make
