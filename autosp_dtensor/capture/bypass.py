"""Calls that __torch_function__ misses: autograd.Function, checkpoint, a user rule's function."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from .._torch import NON_REENTRANT, CheckpointFunction, FakeTensor, functions_run_by
from ..errors import CaptureError
from ..graph import given
from . import bias, flash, flex
from .entries import intercepted
from .refuse import value_read

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["active_recorder", "looked_into", "patched"]

_ACTIVE: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("recorder", default=None)


def active_recorder() -> Recorder | None:
    """The recorder of the trace that is going on, if any."""
    return _ACTIVE.get()


@contextlib.contextmanager
def looked_into() -> Iterator[None]:
    """Inside, torch.nn.functional's Python functions run on instead of being one call each."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    functional: Any = torch.nn.functional
    before = {name: getattr(functional, name) for name in names}
    for name in names:
        setattr(functional, name, lambda *_: False)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def _as_hinted(recorder: Recorder, function: Any, bound: inspect.BoundArguments) -> bool:
    """torch's encoder compares a mask with the causal one, to say so; masks are proved later."""
    return bound.arguments.get("is_causal") is True


# What is put into torch's modules for a trace: a module first imported during it keeps these for
# good, so they hold no recorder, and are torch's own without one.
_GRAD = torch.autograd.grad
_CHECKPOINTED = getattr(torch.utils.checkpoint, NON_REENTRANT)


def _refused_grad(*args: Any, **kwargs: Any) -> Any:
    recorder = active_recorder()
    if recorder is None:
        return _GRAD(*args, **kwargs)
    raise CaptureError(
        "forward calls torch.autograd.grad().",
        where=recorder.where(),
        have=given(args, kwargs),
        why="a gradient inside forward is not part of a traced program",
        fix="move it out of forward",
    )


def _recorded_non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
    recorder = active_recorder()
    if recorder is None:
        yield from _CHECKPOINTED(*args, **kwargs)
        return
    with recorder.checkpointed():
        yield


_LOOKS = {"torch.nn.modules.transformer._detect_is_causal_mask": _as_hinted}


@contextlib.contextmanager
def patched(recorder: Recorder) -> Iterator[None]:
    """While tracing, an autograd.Function is one opaque node and checkpoint calls its function.

    Functions that are wrapped in torch.compile run eagerly. FakeTensor has a tolist of its own that
    calls item(): refused under its own name.
    """
    non_reentrant = getattr(torch.utils.checkpoint, NON_REENTRANT)
    autograd_grad, tolist = torch.autograd.grad, FakeTensor.tolist
    reentrant: Any = CheckpointFunction

    def recorded_apply(cls: Any, apply: Any, args: tuple[Any, ...]) -> Any:
        return recorder.opaque(cls, apply, args, {}, name=cls.__name__)

    def recorded_reentrant(function: Any, _preserve_rng_state: bool, *args: Any) -> Any:
        with recorder.checkpointed():
            return function(*args)

    def named_tolist(self: FakeTensor) -> Any:
        try:
            return tolist(self)
        except CaptureError as error:  # its own text names item(), which tolist() is made of
            raise value_read(tolist, recorder.where(), given(self)) from error

    reentrant.apply = staticmethod(recorded_reentrant)
    FakeTensor.tolist = named_tolist
    torch.autograd.grad = _refused_grad
    setattr(torch.utils.checkpoint, NON_REENTRANT, _recorded_non_reentrant)
    token = _ACTIVE.set(recorder)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one fused call that no rule could split
    handlers = {**flash.handlers(), **flex.handlers(), **bias.handlers(), **_LOOKS}
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            intercepted(handlers, active_recorder),
            bias.made_by_class(active_recorder),
            # Inside a call, a Function is part of what is one node already.
            functions_run_by(recorded_apply, when=lambda: not recorder.is_inside_call),
        ):
            yield
    finally:
        _ACTIVE.reset(token)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        del reentrant.apply
        torch.autograd.grad = autograd_grad
        FakeTensor.tolist = tolist
        setattr(torch.utils.checkpoint, NON_REENTRANT, non_reentrant)
