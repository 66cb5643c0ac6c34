"""Between the user's tensors and the program's: DTensors in and out."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from ..errors import MeshError
from ..graph import Meta
from ..placement import Placement, Replicate, Shard, chunk_sizes
from ..source import call_site

__all__ = ["as_dtensor", "placement_on", "to_local"]


def placement_on(mesh: DeviceMesh, tensor: DTensor) -> Placement:
    """The placement of an input that comes as a DTensor.

    Raises:
        MeshError: it lives on another mesh than the sp axis, or in a placement a program cannot
            take.
    """
    if tensor.device_mesh != mesh or len(tensor.placements) != 1:
        raise MeshError(
            "an input is a DTensor on another mesh than the sp axis.",
            where=call_site("the call"),
            have=f"{tensor.device_mesh} {tensor.placements}",
            why=f"programs run on {mesh}",
            fix='pass the whole tensor (x.full_tensor()), or a DTensor on mesh["sp"]',
        )
    placement = tensor.placements[0]
    if isinstance(placement, TorchReplicate):
        return Replicate()
    if type(placement) is TorchShard:
        dim = placement.dim % tensor.dim()
        return Shard(dim, chunk_sizes(tensor.shape[dim], mesh.size()))
    raise MeshError(
        f"an input is a DTensor with placement {placement}.",
        where=call_site("the call"),
        have=f"{tuple(tensor.shape)} {tensor.placements}",
        why="a program takes whole values and values sharded on one dim",
        fix="redistribute it to Shard or Replicate first",
    )


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part; its gradient goes back as a DTensor of the same placement."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local(grad_placements=tensor.placements)


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, meta: Meta, placement: Shard) -> DTensor:
    """A sharded result as the user sees it: its `full_tensor()` is the value of one device."""
    stride, strides = 1, []
    for size in reversed(meta.shape):
        strides.append(stride)
        stride *= max(size, 1)
    return DTensor.from_local(
        local,
        mesh,
        [TorchShard(placement.dim)],
        run_check=False,
        shape=torch.Size(meta.shape),
        stride=tuple(reversed(strides)),
    )
