"""Tensors of a trace that forward has put where no program can: lists, globals, other objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ..errors import CaptureError
from ..graph import Meta, Origin, describe, facts, meta_of, short_name

__all__ = ["Made", "made_in", "refuse_kept"]


@dataclass(frozen=True)
class Made:
    """One tensor of a trace, which is not kept alive: what made it, and where."""

    tensor: weakref.ref[torch.Tensor]
    meta: Meta
    source: str
    name: str | Origin  # of the operation; or what stands for it

    def text(self) -> str:
        name = self.name
        if isinstance(name, Origin):
            name = f"{name.kind} {f'{name.module}.{name.name}'.lstrip('.')}"
        return f"{name} {describe(self.meta)}"


def made_in(
    tensors: Iterable[Any], node_of: dict[int, Node], origin_of: dict[int, Origin]
) -> list[Made]:
    """The tensors of a trace; constants live on outside by right."""
    made = []
    for tensor in tensors:
        node, name = node_of.get(id(tensor)), origin_of.get(id(tensor))
        if (node is None and name is None) or (name is not None and name.kind == "const"):
            continue
        known = None if node is None else facts(node)
        meta = meta_of(tensor) if known is None else known.outs[0]
        called = "" if node is None else short_name(node.target)
        source = "" if known is None else known.source
        made.append(Made(weakref.ref(tensor), meta, source, name or called))
    return made


def refuse_kept(made: list[Made], name: str) -> None:
    """After the trace has let go of its tensors: what is alive is held by something outside.

    Tensors die with their last reference, so this costs a look at each; only if some are left, the
    garbage collector tells which of them Python still holds (autograd holding one is no harm).

    Args:
        made: what the trace made, in order.
        name: of what was called.

    Raises:
        CaptureError: a list, a global or another object outside has got a tensor without data.
    """
    if all(each.tensor() is None for each in made):
        return
    gc.collect()
    left = [each for each in made if each.tensor() is not None]
    tensors = [each.tensor() for each in left]
    holders: dict[int, str] = {}
    for holder in _referrers(tensors) if tensors else ():
        if holder is not tensors:
            for held in gc.get_referents(holder):
                holders.setdefault(id(held), type(holder).__name__)
    rows = [
        (each, holders[id(tensor)])
        for each, tensor in zip(left, tensors, strict=True)
        if id(tensor) in holders
    ]
    if not rows:
        return
    rows.reverse()  # the last one made holds those before it by its gradient
    raise CaptureError(
        "forward keeps a tensor outside of the model.",
        where=rows[0][0].source or name,
        have=[f"{each.text()}, held by a {holder}" for each, holder in rows[:_SHOWN]],
        why="forward's Python runs once, on tensors without data: what it keeps there would never "
        "be filled",
        fix="return the tensor from forward, or assign it to an attribute of a module of its own: "
        "self.loss = loss",
    )


_SHOWN = 3


def _referrers(tensors: list[Any]) -> list[Any]:
    """What holds one of them; also where the user has frozen it, as the collector then looks at no
    object that is there now."""
    frozen = gc.get_freeze_count()
    if frozen:
        gc.unfreeze()
    try:
        return gc.get_referrers(*tensors)
    finally:
        if frozen:
            gc.freeze()
