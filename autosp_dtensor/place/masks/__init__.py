"""Attention masks as expressions over positions: recognized by what they allow, never by who built
them.
"""

from .expression import ReadState
from .prove import MASKED_BELOW, Pattern, recognize

__all__ = ["MASKED_BELOW", "Pattern", "ReadState", "recognize"]
