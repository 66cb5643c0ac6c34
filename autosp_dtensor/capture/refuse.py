"""Torch calls that a traced program cannot hold, and what the user is told of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import CaptureError
from ..graph import short_name
from ..tree import flatten

__all__ = [
    "READS",
    "refuse_detached_write",
    "refuse_effects",
    "refuse_method",
    "refused_writes",
    "value_read",
]

READS = {"numpy", "__array__", "data_ptr"}  # tensors without data have none of these
_METHODS = {
    "register_hook": "a hook on an intermediate value runs in Python at every backward",
    "retain_grad": "the gradient of an intermediate value is not kept by a traced program",
    "backward": "backward inside forward is not part of a traced program",
    "set_": "it replaces the memory of a tensor",
    "__set__": "a change of .data, .grad or .requires_grad is not an operation that can be traced",
}


def refuse_method(name: str, where: Callable[[], str]) -> None:
    """Methods of tensors that act outside the program."""
    if name in _METHODS:
        raise CaptureError(
            f"forward calls {name}() on a tensor."
            if name != "__set__"
            else "forward sets a property of a tensor.",
            where=where(),
            why=_METHODS[name],
            fix="move it out of forward",
        )


def refuse_effects(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    where: Callable[[], str],
) -> None:
    """Calls that write to an argument under a name that does not say so."""
    name = getattr(func, "__name__", "")
    if name == "embedding" and kwargs.get("max_norm", args[3] if len(args) > 3 else None):
        raise CaptureError(
            "an embedding with max_norm changes its table in forward.",
            where=where(),
            why="each rank would renormalize only the rows that its tokens look up",
            fix="normalize the table between steps instead",
        )
    if kwargs.get("generator") is not None:
        raise CaptureError(
            f"{short_name(func)} draws from a generator of its own.",
            where=where(),
            why="the program keeps the generator of the trace: it would go on from call to call, "
            "and draw the same on every rank",
            fix="draw from the default generator, or make the tensor outside of forward",
        )
    if kwargs.get("out") is not None:
        raise CaptureError(
            f"{short_name(func)} writes to out=.",
            where=where(),
            why="the traced program has no views of one memory",
            fix="assign the result instead",
        )


def refuse_detached_write(target: torch.Tensor, func: Callable[..., Any], where: str) -> None:
    """In-place under no_grad: on one device the value changes, and its history goes on."""
    if target.requires_grad and not torch.is_grad_enabled():
        raise CaptureError(
            f"{short_name(func)} changes a value that has a gradient, under no_grad.",
            where=where,
            why="its history would have to go on from before the change",
            fix="use an out-of-place operation and detach() what is meant to have no gradient",
        )


@contextlib.contextmanager
def refused_writes(name: str, given: Any, where: Callable[[], str]) -> Iterator[None]:
    """What is recorded as one node may not write to what it is given."""
    tensors = (t for t in flatten(given)[0] if isinstance(t, torch.Tensor))
    counted = [t for t in tensors if not t.is_inference()]  # there torch does not count writes
    before = [t._version for t in counted]
    yield
    if [t._version for t in counted] != before:
        raise CaptureError(
            f"{name} changes an argument in place.",
            where=where(),
            why="the program has it as one call, and knows only what it returns",
            fix="return a new tensor from it, and use that",
        )


def value_read(func: Callable[..., Any], where: str, *, dynamic: bool = False) -> CaptureError:
    """dynamic: a shape depends on the value; else Python reads it."""
    what = "a shape depends on" if dynamic else "Python reads"
    return CaptureError(
        f"{what} the value of a tensor: {short_name(func)}().",
        where=where,
        why="the program is traced once, without data, and must be the same on every rank",
        fix="use torch.where or a mask of fixed shape instead, or pass the value to forward as a "
        "Python number",
    )
