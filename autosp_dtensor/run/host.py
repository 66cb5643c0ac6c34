"""How much host memory a rank may take for values that wait for backward."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .agree import side_group

__all__ = ["free_bytes", "host_bytes"]

_SHARE = 0.8  # of what is free: data loaders, checkpoints and the page cache take the rest
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def host_bytes(mesh: DeviceMesh) -> int:
    """A rank's part of what its machine has free: the least of all ranks of the mesh, on all of
    them. Other ranks of the job are taken to be spread over machines as these are.
    """
    rows = [(platform.node(), free_bytes())]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        size = mesh.size(dim)
        if size > 1 and dist.get_backend(group) != "fake":
            parts: list[list[tuple[str, int]]] = [[]] * size
            own = side_group(group, dist.get_process_group_ranks(group))
            dist.all_gather_object(parts, rows, group=own)
            rows = [row for part in parts for row in part]
        else:
            rows = rows * size
    return least_part(rows, -(-dist.get_world_size() // mesh.size()))


def least_part(rows: list[tuple[str, int]], others: int) -> int:
    """The smallest part of any rank.

    Args:
        rows: for each rank of the mesh, its machine and the bytes that are free there.
        others: how many ranks of the job there are to one of the mesh.
    """
    machines: dict[str, list[int]] = {}
    for machine, free in rows:
        machines.setdefault(machine, []).append(free)
    return int(min(min(free) * _SHARE / len(free) / others for free in machines.values()))


def free_bytes() -> int:
    """Memory of this machine that can be had without swapping, within the control group's limit."""
    found = [_available(), _left_in_control_group()]
    return min(each for each in found if each is not None)


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_control_group() -> int | None:
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((_CONTROL_GROUP / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)
