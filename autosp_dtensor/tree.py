"""Nested arguments and results as a flat list of leaves and a hashable structure.

Knows dict, list, tuple, named tuples and dataclasses (so transformers' ModelOutput and a user's own
output class keep their type), and flex_attention's BlockMask, whose leaves are what its mask_mod
has closed over. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from .closures import is_block_mask, put_together, take_apart, with_mod

__all__ = ["Spec", "flatten", "paths", "unflatten"]

Spec = tuple[Any, ...]
_LEAF: Spec = ("leaf",)


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def _flatten(tree: Any, leaves: list[Any]) -> Spec:
    kind = type(tree)
    if kind is tuple or kind is list:
        return (kind, None, tuple([_flatten(child, leaves) for child in tree]))
    if kind is dict:
        return (kind, tuple(tree), tuple([_flatten(child, leaves) for child in tree.values()]))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name))
        rest = None if isinstance(tree, dict) else _Shell(tree)
        children = tuple(_flatten(getattr(tree, name), leaves) for name in names)
        return ("dataclass", (kind, names, rest), children)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return ("namedtuple", kind, tuple(_flatten(child, leaves) for child in tree))
    if isinstance(tree, dict):  # OrderedDict and other subclasses that can be made from pairs
        return ("mapping", (kind, tuple(tree)), tuple(_flatten(c, leaves) for c in tree.values()))
    if is_block_mask(tree):
        mask: Any = tree
        held: list[Any] = []
        mod = take_apart(mask.mask_mod, held)
        sizes = (tuple(mask.seq_lengths), tuple(mask.BLOCK_SIZE))
        children = tuple(_flatten(each, leaves) for each in held)
        return ("block mask", (_Shell(tree), mod, sizes), children)
    leaves.append(tree)
    return _LEAF


class _Shell:
    """An instance to copy when rebuilding; equal to any other of its class."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shell) and type(other.value) is type(self.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return type(self.value).__qualname__


def paths(spec: Spec) -> list[str]:
    """Where each leaf stands, in order: "0.mask" in `({"mask": leaf},)`."""
    if spec is _LEAF or spec[0] == "leaf":
        return [""]
    kind, detail, children = spec
    if kind == "namedtuple":
        names = detail._fields
    elif kind in ("mapping", "dataclass"):
        names = detail[1]
    else:
        names = detail if kind is dict else range(len(children))
    pairs = zip(names, children, strict=True)
    return [f"{name}.{path}".rstrip(".") for name, child in pairs for path in paths(child)]


def unflatten(spec: Spec, leaves: Sequence[Any]) -> Any:
    """Inverse of `flatten` for leaves in the same order."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: Spec, leaves: Iterator[Any]) -> Any:
    if spec is _LEAF or spec[0] == "leaf":
        return next(leaves)
    kind, detail, children = spec
    values = [_unflatten(child, leaves) for child in children]
    if kind is tuple or kind is list:
        return kind(values)
    if kind is dict:
        return dict(zip(detail, values, strict=True))
    if kind == "namedtuple":
        return detail(*values)
    if kind == "mapping":
        cls, keys = detail
        return cls(zip(keys, values, strict=True))
    if kind == "block mask":
        return with_mod(detail[0].value, put_together(detail[1], iter(values)))
    cls, names, shell = detail
    if shell is None:
        return cls(**dict(zip(names, values, strict=True)))
    made = copy.copy(shell.value)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
