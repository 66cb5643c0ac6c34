"""What one would write by hand instead: transformers' models on FSDP2, with or without Ulysses or
gathered keys and values, in full checkpointing, eager or compiled."""

from .compiled import compile_blocks
from .schemes import BASELINES, split_rows

__all__ = ["BASELINES", "compile_blocks", "split_rows"]
