"""Attention masks as expressions over positions: recognized by what they allow, or tiled."""

from .attend import Softmax, tiled_attention
from .expression import ReadState
from .prove import MASKED_BELOW, Pattern, recognize
from .tiles import TileMask, forget_bands, tile_mask, tile_scores

__all__ = [
    "MASKED_BELOW",
    "Pattern",
    "ReadState",
    "Softmax",
    "TileMask",
    "forget_bands",
    "recognize",
    "tile_mask",
    "tile_scores",
    "tiled_attention",
]
