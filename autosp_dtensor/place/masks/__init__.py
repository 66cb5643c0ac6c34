"""Attention masks as expressions over positions: recognized by what they allow, or tiled."""

from .attend import Softmax, tiled_attention
from .expression import ReadState
from .prove import MASKED_BELOW, Pattern, recognize
from .tiles import TileMask, tile_mask, tile_scores

__all__ = [
    "MASKED_BELOW",
    "Pattern",
    "ReadState",
    "Softmax",
    "TileMask",
    "recognize",
    "tile_mask",
    "tile_scores",
    "tiled_attention",
]
