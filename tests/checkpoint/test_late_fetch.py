"""What waits on the host is fetched as late in the backward of the region after it as there is time
for: until then the device holds one region's values, not two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autosp_dtensor.checkpoint import Frame, Host, Policy, moving_inputs, offloading, record
from autosp_dtensor.checkpoint import offload as offloads
from autosp_dtensor.checkpoint.cost import seconds_of
from autosp_dtensor.checkpoint.cuts import lower_cuts
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.checkpoint.stages import cut_places, staged
from autosp_dtensor.cost import DEVICES, seconds_to_copy
from tests.checkpoint.test_offload_choice import Planned
from tests.checkpoint.test_stages import BODIES, IDS, Model, all_cuts, regions  # noqa: F401
from tests.run.test_codegen import Ran
from tests.simulate import Lowered

CPU, A100 = DEVICES["cpu"], DEVICES["a100-80gb"]


def fetched_in(stage: int) -> Callable[[Lowered], Policy]:
    """All inputs wait on the host, and come back in a stage, or in the last one before it."""

    def choose(program: Lowered) -> Policy:
        inputs = moving_inputs(program.root, record(program.root))
        policy = offloading(regions(program), "full", CPU, None, 1 << 50, inputs)
        assert all(choice.moves for choice in policy.choices.values())
        choices = {
            region: replace(choice, fetch=min(stage, len(choice.stages.each) - 1))
            for region, choice in policy.choices.items()
        }
        return replace(policy, choices=choices)

    return choose


@pytest.mark.parametrize(
    ("name", "stage", "n"),
    [
        ("plain", 0, 1),
        ("plain", 2, 2),
        ("gated", 1, 2),
        ("twice", 2, 2),
        ("twice", 4, 1),
        ("difference", 3, 2),
        ("parallel", 1, 1),
        ("nothing_after", 1, 2),
    ],
)
@pytest.mark.usefixtures("all_cuts")
def test_in_whichever_stage_gradients_are_those_of_a_run_that_keeps_all(
    name: str, stage: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host] = []
    make = Host.__init__

    def made(self: Host, *args: int | str) -> None:
        make(self, *args)  # type: ignore[arg-type]
        hosts.append(self)

    monkeypatch.setattr(Host, "__init__", made)
    model = Model(BODIES[name])
    kept, moved = (Ran(model, (IDS,), n, policy=p) for p in (None, fetched_in(stage)))
    for a, b in zip([*kept.results, *kept.grads], [*moved.results, *moved.grads], strict=True):
        assert torch.equal(a, b)
    assert len(hosts) == n
    for host in hosts:
        assert host.ahead and not host.late and not host.now


@pytest.mark.usefixtures("all_cuts")
def test_the_fetch_begins_when_backward_comes_to_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[tuple[int, int]] = []
    reach = Frame._reach

    def noted(self: Frame, stage: int) -> None:
        assert self.host is not None
        before = self.host.ahead
        reach(self, stage)
        reached.extend([(stage, self.recompute.fetch)] * (self.host.ahead - before))

    monkeypatch.setattr(Frame, "_reach", noted)
    Ran(Model(BODIES["plain"]), (IDS,), 2, policy=fetched_in(2))
    assert reached == [(2, 2)] * 2  # on each rank


@pytest.fixture(scope="module")
def long() -> Planned:
    return Planned(1_048_576)


def test_the_stage_leaves_time_for_the_copy(long: Planned) -> None:
    """A layer's input comes back while the projections before attention have their backward; from a
    slow host, at the start."""
    budget = 4 * long.input
    found = long.found
    last = max(k for k, node in enumerate(found.nodes) if is_attention(node))
    choice = long.choose(budget, 8 * long.input).choices[long.region]
    assert choice.moved == long.input and choice.fetch > choice.stages.of[last]
    rest = [k for k, of in enumerate(choice.stages.of) if of >= choice.fetch]
    took = sum(2 * seconds_of(found.nodes[k], A100) for k in rest)
    assert seconds_to_copy(choice.moved, A100) <= took + choice.seconds
    slow = long.choose(budget, 8 * long.input, host=A100.host / 1000)
    assert slow.choices[long.region].fetch == 0


def test_what_comes_late_is_not_counted_at_the_fullest_moment(long: Planned) -> None:
    """With inputs alone on the device and one of them in use, not two."""
    found = long.found
    cuts = lower_cuts(found, frozenset(), A100)
    assert cuts and staged(found, frozenset(), cut_places(found)).cuts
    plan = offloads._Plan(
        {long.region: found}, long.counts, A100, 1 << 50, long.inputs,
        {long.region: offloads.least(found, A100, cut=True)},
    )  # fmt: skip
    plan.shed(0)
    (part,) = plan.parts
    choice = part.choice
    assert choice.fetch and plan.on_device() == choice.bytes * long.count + choice.moved
    at_once = [replace(part, choice=replace(choice, fetch=0))]
    assert plan.on_device(at_once) == choice.bytes * long.count + 2 * choice.moved
