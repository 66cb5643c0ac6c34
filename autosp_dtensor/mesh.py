"""Axis names and size checks, and the mesh that FSDP2 or DDP gets."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch import flatten_mesh
from .errors import MeshError
from .source import call_site

__all__ = ["data_shard", "fsdp_mesh", "sp_mesh"]

REPLICATE_AXIS = "dp_replicate"
_DATA_AXES = ("dp_shard", "data", "fsdp")
_MODEL_AXES = ("tp", "pp", "ep", "cp")


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(mesh.mesh_dim_names or ())


def sp_mesh(mesh: DeviceMesh, sp_axis: str) -> DeviceMesh:
    """The one-dimensional mesh of the sp axis.

    Raises:
        MeshError: the mesh has no axis of that name.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"parallelize needs a DeviceMesh, got {type(mesh).__name__}.",
            where=call_site(),
            have=f"{mesh!r:.80}",
            why="it tells which ranks share a sequence",
            fix='mesh = init_device_mesh("cuda", (dp, sp), mesh_dim_names=("dp", "sp"))',
        )
    names = axis_names(mesh)
    if sp_axis not in names:
        raise MeshError(
            f"the mesh has no axis '{sp_axis}'.",
            where=call_site(),
            have=f"axes {names or 'without names'} of sizes {tuple(mesh.shape)}",
            why="sequences are split over that axis",
            fix=f'init_device_mesh(..., mesh_dim_names=("dp", "{sp_axis}")), or pass sp_axis=',
        )
    return mesh if len(names) == 1 else mesh[sp_axis]


def fsdp_mesh(mesh: DeviceMesh, *, sp_axis: str = "sp", dp_axis: str = "dp") -> DeviceMesh:
    """The mesh for `fully_shard` or DDP: dp and sp as one, since both hold copies of parameters.

    With an axis "dp_replicate" the result has two dimensions, replicate and shard, as HSDP wants.

    Args:
        mesh: the mesh given to `parallelize`.
        sp_axis: name of the sequence axis.
        dp_axis: name of the data axis ("dp_shard", "data" and "fsdp" are found by themselves); a
            mesh of sp and model axes (tp, pp, ep, cp) has none.

    Raises:
        MeshError: the mesh has no axis `sp_axis`, or it is not clear which axis carries data.
    """
    sp_mesh(mesh, sp_axis)
    names = axis_names(mesh)
    data = _data_axis(names, sp_axis, dp_axis)
    members = tuple(name for name in names if name in (data, sp_axis))
    if REPLICATE_AXIS in names:
        return _hsdp_mesh(mesh, members)
    if len(members) > 1:
        return flatten_mesh(mesh, members, "_".join(members))
    return mesh if len(names) == 1 else mesh[sp_axis]


def _data_axis(names: tuple[str, ...], sp_axis: str, dp_axis: str) -> str | None:
    if dp_axis in names:
        return dp_axis
    rest = [n for n in names if n not in (sp_axis, REPLICATE_AXIS, *_MODEL_AXES)]
    if dp_axis == "dp" and not rest:
        return None
    if dp_axis == "dp" and len(rest) == 1 and rest[0] in _DATA_AXES:
        return rest[0]
    raise MeshError(
        f"the mesh has no axis '{dp_axis}'.",
        where=call_site(),
        have=f"axes {names}",
        why="gradients are averaged over sp and the data axis together",
        fix="name the data axis: dp_axis=",
    )


def _hsdp_mesh(mesh: DeviceMesh, members: tuple[str, ...]) -> DeviceMesh:
    """[replicate, shard], made anew: torch 2.13 warns if a flattened axis is cut from its root."""
    if len(members) == 1:
        return mesh[(REPLICATE_AXIS, members[0])]
    names = axis_names(mesh)
    if set(names) != {REPLICATE_AXIS, *members}:
        raise MeshError(
            f"a mesh with '{REPLICATE_AXIS}' and further axes has no HSDP mesh here.",
            where=call_site(),
            have=f"axes {names}",
            why="which of them hold copies of the parameters is not known",
            fix="build the mesh for fully_shard yourself: "
            f"[{REPLICATE_AXIS}, {' x '.join(members)}]",
        )
    key = (id(mesh), members)
    if key not in _HSDP:
        order = [names.index(name) for name in (REPLICATE_AXIS, *members)]
        grid = mesh.mesh.permute(order).flatten(1)
        made = DeviceMesh(
            mesh.device_type, grid, mesh_dim_names=(REPLICATE_AXIS, "_".join(members))
        )
        _HSDP[key] = mesh, made
    return _HSDP[key][1]


_HSDP: dict[tuple[int, tuple[str, ...]], tuple[DeviceMesh, DeviceMesh]] = {}


def data_shard(mesh: DeviceMesh, *, sp_axis: str = "sp", dp_axis: str = "dp") -> tuple[int, int]:
    """(num_replicas, rank) for a DistributedSampler: all ranks of an sp group read the same rows.

    Rows are divided over the data axis, found as by `fsdp_mesh`, and "dp_replicate". Ranks that
    differ only in sp or in a model axis (tp, pp, ep, cp) read the same rows.

    Raises:
        MeshError: the mesh has no axis `sp_axis`, or it is not clear which axis carries data.
    """
    sp_mesh(mesh, sp_axis)
    names = axis_names(mesh)
    data = (REPLICATE_AXIS, _data_axis(names, sp_axis, dp_axis))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise MeshError(
            "this rank is not part of the mesh.",
            where=call_site(),
            have=f"rank {dist.get_rank()}; {mesh}",
            why="ranks outside have no rows to read",
            fix="call it on the ranks of the mesh alone",
        )
    replicas, rank = 1, 0
    for name, size, at in zip(names, mesh.shape, coordinate, strict=True):
        if name in data:
            replicas, rank = replicas * size, rank * size + at
    return replicas, rank
