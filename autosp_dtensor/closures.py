"""Functions with what they have closed over taken out: a mask_mod and its document ids.

Two functions of the same code are the same but for those values, so that a program traced with one
serves the other.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["is_block_mask", "put_together", "take_apart", "with_mod"]

_FLEX = "torch.nn.attention.flex_attention"


class _Code:
    """A function without its values; equal to any other of the same code."""

    def __init__(self, function: types.FunctionType) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Code):
            return False
        mine, its = self.function, other.function
        return mine.__code__ == its.__code__ and mine.__globals__ is its.__globals__

    def __hash__(self) -> int:
        return hash(self.function.__code__)

    def __repr__(self) -> str:
        return self.function.__qualname__


def take_apart(value: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """Put what functions hold into `leaves`; gives what is left of them, to compare."""
    if isinstance(value, types.FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or ()]
        held += [value.__defaults__, value.__kwdefaults__]
        return ("function", _Code(value), tuple(take_apart(each, leaves) for each in held))
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        return ("partial", None, tuple(take_apart(each, leaves) for each in parts))
    if type(value) in (tuple, list):
        return (type(value), None, tuple(take_apart(each, leaves) for each in value))
    if type(value) is dict:
        return (dict, tuple(value), tuple(take_apart(each, leaves) for each in value.values()))
    leaves.append(value)
    return ("leaf",)


def put_together(what: tuple[Any, ...], leaves: Iterator[Any]) -> Any:
    """Inverse of `take_apart`."""
    if what[0] == "leaf":
        return next(leaves)
    kind, detail, children = what
    values = [put_together(child, leaves) for child in children]
    if kind == "function":
        old = detail.function
        *held, defaults, keywords = values
        cells = tuple(types.CellType(each) for each in held)
        made = types.FunctionType(
            old.__code__, old.__globals__, old.__name__, defaults, cells or None
        )
        made.__kwdefaults__ = keywords
        return made
    if kind == "partial":
        return functools.partial(values[0], *values[1], **values[2])
    return dict(zip(detail, values, strict=True)) if kind is dict else kind(values)


def is_block_mask(value: Any) -> bool:
    """Whether it is flex_attention's BlockMask (which nobody has unless that is imported)."""
    module = sys.modules.get(_FLEX)
    return module is not None and isinstance(value, module.BlockMask)


def with_mod(mask: Any, mod: Any) -> Any:
    """A BlockMask of the same size with another mask_mod, and without blocks of its own."""
    made = object.__new__(type(mask))
    made.__dict__.update(
        seq_lengths=tuple(mask.seq_lengths), BLOCK_SIZE=tuple(mask.BLOCK_SIZE), mask_mod=mod
    )
    return made
