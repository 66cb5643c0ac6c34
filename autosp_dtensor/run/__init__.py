"""Lowered graph, live module -> the module, callable as before."""

from .build import block_paths
from .compile import Options
from .forward import Forward
from .host import host_bytes

__all__ = ["Forward", "Options", "block_paths", "host_bytes"]
