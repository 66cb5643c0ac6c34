"""How much memory a training step takes, and the longest sequence that fits, without a GPU."""

from .plan import Plan, plan

__all__ = ["Plan", "plan"]
