"""Attention: each entry point is a form, each way to split it a strategy."""

from .rule import FLASH, RULES, AttentionRule

__all__ = ["FLASH", "RULES", "AttentionRule"]
