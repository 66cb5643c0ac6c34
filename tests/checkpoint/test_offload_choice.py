"""What goes to the host: no more than the device's memory asks for, where it is faster than running
again; on several ranks, whose parts differ."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autosp_dtensor.checkpoint import Checkpoint, Policy, moving_inputs, offloading, record
from autosp_dtensor.checkpoint.choose import asked, choice_of, policy_of
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.graph import short_name
from tests.checkpoint.layers import Layer
from tests.checkpoint.test_recompute import model_t, regions
from tests.checkpoint.test_uneven import BODIES, Blocks
from tests.model_t import ids_of_t
from tests.run.test_codegen import Ran, assert_ranks_give_the_whole
from tests.simulate import Lowered, lowered

CPU, A100 = DEVICES["cpu"], DEVICES["a100-80gb"]
IDS = ids_of_t(2, 13)
LARGE = 1 << 50


def offloaded(mode: str | Checkpoint, budget: int | None = None) -> Callable[[Lowered], Policy]:
    def choose(program: Lowered) -> Policy:
        inputs = moving_inputs(program.root, record(program.root))
        return offloading(regions(program), mode, CPU, budget, LARGE, inputs)

    return choose


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("mode", ["none", "full", "sequence", Checkpoint(("exchanges",))], ids=str)
def test_gradients_on_ranks_are_those_of_one_device(mode: str | Checkpoint, n: int) -> None:
    assert_ranks_give_the_whole(model_t(layers=4), (IDS, IDS), n, offloaded(mode))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("mode", ["full", "sequence"])
def test_uneven_ranks_meet_in_what_runs_again_and_are_bit_equal(name: str, mode: str) -> None:
    model, n = Blocks(BODIES[name]), 3
    plain = Ran(copy.deepcopy(model), (IDS % 16,), n, policy=lambda p: asked_of(p, mode))
    moved = Ran(copy.deepcopy(model), (IDS % 16,), n, policy=offloaded(mode))
    for a, b in zip([*plain.results, *plain.grads], [*moved.results, *moved.grads], strict=True):
        assert torch.equal(a, b)
    assert plain.calls == moved.calls


def asked_of(program: Lowered, mode: str) -> Policy:
    return policy_of(regions(program), mode, CPU)


class Stack(nn.Module):
    """Layers of an 8B model between an embedding and a sum."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        for layer in self.layers:
            y = layer(y)
        return y.float().sum()


class Planned:
    """A stack on one of eight A100s, its budget in layers' inputs."""

    def __init__(self, length: int, layers: int = 8) -> None:
        x = torch.empty(1, length, 4096, dtype=torch.bfloat16, requires_grad=True)
        program = lowered(Stack(layers), (x,), 8)
        self.counts = regions(program)
        self.inputs = moving_inputs(program.root, record(program.root))
        ((self.region, self.count),) = self.counts.items()
        self.found = record(self.region)
        (self.input,) = self.inputs[self.region].values()

    def choose(self, budget: int | None, room: int = LARGE, **device: Any) -> Policy:
        each = replace(A100, **device)
        return offloading(self.counts, "auto", each, budget, room, self.inputs)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return Planned(131_072)


def test_the_input_of_each_region_may_move_once(planned: Planned) -> None:
    assert planned.input == 131_072 // 8 * 4096 * 2
    assert planned.count == 8


def test_nothing_moves_where_all_fits(planned: Planned) -> None:
    whole = asked(planned.found, "none", A100).bytes + planned.input
    policy = planned.choose(whole * planned.count)
    assert not policy.choices and not policy.moves


def test_inputs_leave_when_nothing_else_is_left(planned: Planned) -> None:
    """To a host too slow to be worth it for anything that can be had again."""
    policy = planned.choose(4 * planned.input, host=1.0)
    choice = policy.choices[planned.region]
    assert choice.moved == planned.input and choice.inside == 0


def test_all_that_is_in_the_budget_stays(planned: Planned) -> None:
    """With inputs that fit and a slow host, the choice is that of a run without offload."""
    budget = planned.count * (planned.input * 2)
    with_host = planned.choose(budget, host=1.0)
    without = policy_of(planned.counts, "auto", A100, budget - planned.count * planned.input)
    assert with_host.choices[planned.region].keep == without.choices[planned.region].keep
    assert not with_host.moves


def test_what_is_faster_to_fetch_than_to_run_again_moves() -> None:
    """Attention at a million tokens takes far longer than its copy."""
    planned = Planned(1_048_576)
    budget = 6 * planned.input
    policy = planned.choose(budget)
    choice = policy.choices[planned.region]
    names = {short_name(planned.found.nodes[k].target) for k in choice.moves}
    assert "scaled_dot_product_attention" in names
    least = choice_of(planned.found, (), A100).seconds
    assert choice.seconds < least / 2
    on_device = (choice.bytes + planned.input - choice.moved) * planned.count + 2 * choice.moved
    assert on_device <= budget


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_host_is_no_more_than_filled(planned: Planned, share: float) -> None:
    host = int(planned.count * 3 * planned.input * share)
    choice = planned.choose(6 * planned.input, host).choices[planned.region]
    kept = choice.inside * planned.count
    assert kept <= max(0, host - planned.count * planned.input)


def test_more_host_memory_never_takes_longer(planned: Planned) -> None:
    last = float("inf")
    for layers in range(0, 60, 6):
        policy = planned.choose(6 * planned.input, 1 + layers * planned.input)
        seconds = policy.choices[planned.region].seconds
        assert seconds <= last
        last = seconds


def test_what_several_regions_get_stays() -> None:
    """Rotary tables: their memory is there as long as any region needs it."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.mixes = nn.ModuleList(Mix() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            table = x.sin()
            for mix in self.mixes:
                x = mix(x * 2, table)
            return x

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (self.linear(x) * table).tanh()

    program = lowered(Rotated(), (torch.randn(2, 8, 8, requires_grad=True),), 2)
    inputs = moving_inputs(program.root, record(program.root))
    assert all(len([k for k, size in each.items() if size]) == 1 for each in inputs.values())
    assert sum(count for count in regions(program).values()) == 3
