"""autograd.Function: one opaque node with its own backward, however it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from autosp_dtensor import CaptureError
from tests.simulate import assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.body = body
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.linear(self.embedding(ids))) * 1


# Each backward is not that of its forward, so that a forward traced through would be noticed.


class Same(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class View(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(-1).view(x.shape)


class Several(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total, (most, index) = x.sum(-1), x.max(-1)
        ctx.mark_non_differentiable(total, index)
        return total, most, index

    @staticmethod
    def backward(ctx: Any, _total: Tensor, most: Tensor, _index: Tensor) -> Tensor:
        return most.unsqueeze(-1).expand(*most.shape, 8)


class SetUp(Function):
    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor * 3, None


class Inherited(SetUp):
    pass


class Nested(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return SetUp.apply(x, 3.0) + 1


class Recursive(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        return Recursive.apply(x * 2, times - 1) if times else x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 9, None


class OwnApply(Recursive):
    @classmethod
    def apply(cls, x: Tensor) -> Tensor:
        return super().apply(x, 1.5)

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        return x * factor


def _several(x: Tensor, apply: Callable[..., Any]) -> Tensor:
    total, most, index = apply(x)
    return total * most + index


def _no_grad(x: Tensor, apply: Callable[..., Any]) -> Tensor:
    with torch.no_grad():
        factor = apply(x)
    return factor * x


CASES = [
    (Same, lambda x, apply: apply(x)),
    (View, lambda x, apply: apply(x)),
    (Several, _several),
    (SetUp, lambda x, apply: apply(x)),
    (SetUp, lambda x, apply: apply(x, 3.0)),
    (SetUp, _no_grad),
    (Inherited, lambda x, apply: apply(x)),
    (Nested, lambda x, apply: apply(x)),
    (Recursive, lambda x, apply: apply(x, 2)),
    (OwnApply, lambda x, apply: apply(x)),
]
KEPT = {cls: cls.apply for cls, _ in CASES}  # long before a trace, as most code does


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("cls", "body"), CASES)
def test_function_is_one_node_with_its_backward(cls: Any, body: Any, kept: bool) -> None:
    before = dict(cls.__dict__)
    model = Model(lambda x: body(x, KEPT[cls] if kept else cls.apply))
    program = assert_program_equals_whole(model, (IDS,), 1)
    names = [getattr(n.target, "__name__", "") for n in program.captured.graph.nodes]
    assert names.count(cls.__name__) == 1
    assert dict(cls.__dict__) == before


class Marked(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Unmarked(Same):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(2).clone()


@pytest.mark.parametrize("cls", [Marked, Unmarked])
@pytest.mark.parametrize("kept", [False, True])
def test_function_that_writes_to_its_argument_is_refused_with_this_text(
    cls: Any, kept: bool
) -> None:
    apply = cls.apply
    with pytest.raises(CaptureError) as error:
        lowered(Model(lambda x: apply(x) if kept else cls.apply(x)), (IDS,), 1)
    text = str(error.value).splitlines()
    assert text[0].startswith(f"{cls.__name__} changes an argument in place.")
    assert text[-1] == "  fix   return a new tensor from it, and use that"
