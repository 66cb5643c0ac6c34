"""One call of an operation with the dims on which it may be split, and tensors for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosp_dtensor.capture.bypass import active_recorder


@dataclass(frozen=True)
class Case:
    """drawn: results are random or uninitialized, only shapes and dtypes can be compared.
    canonical: the operation is one that the canonical form brings in. empty: torch takes parts
    without elements.
    """

    call: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    dims: str
    drawn: bool = False
    canonical: bool = False
    empty: bool = True

    def terms(self) -> list[str]:
        return [term.strip() for term in self.dims.split(",")]


def _generator(shape: tuple[int, ...]) -> torch.Generator:
    return torch.Generator().manual_seed(sum((k + 1) * s for k, s in enumerate(shape)) + 1)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator(shape), dtype=torch.float64)


def u(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator(shape), dtype=torch.float64)


def i(*shape: int, high: int = 4) -> Tensor:
    return torch.randint(high, shape, generator=_generator(shape))


def b(*shape: int) -> Tensor:
    return f(*shape) > 0


def c(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape).flip(-1))


def written(call: Callable[..., Any]) -> Callable[..., Any]:
    """An in-place call on a tensor of its own, since inputs may not be written to."""
    return lambda x, *more: call(x.clone(), *more)


def stored(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


def drawn(call: Callable[..., Any], *tensors: Tensor, dims: str) -> list[Case]:
    return [Case(call, tensors, dims, drawn=True)]


ONE = (f(4, 8, 6),)
ALL = "xxx"


def same(call: Callable[..., Any], *tensors: Tensor) -> list[Case]:
    """Local on all dims of every tensor."""
    tensors = tensors or ONE
    return [Case(call, tensors, ",".join("x" * t.dim() for t in tensors))]


def own(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function of the package's own, recorded as one call."""

    def call(*tensors: Tensor) -> Any:
        recorder = active_recorder()
        run = function if recorder is None else functools.partial(recorder.call, function)
        return run(*tensors, **options) if recorder is None else run(tensors, options)

    return call
