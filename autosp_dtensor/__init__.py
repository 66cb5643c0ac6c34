"""Sequence parallelism for any PyTorch transformer, as written for one device: `autosp.parallelize(model, mesh)`."""

from .api import parallelize, sync_gradients
from .errors import AutoSPError, CaptureError, MeshError, PlacementError, RankMismatchError
from .mesh import data_shard, fsdp_mesh

__all__ = [
    "AutoSPError",
    "CaptureError",
    "MeshError",
    "PlacementError",
    "RankMismatchError",
    "data_shard",
    "fsdp_mesh",
    "parallelize",
    "sync_gradients",
]
