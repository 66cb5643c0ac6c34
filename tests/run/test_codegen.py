"""Programs as they really run: generated code, regions and collectives, with ranks as threads.

The other tests interpret the lowered graph (tests/simulate.py); these run what a rank runs, forward
and backward, each rank on a model of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosp_dtensor.checkpoint import Host, Policy
from autosp_dtensor.graph import facts
from autosp_dtensor.lower import Collective
from autosp_dtensor.run.codegen import Link
from autosp_dtensor.run.constants import Constants
from autosp_dtensor.run.program import Program, _Binder
from autosp_dtensor.tree import flatten
from tests.lower.test_regions import IDS, Blocks, Shared
from tests.lower.wire import on_ranks
from tests.model_t import ModelT, TConfig, ids_of_t
from tests.pieces import cut, glue
from tests.place.test_random_programs import Drawn
from tests.simulate import Lowered, lowered


def bound(
    program: Lowered, model: nn.Module, group: Any, rank: int, policy: Policy | None = None
) -> Any:
    """What one rank calls: (seed, inputs) -> local results."""
    made = Program(
        program.captured,
        program.placed,
        program.flat,
        program.root,
        None,  # type: ignore[arg-type]
        model,
        Constants(model),
        policy or Policy(),
    )
    made.host = Host(1 << 30, "cpu") if made.policy.moves else None
    return _Binder(made, Link(group, rank, program.n)).bind(program.root, "")


def weight(index: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)


class Ran:
    """A model run on n threads: results glued, gradients averaged, collectives counted."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Tensor],
        n: int,
        seed: int = 0,
        policy: Callable[[Lowered], Policy] | None = None,
        tile: int | None = None,
    ) -> None:
        own = [copy.deepcopy(model) for _ in range(n)]
        programs = [
            lowered(each, tuple(args), n, tile=tile) for each in own
        ]  # tracing is not for threads
        output = next(node for node in programs[0].flat.nodes if node.op == "output")
        placements = facts(output).placements
        shapes = [meta.shape for meta in facts(output).outs]

        def body(group: Any, rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
            results = bound(
                programs[rank], own[rank], group, rank, policy(programs[rank]) if policy else None
            )(seed, *args)
            losses = [
                (result * cut(weight(k, shapes[k]), placements[k], n)[rank]).sum()
                for k, result in enumerate(results)
                if result.requires_grad
            ]
            if losses:
                torch.stack(losses).sum().backward()
            return [r.detach() for r in results], [p.grad for p in own[rank].parameters()]

        given, self.calls = on_ranks(n, body)
        self.parts = [[results[k] for results, _ in given] for k in range(len(placements))]
        self.results = [glue(p, at) for p, at in zip(self.parts, placements, strict=True)]
        self.grads = [
            sum(torch.zeros_like(p) if g[k] is None else g[k] for _, g in given) / n
            for k, p in enumerate(model.parameters())
        ]
        self.program = programs[0]


def assert_ranks_give_the_whole(
    model: nn.Module,
    args: Sequence[Tensor],
    n: int,
    policy: Callable[[Lowered], Policy] | None = None,
    tile: int | None = None,
) -> Ran:
    ran = Ran(model, args, n, policy=policy, tile=tile)
    reference = copy.deepcopy(model)
    leaves = [leaf for leaf in flatten(reference(*args))[0] if isinstance(leaf, Tensor)]
    want = list({id(leaf): leaf for leaf in leaves}.values())  # a tensor given twice is one result
    for got, each in zip(ran.results, want, strict=True):
        torch.testing.assert_close(got, each.detach())
    losses = [(t * weight(k, t.shape)).sum() for k, t in enumerate(want) if t.requires_grad]
    torch.stack(losses).sum().backward()
    for (name, parameter), got in zip(reference.named_parameters(), ran.grads, strict=True):
        each = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got, each, msg=lambda m, name=name: f"gradient of {name}: {m}")
    return ran


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("attention", ["sdpa", "einsum"])
def test_transformer_on_threads_is_that_of_one_device(attention: str, n: int) -> None:
    ids = ids_of_t(2, 13)
    model = ModelT(TConfig(layers=2, attention=(attention,), qk_norm="hidden"))
    ran = assert_ranks_give_the_whole(model, (ids, ids), n)
    forward = [
        node.target.kind for node in ran.program.nodes()
        if isinstance(node.target, Collective) and node.target.sends
    ]  # fmt: skip
    assert len(ran.calls) == 2 * len(forward)  # each once in backward


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_blocks_on_threads_are_those_of_one_device(checkpointed: bool, n: int) -> None:
    assert_ranks_give_the_whole(Blocks(checkpointed=checkpointed), (IDS,), n)


@pytest.mark.parametrize("what", ["module", "parameter", "constant"])
def test_blocks_that_share_on_threads_are_those_of_one_device(what: str) -> None:
    assert_ranks_give_the_whole(Shared(what), (IDS,), 2)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("seed", range(100, 108))
def test_drawn_program_on_threads_is_that_of_one_device(seed: int, n: int) -> None:
    model = Drawn(seed)
    assert_ranks_give_the_whole(model, (model.ids,), n)


class Noisy(nn.Module):
    """Drops tokens in every block, the first of which is checkpointed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, dtype=torch.float64)
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * 0 + 1
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


class NoisyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.scale, 0.5)


def test_equal_blocks_drop_different_tokens() -> None:
    """0.5^3 of the values are left where each block draws for itself, 0.5 where all draw alike."""
    ids = torch.zeros(4, 64, dtype=torch.int64)
    ran = Ran(Noisy(checkpointed=False), (ids,), 2)
    kept = (ran.results[0] != 0).double().mean().item()
    assert 0.08 < kept < 0.18
    first, second = ran.parts[0]
    assert not torch.equal(first, second)


def test_recomputing_a_block_draws_the_same_numbers() -> None:
    """Its gradient is that of the values it gave. One rank: threads share one default generator."""
    plain = Ran(Noisy(checkpointed=False), (IDS,), 1, seed=5)
    again = Ran(Noisy(checkpointed=True), (IDS,), 1, seed=5)
    torch.testing.assert_close(again.results, plain.results, rtol=0, atol=0)
    torch.testing.assert_close(again.grads, plain.grads)


def test_same_seed_draws_the_same_and_another_one_does_not() -> None:
    """One rank: threads share one default generator."""
    model = Noisy(checkpointed=False)
    one, same, other = (Ran(model, (IDS,), 1, seed).results[0] for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
