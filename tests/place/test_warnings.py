"""What costs memory that nobody asked for is told, once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.simulate import lowered

MIB_1 = 1024  # tokens whose mask of bools takes 1 MiB
Attend = Callable[[Tensor, Tensor], Tensor]


def by_kernel(x: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, mask)


def with_a_window(x: Tensor, mask: Tensor) -> Tensor:
    """The mask is a part of what is made tile by tile."""
    at = torch.arange(x.shape[2])
    return F.scaled_dot_product_attention(x, x, x, mask & (at[:, None] - at < 100))


def by_hand(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x


def capped(x: Tensor, mask: Tensor) -> Tensor:
    return torch.tanh(x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ x


class Layers(nn.Module):
    """Two layers of one attention; `masks` says which mask each takes."""

    def __init__(self, attend: Attend, masks: tuple[int, int] = (0, 0)) -> None:
        super().__init__()
        self.attend, self.masks = attend, masks
        self.table = nn.Embedding(16, 8)
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in masks)

    def forward(self, ids: Tensor, *masks: Tensor) -> Tensor:
        x = self.table(ids)
        for linear, which in zip(self.linears, self.masks, strict=True):
            y = linear(x).unflatten(-1, (4, 2)).transpose(1, 2)
            x = x + self.attend(y, masks[which]).transpose(1, 2).flatten(2)
        return x


def warned(caplog: pytest.LogCaptureFixture, target: Any, *args: Any, n: int = 2) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "autosp_dtensor"):
        lowered(target, args, n)
    return [record.getMessage() for record in caplog.records]


def given(length: int, dtype: torch.dtype = torch.bool) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(1, length, dtype=torch.int64)
    return ids, torch.ones(1, 1, length, length, dtype=dtype)


ATTEND = [by_kernel, with_a_window, by_hand, capped]


@pytest.mark.parametrize("attend", ATTEND, ids=lambda attend: attend.__name__)
def test_mask_that_is_passed_in_is_told_once_with_its_bytes(
    attend: Attend, caplog: pytest.LogCaptureFixture
) -> None:
    """Two layers share it. One token less is less than 1 MiB."""
    (text,) = warned(caplog, Layers(attend), *given(MIB_1))
    assert "test_warnings.py" in text
    assert text.endswith(" takes a mask of 1.0 MiB as it is, whole on every rank")
    assert not warned(caplog, Layers(attend), *given(MIB_1 - 1))


def test_each_of_two_masks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for attend in (by_kernel, with_a_window):
        ids, mask = given(MIB_1)
        assert len(warned(caplog, Layers(attend, (0, 1)), ids, mask, mask[:, :, :, :].clone())) == 2


def test_bytes_are_those_of_the_dtype(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = warned(caplog, Layers(by_kernel), *given(MIB_1, torch.float32))
    assert " 4.0 MiB " in text


def test_masks_that_the_model_makes_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def attend(x: Tensor, documents: Tensor) -> Tensor:
        at = torch.arange(x.shape[2])
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return F.scaled_dot_product_attention(x, x, x, same & (at <= at[:, None]))

    ids, _ = given(MIB_1)
    assert not warned(caplog, Layers(attend), ids, torch.zeros_like(ids))


def causal(x: Tensor, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, is_causal=True)


def test_what_every_rank_gathers_is_told_with_its_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """One row, is_causal, 4 heads on 8 ranks: nothing is left to split it on. 16,384 tokens of 8
    numbers are 0.5 MiB in each of q, k and v."""
    ids = torch.zeros(1, 16384, dtype=torch.int64)
    assert not warned(caplog, Layers(causal), ids, ids, n=4)
    first, *others = warned(caplog, Layers(causal), ids, ids, n=8)
    assert first.startswith("scaled_dot_product_attention at ") and "test_warnings.py" in first
    told = "no dim is left to split it on; every rank gathers 1.5 MiB and computes all of it"
    assert first.endswith(told)
    assert len(others) <= 1  # of the other layer
