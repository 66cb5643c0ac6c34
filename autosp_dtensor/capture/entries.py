"""Functions of libraries that the tracer has to meet as a whole, wherever a model keeps them.

flash-attn's kernels, flex_attention: Python functions that torch's overrides do not see. Models
import them by name, keep them in tables and wrap them in torch.compile, so that putting another
function in their module's place would miss most calls. While a trace is going on their code is
exchanged instead, and the function object stays what it was.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["Handler", "dispatch", "intercepted"]

# What is done in place of a call: (recorder, the function, its arguments by name) -> its result.
Handler = Callable[["Recorder", Callable[..., Any], inspect.BoundArguments], Any]

_LOCK = threading.RLock()


class _Exchanged:
    """A function whose code is exchanged, `original` to call it as it was."""

    def __init__(self, path: str, function: types.FunctionType, handler: Handler) -> None:
        self.path, self.function, self.handler = path, function, handler
        self.traces = 0
        self.code = function.__code__
        self.original = types.FunctionType(
            self.code, function.__globals__, function.__name__, function.__defaults__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.signature = inspect.signature(self.original)


_EXCHANGED: dict[str, _Exchanged] = {}
_active: Callable[[], Recorder | None] = lambda: None  # noqa: E731  set by `intercepted`


def dispatch(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the exchanged code calls; other threads get the function itself."""
    entry = _EXCHANGED[path]
    recorder = _active()
    if recorder is None or recorder.is_inside_call:
        return entry.original(*args, **kwargs)
    return entry.handler(recorder, entry.function, entry.signature.bind(*args, **kwargs))


@contextlib.contextmanager
def intercepted(
    handlers: dict[str, Handler], active: Callable[[], Recorder | None]
) -> Iterator[None]:
    """While it lasts, calls of the functions at these dotted paths go to their handlers.

    Functions of modules that are not imported, and what is no plain function, are left alone.
    """
    global _active
    with _LOCK:
        _active = active
        taken = []
        for path, handler in handlers.items():
            entry = _entry(path, handler)
            if entry is None or entry in taken:
                continue
            if entry.traces == 0:
                entry.function.__code__ = _trampoline(entry.path)
            entry.traces += 1
            taken.append(entry)
    try:
        yield
    finally:
        with _LOCK:
            for entry in taken:
                entry.traces -= 1
                if entry.traces == 0:
                    entry.function.__code__ = entry.code


def _entry(path: str, handler: Handler) -> _Exchanged | None:
    module, _, name = path.rpartition(".")
    function = getattr(sys.modules.get(module), name, None)
    known = _EXCHANGED.get(path)
    if known is not None and known.function is function:
        return known
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return None
    for other in _EXCHANGED.values():
        if other.function is function:
            return other  # under another name
    _EXCHANGED[path] = _Exchanged(path, function, handler)
    return _EXCHANGED[path]


def _trampoline(path: str) -> types.CodeType:
    scope: dict[str, Any] = {}
    source = (
        "def call(*args, **kwargs):\n"
        f"    from {__name__} import dispatch\n"
        f"    return dispatch({path!r}, args, kwargs)\n"
    )
    exec(source, scope)
    return scope["call"].__code__
