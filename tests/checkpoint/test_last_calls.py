"""What does not fit for all layers is kept by the last of them, as many as it fits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autosp_dtensor.checkpoint import (
    Policy,
    Record,
    moving_inputs,
    offloading,
    policy_of,
    record,
)
from autosp_dtensor.checkpoint.choose import asked, choice_of, whole_bytes
from autosp_dtensor.checkpoint.kinds import is_attention
from autosp_dtensor.cost import DEVICES
from autosp_dtensor.explain import explain_program
from autosp_dtensor.lower import Region
from tests.checkpoint.test_offload_choice import Planned
from tests.checkpoint.test_recompute import model_t, regions
from tests.model_t import ids_of_t
from tests.run.test_codegen import Ran
from tests.simulate import Lowered

CPU, A100 = DEVICES["cpu"], DEVICES["a100-80gb"]
IDS = ids_of_t(2, 13)
LAYERS = 4


def kept(policy: Policy, counts: dict[Region, int]) -> int:
    return sum(n * choice.bytes for r in counts for n, choice in policy.of(r, counts[r]))


def within(share: float) -> Callable[[Lowered], Policy]:
    """Of what layers keep beyond "full"."""

    def choose(program: Lowered) -> Policy:
        counts = regions(program)
        whole = sum(whole_bytes(record(r)) * n for r, n in counts.items())
        least = sum(choice_of(record(r), (), CPU).bytes * n for r, n in counts.items())
        policy = policy_of(counts, "auto", CPU, least + int(share * (whole - least)))
        assert policy.last
        return policy

    return choose


def on_the_host(share: float) -> Callable[[Lowered], Policy]:
    """The same on a device that is full, and a host with room for a share."""

    def choose(program: Lowered) -> Policy:
        counts = regions(program)
        inputs = moving_inputs(program.root, record(program.root))
        whole = sum(whole_bytes(record(r)) * n for r, n in counts.items())
        given = sum(sum(each.values()) * counts[r] for r, each in inputs.items())
        fast = DEVICES["b200-180gb"]
        policy = offloading(counts, "auto", fast, int(0.7 * given), int(share * whole), inputs)
        assert policy.last and policy.moves
        return policy

    return choose


@pytest.mark.parametrize(("share", "n"), [(0.1, 1), (0.45, 2), (0.8, 3)])
def test_gradients_are_those_of_a_run_that_keeps_all(share: float, n: int) -> None:
    model = model_t(layers=LAYERS, attention=("sdpa",))
    plain, split = (Ran(model, (IDS, IDS), n, policy=p) for p in (None, within(share)))
    for a, b in zip([*plain.results, *plain.grads], [*split.results, *split.grads], strict=True):
        assert torch.equal(a, b)


def test_gradients_are_the_same_where_some_of_it_waits_on_the_host() -> None:
    model = model_t(layers=LAYERS, attention=("sdpa",))
    plain, split = (Ran(model, (IDS, IDS), 2, policy=p) for p in (None, on_the_host(0.4)))
    for a, b in zip([*plain.results, *plain.grads], [*split.results, *split.grads], strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return Planned(1_048_576, layers=8)


def attention_of(planned: Planned, policy: Policy) -> list[tuple[int, bool]]:
    """(how many layers, whether attention runs again in them), in order."""
    (at,) = (k for k, node in enumerate(planned.found.nodes) if is_attention(node))
    return [(n, at in each.again) for n, each in policy.of(planned.region, planned.count)]


@pytest.mark.parametrize("layers", [1, 3, 7])
def test_attention_is_kept_by_as_many_layers_as_have_room(planned: Planned, layers: int) -> None:
    """At a million tokens it is worth more than all else. One choice for all would run it again."""
    found, count = planned.found, planned.count
    (at,) = (k for k, node in enumerate(found.nodes) if is_attention(node))
    nothing = asked(found, "full", A100)
    more = choice_of(found, nothing.keep | {at}, A100, nothing.stages.cuts).bytes - nothing.bytes
    budget = nothing.bytes * count + int((layers + 0.5) * more)
    policy = policy_of(planned.counts, "auto", A100, budget, cut=True)
    assert attention_of(planned, policy) == [(count - layers, True), (layers, False)]
    assert kept(policy, planned.counts) <= budget
    uniform = choice_of(found, policy.choices[planned.region].keep, A100, nothing.stages.cuts)
    assert policy.seconds < count * uniform.seconds
    assert [policy.of_call(planned.region, k) for k in range(layers)] == [
        policy.of(planned.region, count)[-1][1]
    ] * layers
    assert policy.of_call(planned.region, layers) == policy.choices[planned.region]


def test_no_layer_more_would_have_had_room(planned: Planned) -> None:
    found, count = planned.found, planned.count
    nothing = asked(found, "full", A100)
    whole = whole_bytes(found)
    for k in range(1, 24):
        budget = count * (nothing.bytes + k * (whole - nothing.bytes) // 24)
        policy = policy_of(planned.counts, "auto", A100, budget, cut=True)
        left = budget - kept(policy, planned.counts)
        assert 0 <= left
        if planned.region in policy.last:
            (_, first), (_, more) = policy.of(planned.region, count)
            assert left < more.bytes - first.bytes


def test_the_host_takes_as_many_as_it_has_room_for(planned: Planned) -> None:
    """Two layers' attention beside all inputs; the device, of others as well."""
    (at,) = (k for k, node in enumerate(planned.found.nodes) if is_attention(node))
    out = choice_of(planned.found, (at,), A100).bytes
    host = planned.count * planned.input + int(2.5 * out)
    policy = planned.choose(int(5.5 * planned.input), host)
    each = policy.of(planned.region, planned.count)
    assert sum(n * choice.moved for n, choice in each) <= host
    kept = [(n, choice) for n, choice in each if at not in choice.again]
    assert sum(n for n, choice in kept if choice.inside > 0.9 * out) == 2
    assert sum(n for n, choice in kept if not choice.inside) >= 1
    assert at in each[0][1].again


def explained(planned: Planned, policy: Policy) -> list[str]:
    region, count = planned.region, planned.count
    program = SimpleNamespace(
        mesh=SimpleNamespace(size=lambda: 8), policy=policy, host=None, grad=True,
        root=SimpleNamespace(walk=lambda: [(f"layers.{k}", region) for k in range(count)]),
        nodes=lambda: [(n, count) for n in region.graph.nodes if n.op == "call_function"],
    )  # fmt: skip
    return explain_program(program).splitlines()  # type: ignore[arg-type]


def test_explain_says_which_layers_keep_more_and_adds_them_up(planned: Planned) -> None:
    found, count = planned.found, planned.count
    nothing = asked(found, "full", A100)
    budget = count * nothing.bytes + 3 * planned.input + (planned.input >> 1)
    policy = policy_of(planned.counts, "auto", A100, budget, cut=True)
    lines = explained(planned, policy)
    (said,) = (k for k, line in enumerate(lines) if "as well:" in line)
    last = policy.of(planned.region, count)[-1][0]
    assert lines[said] == f"  the last {last} keep scaled_dot_product_attention as well:"
    assert lines[said + 1].startswith("    keeps ") and "run again" in lines[said + 2]
    each = policy.of(planned.region, count)
    sends = sum(len(choice.again & exchanges(found)) * n for n, choice in each)
    assert any(line.startswith(f"run again in a step: {sends} exchange") for line in lines)


def test_explain_tells_choices_apart_that_do_not_only_keep_more(planned: Planned) -> None:
    """With a host, layers may keep the same in two places, or other values."""
    found, region = planned.found, planned.region
    (at,) = (k for k, node in enumerate(found.nodes) if is_attention(node))
    less, more = (choice_of(found, keep, A100) for keep in ((), (at,)))
    moved = replace(more, moves=frozenset((at,)), moved=more.bytes, inside=more.bytes)
    policy = Policy("auto", {region: more}, A100, last={region: ((2, moved), (1, less))})
    lines = explained(planned, policy)
    assert "  2 before those keep the same elsewhere:" in lines
    assert "  the last 1 keep other values:" in lines


def exchanges(found: Record) -> frozenset[int]:
    return frozenset(
        k for k, node in enumerate(found.nodes) if getattr(node.target, "kind", "") == "all_to_all"
    )
