"""Lowered graph, live module -> the module, callable as before."""

from .build import Options
from .forward import Forward

__all__ = ["Forward", "Options"]
