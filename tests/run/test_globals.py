"""Python values of the module that forward stands in: what is changed is noticed."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from autosp_dtensor.capture import capture, read_call
from autosp_dtensor.tree import flatten


@dataclass
class Config:
    scale: float = 2.0


NUMBER = 2.0
TABLE: dict[str, Any] = {"scale": 2.0, "inner": {"scale": 2.0}}
ROWS = [2.0]
SPACE = types.SimpleNamespace(scale=2.0)
CONFIG = Config()


def helper(x: Tensor) -> Tensor:
    return x * NUMBER


class Reads(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        match self.what:
            case "number":
                return x * NUMBER
            case "helper":
                return helper(x)
            case "method":
                return self._scaled(x)
            case "dict":
                return x * TABLE["scale"]
            case "inner":
                return x * TABLE["inner"]["scale"]
            case "list":
                return x * ROWS[0]
            case "namespace":
                return x * SPACE.scale
        return x * CONFIG.scale

    def _scaled(self, x: Tensor) -> Tensor:
        return x * NUMBER


def set_number() -> None:
    globals()["NUMBER"] = 3.0


CHANGES: dict[str, Callable[[], Any]] = {
    "number": set_number,
    "helper": set_number,
    "method": set_number,
    "dict": lambda: TABLE.update(scale=3.0),
    "inner": lambda: TABLE["inner"].update(scale=3.0),
    "list": lambda: ROWS.__setitem__(0, 3.0),
    "namespace": lambda: setattr(SPACE, "scale", 3.0),
    "config": lambda: setattr(CONFIG, "scale", 3.0),
}


@pytest.fixture(autouse=True)
def put_back() -> Any:
    yield
    globals()["NUMBER"] = 2.0
    TABLE.update(scale=2.0, inner={"scale": 2.0})
    ROWS[0] = SPACE.scale = CONFIG.scale = 2.0


@pytest.mark.parametrize("what", CHANGES)
def test_program_is_not_used_once_a_value_has_changed(what: str) -> None:
    watch = capture(read_call(Reads(what), (torch.ones(2, 4),), {}, lambda t: None)).watch
    assert watch.holds()
    CHANGES[what]()
    assert not watch.holds()


def by_global(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < NUMBER


def by_table(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < TABLE["scale"]


def by_object(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < CONFIG.scale


@pytest.mark.parametrize(
    ("mod", "what"), [(by_global, "number"), (by_table, "dict"), (by_object, "config")]
)
def test_block_mask_whose_mod_reads_another_value_is_another(mod: Any, what: str) -> None:
    """The code is the same; what it reads in its module is part of what it means."""
    specs = []
    for change in (None, None, CHANGES[what]):
        if change is not None:
            change()
        specs.append(flatten(create_block_mask(mod, None, None, 8, 8, device="cpu"))[1])
    assert specs[0] == specs[1] and specs[0] != specs[2]
