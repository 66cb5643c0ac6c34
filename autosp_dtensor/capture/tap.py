"""Hooks that users put on modules: run at every call, on DTensors, between the operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .._torch import user_hooks
from ..errors import UsageError
from ..tree import Spec, flatten, unflatten

__all__ = ["Tap", "tapped"]


_TENSOR = object()  # stands for a tensor among a tap's leaves


def _emptied(leaves: list[Any], spec: Spec) -> tuple[list[Any], Spec]:
    empty = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return (empty, spec) if not spec else flatten(unflatten(spec, empty))


def _structure(spec: Spec) -> str:
    """`tuple(., dict(.))`: kinds of containers, a dot for each leaf."""
    if spec[0] == "leaf":
        return "."
    kind = spec[0] if isinstance(spec[0], str) else spec[0].__name__
    return f"{kind}({', '.join(_structure(child) for child in spec[2])})"


class Tap:
    """Runs a module's own forward-pre hooks ("before") or forward hooks ("after") on given values.

    Tensors in, tensors out, one for one: those of the module's arguments ("before") or of its
    result ("after"; the arguments come along to be shown).
    """

    def __init__(
        self,
        path: str,
        when: str,
        call: Spec,
        call_leaves: list[Any],
        result: Spec,
        result_leaves: list[Any],
    ):
        self.path, self.when = path, when
        # The graph keeps taps: none of the trace's tensors may live on in them.
        self.call_leaves, self.call = _emptied(call_leaves, call)
        self.result_leaves, self.result = _emptied(result_leaves, result)
        self.__name__ = f"hooks_{when}"

    def given(self) -> int:
        """How many tensors come back."""
        leaves = self.call_leaves if self.when == "before" else self.result_leaves
        return sum(leaf is _TENSOR for leaf in leaves)

    def place(self) -> str:
        """The hook, as errors name it."""
        return f"{self.path}, a forward{'-pre' if self.when == 'before' else ''} hook"

    def run(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the live module's hooks on the result's tensors (if after), then the arguments'."""
        values = iter(tensors)
        result = None
        if self.when == "after":
            result = unflatten(
                self.result,
                [next(values) if x is _TENSOR else x for x in self.result_leaves],
            )
        args, kwargs = unflatten(
            self.call,
            [next(values) if x is _TENSOR else x for x in self.call_leaves],
        )
        if self.when == "before":
            args, kwargs = run_pre_hooks(module, args, kwargs)
            leaves, spec = flatten((args, kwargs))
        else:
            result = run_hooks(module, args, kwargs, result)
            leaves, spec = flatten(result)
        traced = self.call if self.when == "before" else self.result
        if spec != traced:
            raise UsageError(
                f"a hook on {self.path} returned another structure than it was given.",
                where=self.place(),
                have=[f"given {_structure(traced)}", f"returned {_structure(spec)}"],
                why="the program after it was traced with the module's own",
                fix="return a value of the same structure, or None",
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[: self.given()])


def run_pre_hooks(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """nn.Module's own protocol for forward-pre hooks."""
    for hook, with_kwargs in user_hooks(module, "_forward_pre_hooks"):
        given = hook(module, args, kwargs) if with_kwargs else hook(module, args)
        if given is None:
            continue
        if with_kwargs:
            args, kwargs = given
        else:
            args = given if isinstance(given, tuple) else (given,)
    return args, kwargs


def run_hooks(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
    """nn.Module's own protocol for forward hooks."""
    for hook, with_kwargs in user_hooks(module, "_forward_hooks"):
        given = hook(module, args, kwargs, result) if with_kwargs else hook(module, args, result)
        result = result if given is None else given
    return result


def tapped(
    path: str,
    when: str,
    arguments: tuple[Any, Any],
    result: Any,
    record: Callable[[Tap, list[torch.Tensor]], Any],
) -> Any:
    """Record a tap while tracing; gives back the arguments or result with new tensors in them."""
    call_leaves, call = flatten(arguments)
    result_leaves, spec = flatten(result) if when == "after" else ([], ())
    tap = Tap(path, when, call, call_leaves, spec, result_leaves)
    shown = result_leaves + call_leaves
    fresh = iter(record(tap, [leaf for leaf in shown if isinstance(leaf, torch.Tensor)]))
    leaves = result_leaves if when == "after" else call_leaves
    return unflatten(
        spec if when == "after" else call,
        [next(fresh) if isinstance(x, torch.Tensor) else x for x in leaves],
    )
