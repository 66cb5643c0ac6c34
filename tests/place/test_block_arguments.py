"""Layers that do not do the same are no equal blocks, whatever their arguments look like: neither
`repr` nor `==` of an argument tells that two calls do the same."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosp_dtensor as autosp
from autosp_dtensor.graph import exact
from tests.compare import assert_same_as_one_device
from tests.pool import Rank, run_on_ranks
from tests.simulate import assert_program_equals_whole
from tests.user_rules import rules_are_put_back

__all__ = ["rules_are_put_back"]

WIDTH, LENGTH = 8, 9
INT: Any = np.int64  # torch takes it, its annotations do not
SINGLE: Any = np.float32
IDS = torch.stack([torch.arange(LENGTH) % 16, (torch.arange(LENGTH) * 5 + 3) % 16])


class Silent:
    """Shows nothing of what it holds."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Silent()"


@dataclass(frozen=True)
class Unshown:
    factor: float = field(repr=False)


@dataclass(frozen=True)
class Uncompared:
    factor: float = field(compare=False)


class Named(NamedTuple):
    factor: float


class Long:
    """Stands for arrays: their text leaves the middle out."""

    @staticmethod
    def of(factor: float) -> Any:
        values = np.zeros(3000)
        values[1500] = factor
        return values


class Kind(enum.StrEnum):
    exact, tanh = "none", "tanh"


class Last(enum.IntEnum):
    dim = -1


def _factor(config: Any) -> float:
    return float(config[1500]) if isinstance(config, np.ndarray) else config.factor


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, config: Any) -> Tensor:
        ctx.factor = _factor(config)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def scaled(x: Tensor, config: Any) -> Tensor:
    return x * _factor(config)


class Layer(nn.Module):
    def __init__(self, call: Callable[[Tensor, float], Tensor], factor: float) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.call, self.factor = call, factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.out(x), self.factor)


class Apart(nn.Module):
    """Three layers; the second differs in one number."""

    def __init__(self, call: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(call, factor) for factor in (2.0, 3.0, 2.0))

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return (x * torch.arange(LENGTH)[:, None]).pow(2).sum(), x


ALIKE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "number": lambda x, c: x * 2.0,
    "list of tensors": lambda x, c: torch.cat([-x, x], -1)[..., :WIDTH],
    "list of numbers": lambda x, c: x.sum([-1], keepdim=True),
    "tuple": lambda x, c: x.transpose(*(1, 2)).permute((0, 2, 1)),
    "size": lambda x, c: x.reshape(torch.Size([*x.shape[:2], 2, 4])).reshape(x.shape),
    "slices": lambda x, c: F.pad(x[:, :, ..., None, 1:, None][..., 0].squeeze(2), [1, 0]),
    "dtype": lambda x, c: x.to(torch.float32, memory_format=torch.preserve_format).double(),
    "named": lambda x, c: F.gelu(input=x, approximate="tanh"),
    "several results": lambda x, c: torch.cat(x.split([3, 5], dim=-1), -1),
}


@pytest.mark.parametrize("call", ALIKE.values(), ids=ALIKE)
def test_layers_with_equal_arguments_are_one_block(call: Callable[..., Tensor]) -> None:
    """Else each layer would be placed and compiled on its own, and the time grow with them."""
    root = assert_program_equals_whole(Apart(call), (IDS,), 2).root
    paths = {path: region for path, region in root.walk() if path.startswith("layers.")}
    assert len(paths) == 3 and len(set(map(id, paths.values()))) == 1


CONFIGS = {"silent": Silent, "unshown": Unshown, "uncompared": Uncompared, "named": Named,
           "long": Long.of}  # fmt: skip
NUMBERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "numpy float": lambda x, c: x / np.sqrt(c),
    "numpy single": lambda x, c: x * SINGLE(c),
    "signed zero": lambda x, c: torch.copysign(x, torch.tensor(0.0) if c > 2 else -0.0),
    "numpy zero": lambda x, c: torch.clamp(x, min=np.float64(-0.0 if c > 2 else -1.0)),
    "numpy slice": lambda x, c: F.pad(x[..., : INT(c)], (0, WIDTH - int(c))),
    "numpy dim": lambda x, c: x.softmax(INT(-1)) * c,
    "numpy dims": lambda x, c: x.sum((INT(-1),), keepdim=True) * c,
    "numpy size": lambda x, c: x.reshape(2, INT(LENGTH), WIDTH) * c,
    "text enum": lambda x, c: F.gelu(x, approximate=Kind.tanh if c > 2 else Kind.exact),
    "number enum": lambda x, c: x.softmax(Last.dim) * c,
}


def with_config(config: Callable[[float], Any], *, function: bool) -> Callable[..., Tensor]:
    if function:
        autosp.register_rule(Scaled, "b s d -> b s d")
        return lambda x, factor: Scaled.apply(x, config(factor))  # type: ignore[return-value]
    registered = autosp.register_rule(scaled, "b s d -> b s d")
    return lambda x, factor: registered(x, config(factor))


@pytest.mark.parametrize("function", [False, True], ids=["registered", "autograd"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tile", [None, 3])
def test_objects_given_to_opaque_calls_are_equal_to_themselves_alone(
    config: Any, function: bool, tile: int | None
) -> None:
    call = with_config(config, function=function)
    assert_program_equals_whole(Apart(call), (IDS,), 2, tile=tile)


def on_ranks(rank: Rank) -> None:
    """The programs as they are written and run, where constants are told apart once more."""
    calls = dict(NUMBERS)
    for name, config in CONFIGS.items():
        for function in (False, True):
            calls[f"{name} {function}"] = with_config(config, function=function)
    for name, call in calls.items():
        try:
            assert_same_as_one_device(
                rank, lambda call=call: Apart(call), {"ids": IDS}, rank.mesh(dp=1, sp=2), tile=3
            )
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.ranks
def test_numbers_of_numpy_enums_and_objects_are_arguments_like_any() -> None:
    run_on_ranks(on_ranks, n=2)


def test_key_of_an_argument_tells_what_text_and_equality_do_not() -> None:
    once = Silent(1.0)
    assert exact([once, slice(1, None)]) == exact([once, slice(1, None)])
    for one, other in [
        (0.0, -0.0), (1, 1.0), (True, 1), ((1,), [1]), (complex(0, 0.0), complex(0, -0.0)),
        (Silent(1.0), Silent(1.0)), (Uncompared(1.0), Uncompared(2.0)),
        (Unshown(1.0), Unshown(2.0)), (Named(1.0), (1.0,)), (slice(0, 1), slice(False, 1)),
        ({"a": 1}, {"a": 2}), ("a", b"a"), (Kind.tanh, "tanh"),
    ]:  # fmt: skip
        assert exact(one) == exact(one), one
        assert exact(one) != exact(other), (one, other)
    assert exact(float("nan")) == exact(float("nan"))
    assert exact(np.float64(0.5)) == exact(np.float64(0.5))
    assert hash(exact({"a": [torch.float32, (once, {})]}))
