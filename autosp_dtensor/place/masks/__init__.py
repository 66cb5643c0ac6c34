"""Attention masks as expressions over positions: recognized by what they allow, never by who built
them.
"""

from .prove import Pattern, recognize

__all__ = ["Pattern", "recognize"]
