"""A mesh without processes: torch's fake process group, whose collectives do nothing.

With one rank everything is computed for real; with more, programs can be built and printed for any
rank, and run for their shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(*sizes: int, names: tuple[str, ...] = ("sp",), rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of these sizes, seen from one rank; the group ends with the block."""
    world = 1
    for size in sizes:
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
