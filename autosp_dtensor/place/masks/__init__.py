"""Attention masks as expressions over positions: recognized by what they allow, or tiled."""

from .attend import Softmax, tiled_attention
from .expression import ReadState
from .prove import MASKED_BELOW, Pattern, recognize
from .runs import Run, Runs
from .spans import prove_runs
from .tiles import TileMask, forget_bands, tile_mask, tile_scores
from .varlen import kernel_for

__all__ = [
    "MASKED_BELOW",
    "Pattern",
    "ReadState",
    "Run",
    "Runs",
    "Softmax",
    "TileMask",
    "forget_bands",
    "kernel_for",
    "prove_runs",
    "recognize",
    "tile_mask",
    "tile_scores",
    "tiled_attention",
]
