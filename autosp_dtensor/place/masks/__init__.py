"""Attention masks as expressions over positions: recognized by what they allow, or tiled."""

from .attend import tiled_attention
from .expression import ReadState
from .prove import MASKED_BELOW, Pattern, recognize
from .runtime import TileMask, tile_mask

__all__ = [
    "MASKED_BELOW",
    "Pattern",
    "ReadState",
    "TileMask",
    "recognize",
    "tile_mask",
    "tiled_attention",
]
