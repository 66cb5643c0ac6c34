"""Regions: blocks and other modules that are really called, cut out of the lowered graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autosp_dtensor.graph import facts
from autosp_dtensor.lower import cut_regions
from tests.pieces import glue
from tests.simulate import Ranks, assert_program_equals_whole, lowered

IDS = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self, length: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.position = nn.Parameter(torch.randn(1, length, 8))

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.cumsum(1)) + self.position, x.mean(1) * table[0].cos()


class Blocks(nn.Module):
    """Blocks with a parameter over the sequence, a table from outside, and two results."""

    def __init__(self, same: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.same, self.checkpointed = same, checkpointed
        self.double()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        table = torch.arange(12, dtype=x.dtype)[:, None] * torch.arange(8, dtype=x.dtype)
        kept = []
        for k, block in enumerate(self.blocks):
            if k == 1 and not self.same:
                x = x.softmax(-1)
            if self.checkpointed:
                x, pooled = checkpoint(block, x, table, use_reentrant=False)
            else:
                x, pooled = block(x, table)
            kept.append(pooled)
        return x, torch.stack(kept)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_blocks_give_what_one_device_gives(n: int, same: bool, checkpointed: bool) -> None:
    program = assert_program_equals_whole(Blocks(same, checkpointed), (IDS,), n)
    assert len(program.root.calls) == 3


def test_equal_blocks_are_one_region_with_several_calls() -> None:
    program = assert_program_equals_whole(Blocks(), (IDS,), 3)
    calls = program.root.calls
    assert [call.path for call in calls] == ["blocks.0", "blocks.1", "blocks.2"]
    assert calls[1].region is calls[2].region
    assert calls[0].region is not calls[1].region  # the first takes its input split by tokens
    origins = {origin.module for origin in calls[0].region.states}
    assert origins == {"", "linear"}  # relative to the block


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0, 1, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
        return x * (at * self.frequencies).cos()


CONSTANT = torch.linspace(1, 2, 8, dtype=torch.float64)


class Sharing(nn.Module):
    """A block that uses tensors and modules of others, after operations of its own."""

    def __init__(self, what: str, shared: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.what = what
        if what == "module":
            self.rotary = shared.rotary
        self.outside = [shared]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.exp())
        (shared,) = self.outside
        if self.what == "module":
            return self.rotary(x)
        if self.what == "module of the model":
            return shared.rotary(x)
        if self.what == "parameter":
            return x * shared.scale
        if self.what == "constant":
            return (x * CONSTANT).exp() / CONSTANT.sum()
        return F.linear(x, shared.embedding.weight) @ shared.embedding.weight


class Shared(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        self.rotary = Rotary()
        self.scale = nn.Parameter(torch.rand(8, dtype=torch.float64))
        self.blocks = nn.ModuleList(Sharing(what, self) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * 0.1
        for block in self.blocks:
            x = x + block(x) * 0.1
        return x


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "what", ["module", "module of the model", "parameter", "constant", "embedding"]
)
def test_blocks_may_use_what_is_not_theirs(what: str, n: int) -> None:
    model = Shared(what)
    for block in model.blocks:  # deepcopy would make a model for each block
        block.outside[0] = model
    assert_program_equals_whole(model, (IDS,), n)


def test_each_path_given_becomes_a_region_and_all_nodes_stay() -> None:
    model = Blocks()
    program = lowered(model, (IDS,), 2)
    for paths in (set(), {"embedding"}, {"blocks.0.linear", "blocks.1.linear", "embedding"}):
        root = cut_regions(program.flat, paths)
        given = Ranks(2, program.state).run(root, [[IDS, IDS]])
        placements = facts(next(n for n in program.flat.nodes if n.op == "output")).placements
        for parts, placement, want in zip(given, placements, model(IDS), strict=True):
            torch.testing.assert_close(glue(parts, placement), want)


def test_module_called_twice_is_two_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
            self.blocks = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64)])

        def forward(self, ids: Tensor) -> Tensor:
            (block,) = self.blocks
            return block(block(self.embedding(ids)).cumsum(1))

    program = assert_program_equals_whole(Twice(), (IDS,), 2)
    assert [call.path for call in program.root.calls] == ["blocks.0", "blocks.0"]
