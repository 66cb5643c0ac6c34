"""What a node calls where it is not simply the torch function that the model called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from .._torch import function_apply
from ..errors import CaptureError
from ..graph import short_name

__all__ = [
    "Opaque",
    "OutOfPlace",
    "UnderAutocast",
    "draws",
    "inplace_argument",
    "is_inplace",
    "plain_target",
]

_INPLACE_OPERATORS = frozenset(
    f"__{name}__"
    for name in "iadd isub imul itruediv ifloordiv ipow iand ior ixor imod setitem".split()
)


def is_inplace(func: Callable[..., Any]) -> bool:
    """Whether a torch function writes to its first argument, by torch's naming."""
    name = getattr(func, "__name__", "")
    return name in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def inplace_argument(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of the same call out of place, where it says inplace=True; else None."""
    position = _inplace_position(func)
    if position is None:
        return None
    if kwargs.get("inplace") is True:
        return args, {**kwargs, "inplace": False}
    if len(args) > position and args[position] is True:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return None


@functools.cache
def _inplace_position(func: Callable[..., Any]) -> int | None:
    if not isinstance(func, types.FunctionType):
        return None
    try:
        names = list(inspect.signature(func).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


class _Wrapped:
    """A function in other clothes; equal to another one around the same function."""

    def __init__(self, func: Callable[..., Any], name: str) -> None:
        self.func = func
        self.__name__ = name

    def identity(self) -> Any:
        return type(self), self.func

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wrapped) and other.identity() == self.identity()

    def __hash__(self) -> int:
        return hash(self.identity())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)


class OutOfPlace(_Wrapped):
    """An in-place call recorded as one that returns a new tensor: `x.mul_(y)` as `x = mul(x, y)`.

    The caller's later reads of x get the new node, so order and aliasing need no care further on.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        super().__init__(func, short_name(func).rstrip("_"))

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = x.clone()
        self.func(x, *args, **kwargs)
        return x


class Opaque(_Wrapped):
    """A function, or a subclass of autograd.Function, recorded as one node and not looked into."""

    without_data: Callable[..., Any]  # set where a user's rule has a fake

    def __init__(
        self, func: Any, name: str, fake: Callable[..., Any] | None = None, form: str = ""
    ) -> None:
        super().__init__(func, name)
        if fake is not None:
            self.without_data = fake
        self.form = form  # which attention entry point it is
        self.single = True  # whether that gave one tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = function_apply(self.func) if isinstance(self.func, type) else self.func
        result = call(*args, **kwargs)
        if self.form and isinstance(result, tuple) is self.single:
            raise CaptureError(
                f"{self.__name__} gives a {type(result).__name__}.",
                where=self.form,
                have="a tensor in the trace" if self.single else "a tuple in the trace",
                why="this release of the library differs from those that autosp knows",
                fix="wrap the call in a function of your own and register it: "
                "autosp.register_rule(fn, ...)",
            )
        return result


class UnderAutocast(_Wrapped):
    """A call made where the model itself switches autocast, with the state it was made in."""

    def __init__(self, func: Callable[..., Any], device_type: str, state: tuple[bool, Any]) -> None:
        super().__init__(func, short_name(func))
        self.device_type, self.state = device_type, state

    def identity(self) -> Any:
        return type(self), self.func, self.device_type, self.state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        enabled, dtype = self.state
        with torch.autocast(self.device_type, enabled=enabled, dtype=dtype):
            return self.func(*args, **kwargs)


def draws(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], aten_ops: tuple[Any, ...]
) -> bool:
    """Whether a call draws random numbers; ATen tags attention as random whatever its dropout."""
    if short_name(func) == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in aten_ops)


def plain_target(func: Callable[..., Any]) -> Callable[..., Any]:
    """Property getters (`x.mT`) are method-wrappers; rules know the named functions behind them."""
    if getattr(func, "__name__", "") != "__get__":
        return func
    return _PROPERTIES.get(short_name(func), func)


def _transpose_last(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-2, -1)


def _reverse_dims(x: torch.Tensor) -> torch.Tensor:
    return x.permute(*range(x.dim() - 1, -1, -1))


_transpose_last.__name__ = "mT"
_reverse_dims.__name__ = "T"
_PROPERTIES: dict[str, Callable[..., Any]] = {
    "data": torch.Tensor.detach,
    "mT": _transpose_last,
    "T": _reverse_dims,
    "real": torch.real,
    "imag": torch.imag,
}
