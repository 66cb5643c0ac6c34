"""A small model around a function of (module, x), traced in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosp_dtensor.capture import Captured, capture, read_call
from autosp_dtensor.errors import CaptureError
from tests.simulate import Lowered, assert_program_equals_whole

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    """Embedded tokens [2, 12, 8] through a function of (module, x)."""

    def __init__(self, body: Callable[[Any, Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.body = body
        self.double()

    def forward(self, ids: Tensor) -> Any:
        assert self.body is not None
        return self.body(self, self.embedding(ids))


def same(body: Callable[[Any, Tensor], Any], **options: Any) -> Lowered:
    """On 1, 2 and 3 ranks as on one device."""
    for n in (1, 2, 3):
        program = assert_program_equals_whole(Model(body), (IDS,), n, **options)
    return program


def traced(model: nn.Module, *args: Any) -> Captured:
    return capture(read_call(model, args or (IDS,), {}, lambda t: None))


def refused(body: Callable[[Any, Tensor], Any]) -> str:
    with pytest.raises(CaptureError) as error:
        traced(Model(body))
    return str(error.value)


def line(body: Callable[..., Any], below: int) -> int:
    return body.__code__.co_firstlineno + below
