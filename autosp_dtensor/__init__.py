"""Sequence parallelism for any PyTorch transformer as it is: `autosp.parallelize(model, mesh)`."""

from .api import explain, parallelize, sync_gradients, verify
from .checkpoint import Checkpoint
from .errors import AutoSPError, CaptureError, MeshError, PlacementError, RankMismatchError
from .mesh import data_shard, fsdp_mesh
from .place.register import register_rule

__all__ = [
    "AutoSPError",
    "CaptureError",
    "Checkpoint",
    "MeshError",
    "PlacementError",
    "RankMismatchError",
    "data_shard",
    "explain",
    "fsdp_mesh",
    "parallelize",
    "register_rule",
    "sync_gradients",
    "verify",
]
