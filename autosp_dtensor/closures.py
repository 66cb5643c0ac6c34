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
        self.reads = _globals_read(function)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Code):
            return False
        mine, its = self.function, other.function
        same = mine.__code__ == its.__code__ and mine.__globals__ is its.__globals__
        return same and other.reads == self.reads

    def __hash__(self) -> int:
        return hash(self.function.__code__)

    def __repr__(self) -> str:
        return self.function.__qualname__


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _globals_read(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Python values that a function reads from its module: they are taken when it is traced."""
    found = []
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, _PLAIN):
            found.append((name, value))
        elif isinstance(value, (dict, list, tuple, set)):
            found.append((name, _plain_items(value)))
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            if not callable(value):
                found.append((name, _plain_items(vars(value))))
    return found


def _plain_items(value: Any) -> list[Any]:
    items = value.items() if isinstance(value, dict) else enumerate(sorted(map(repr, value)))
    return [(key, item) for key, item in items if isinstance(item, _PLAIN)]


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
