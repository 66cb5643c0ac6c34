"""Torch calls that a traced program cannot hold, and what the user is told of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError
from ..graph import Origin, given, short_name
from ..tree import flatten

__all__ = [
    "READS",
    "refuse_detached_write",
    "refuse_effects",
    "refuse_foreign_write",
    "refuse_method",
    "refuse_recurrent",
    "refuse_result",
    "refused_writes",
    "value_read",
]

Where = Callable[[], str]  # told only where it is needed: it looks through the stack
READS = {"numpy", "__array__", "data_ptr"}  # tensors without data have none of these
_HOOK = "a hook on a tensor runs in Python at every backward, and forward would put it there once"
_METHODS = {
    "register_hook": _HOOK,
    "register_post_accumulate_grad_hook": _HOOK,
    "retain_grad": "the gradient of an intermediate value is not kept by a traced program",
    "backward": "backward inside forward is not part of a traced program",
    "set_": "it replaces the memory of a tensor",
    "__set__": "a change of .data, .grad or .requires_grad is not an operation that can be traced",
}
_SPOKEN = {"getitem": "indexing", "array": "numpy.asarray()", "index": "its use as an index"}


def refuse_method(func: Callable[..., Any], args: tuple[Any, ...], where: Where) -> None:
    """Methods of tensors that act outside the program."""
    name = getattr(func, "__name__", "")
    what = f"forward calls {name}() on a tensor."
    if name == "__set__":
        what = "forward sets a property of a tensor."
    elif name == "__get__" and short_name(func) == "grad_fn":
        name, what = "register_hook", "forward takes grad_fn of a tensor."
    if name in _METHODS:
        fix = "move it out of forward"
        if _METHODS[name] is _HOOK:
            fix = "put it there in a forward hook of the module that makes the tensor: hooks run at"
            fix += " every call; or, for a parameter, once, outside of forward"
        raise CaptureError(what, where=where(), have=given(args), why=_METHODS[name], fix=fix)


def refuse_effects(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    where: Where,
) -> None:
    """Calls that write to an argument under a name that does not say so."""
    name = getattr(func, "__name__", "")
    if name == "embedding" and kwargs.get("max_norm", args[3] if len(args) > 3 else None):
        raise CaptureError(
            "an embedding with max_norm changes its table in forward.",
            where=where(),
            have=given(args, kwargs),
            why="each rank would renormalize only the rows that its tokens look up",
            fix="normalize the table between steps instead",
        )
    if kwargs.get("generator") is not None:
        raise CaptureError(
            f"{short_name(func)} draws from a generator of its own.",
            where=where(),
            have=f"a generator on {kwargs['generator'].device}",
            why="the program keeps the generator of the trace: it would go on from call to call, "
            "and draw the same on every rank",
            fix="draw from the default generator, or make the tensor outside of forward",
        )
    if kwargs.get("out") is not None:
        raise CaptureError(
            f"{short_name(func)} writes to out=.",
            where=where(),
            have=given(args, kwargs),
            why="the traced program has no views of one memory",
            fix="assign the result instead",
        )


def refuse_detached_write(target: torch.Tensor, func: Callable[..., Any], where: Where) -> None:
    """In-place under no_grad: on one device the value changes, and its history goes on."""
    if target.requires_grad and not torch.is_grad_enabled():
        raise CaptureError(
            f"{short_name(func)} changes a value that has a gradient, under no_grad.",
            where=where(),
            have=given(target),
            why="its history would have to go on from before the change",
            fix="use an out-of-place operation and detach() what is meant to have no gradient",
        )


def refuse_stale(tensor: torch.Tensor, stale: bool, where: Where) -> None:
    if stale:
        raise CaptureError(
            "a tensor is read after its memory was changed through another view.",
            where=where(),
            have=given(tensor),
            why="the traced program has no views of one memory: shards do not alias",
            fix="use the out-of-place form of the operation that writes: x = x + 1, not x.add_(1)",
        )


@contextlib.contextmanager
def refused_writes(name: str, arguments: Any, where: Callable[[], str]) -> Iterator[None]:
    """What is recorded as one node may not write to what it is given."""
    tensors = (t for t in flatten(arguments)[0] if isinstance(t, torch.Tensor))
    counted = [t for t in tensors if not t.is_inference()]  # there torch does not count writes
    before = [t._version for t in counted]
    yield
    if [t._version for t in counted] != before:
        raise CaptureError(
            f"{name} changes an argument in place.",
            where=where(),
            have=given(arguments),
            why="the program has it as one call, and knows only what it returns",
            fix="return a new tensor from it, and use that",
        )


def refuse_foreign_write(
    target: torch.Tensor, origin: Origin | None, owner: Origin | None, where: Where
) -> None:
    """In place on what belongs to the caller, or on a part of the model's state.

    origin: what `target` is, if no operation made it; owner: what it shares memory with.
    """
    if origin is None and owner is not None:
        raise CaptureError(
            f"forward writes to a part of {owner.module}.{owner.name} in place.",
            where=where(),
            have=given(target),
            why="a change of state is carried out after the program, as one assignment",
            fix="write the whole tensor: self.buffer.copy_(new)",
        )
    if origin is not None and origin.kind != "buffer":
        raise CaptureError(
            f"forward changes {origin.kind} {origin.module}.{origin.name} in place.".replace(
                " .", " "
            ),
            where=where(),
            have=given(target),
            why="an input or parameter belongs to the caller; ranks would change their own copies",
            fix="work on a copy: x = x.clone()",
        )


def refuse_result(func: Callable[..., Any], result: Any, tensors: Any, where: Where) -> None:
    """Results that are no tensor and no tuple of them."""
    if not isinstance(result, (tuple, list)):
        raise CaptureError(
            f"{short_name(func)} returns a {type(result).__name__}.",
            where=where(),
            have=given(tensors),
            why="only tensors and tuples of tensors can be placed",
            fix="register a rule for the function around it: autosp.register_rule(fn, ...)",
        )


def refuse_recurrent(module: nn.Module, arguments: Any, where: Where) -> None:
    """RNN, LSTM and GRU: no part of a sequence can be computed before the part before it."""
    if isinstance(module, nn.RNNBase):
        raise CaptureError(
            f"{type(module).__name__} goes through a sequence token by token.",
            where=where(),
            have=given(arguments),
            why="each token needs the state that the token before it left, so the parts of a "
            "sequence cannot be computed on several ranks at the same time",
            fix="keep the module out of the parallelized model, or use attention or a scan that "
            "has a rule",
        )


def value_read(
    func: Callable[..., Any], where: str, have: list[str], *, dynamic: bool = False
) -> CaptureError:
    """dynamic: a shape depends on the value; else Python reads it."""
    what = "a shape depends on" if dynamic else "Python reads"
    name = short_name(func)
    return CaptureError(
        f"{what} the value of a tensor: {_SPOKEN.get(name, f'{name}()')}.",
        where=where,
        have=have,
        why="the program is traced once, without data, and must be the same on every rank",
        fix="use torch.where or a mask of fixed shape instead, or pass the value to forward as a "
        "Python number",
    )
