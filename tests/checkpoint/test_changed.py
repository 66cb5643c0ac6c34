"""What changes between forward and backward, by the model or by its user; views with a sign."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autosp_dtensor as autosp
from autosp_dtensor.checkpoint import Checkpoint
from autosp_dtensor.errors import UsageError
from tests.checkpoint.test_recompute import asked
from tests.run.one_rank import mesh  # noqa: F401
from tests.run.test_codegen import Ran

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(1))
MODES: dict[str, str | Checkpoint] = {
    "full": "full",
    "sequence": "sequence",
    "products": Checkpoint(("products",)),
    "by name": Checkpoint(("exp",)),
}
Body = Callable[[Any, Tensor], Tensor]


class Blocks(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(16, 8))
        self.blocks = nn.ModuleList(Block(body) for _ in range(2))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear, self.body = nn.Linear(8, 8), [body]
        self.register_buffer("shift", torch.ones(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.body[0](self, x)


def written_after(block: Block, x: Tensor) -> Tensor:
    y = (block.linear(x) + block.shift).exp()
    with torch.no_grad():
        block.shift.mul_(0.5)
    return y


def written_before(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.shift.mul_(0.5).add_(x.mean((0, 1)))
    return (block.linear(x) + block.shift).exp().log1p()


def replaced(block: Block, x: Tensor) -> Tensor:
    y = (block.linear(x) + block.shift).exp()
    block.shift = block.shift * 0.5
    return y


def counted(block: Block, x: Tensor) -> Tensor:
    block.count += 1
    return (block.linear(x) * 0.5 + block.count).sin()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [written_after, written_before, replaced, counted])
def test_buffers_that_forward_writes_are_had_as_they_were(
    body: Body,
    mode: str,
    mesh: DeviceMesh,  # noqa: F811
) -> None:
    """Two forwards before each backward: the second writes what the first has read."""
    reference = Blocks(body)
    model = autosp.parallelize(copy.deepcopy(reference), mesh, checkpoint=MODES[mode])
    for _ in range(2):
        for each in (reference, model):
            first, second = each(IDS), each(IDS)
            for result in (second, first):
                local = result.to_local() if hasattr(result, "to_local") else result
                local.sin().sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


def turned(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


SIGNS: dict[str, Body] = {
    "conjugates": lambda m, x: torch.view_as_real(
        turned(m.linear(x)).conj() * turned(x).conj() * turned(m.linear(x).sin())
    ).flatten(-2),
    "negatives": lambda m, x: (
        turned(m.linear(x)).conj().imag.sin() * turned(m.linear(x)).conj().imag * turned(x).real
    ).repeat(1, 1, 2),
    "a constant turned back": lambda m, x: (
        torch.view_as_real(
            turned(m.linear(x))
            * torch.polar(torch.ones(12, 4), torch.arange(48.0).view(12, 4)).conj()
        )
        .flatten(-2)
        .to(x.dtype)
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SIGNS)
def test_views_that_read_with_another_sign_come_back_so(name: str, mode: str) -> None:
    model = Blocks(SIGNS[name])
    plain, again = (
        Ran(copy.deepcopy(model), (IDS,), 1, policy=p) for p in (None, asked(MODES[mode]))
    )
    for a, b in zip([*plain.results, *plain.grads], [*again.results, *again.grads], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("what", ["parameter", "buffer", "result"])
def test_what_is_changed_before_backward_is_told(
    what: str,
    mesh: DeviceMesh,  # noqa: F811
) -> None:
    """Autograd checks what it saves; with hooks it leaves that to them."""
    mode = "full" if what == "buffer" else Checkpoint(("exp",))
    blocks = Blocks(lambda m, x: (m.linear(x) + m.shift).exp())
    model = autosp.parallelize(blocks, mesh, checkpoint=mode)
    result = model(IDS)
    block: Any = model.blocks[1]
    with torch.no_grad():
        changed = {"parameter": block.linear.weight, "buffer": block.shift}
        changed.get(what, result.to_local()).mul_(2)
    with pytest.raises(UsageError, match="was changed after forward"):
        result.to_local().sum().backward()
