"""What may be kept for backward on this rank's device, and the policy that follows."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import fsdp_parameters
from ..capture import Captured
from ..checkpoint import (
    Checkpoint,
    Policy,
    Record,
    Stages,
    asked,
    backward_peak,
    moving_inputs,
    offloading,
    policy_of,
    record,
    whole_bytes,
)
from ..cost import DEVICES, Device
from ..graph import arg_nodes, result_nodes
from ..lower import Call, Region

__all__ = ["choose_policy", "device_of", "step_bytes", "step_fits"]

_SHARE = 0.9  # of a device's memory: the allocator's fragments and other libraries take the rest

_SCALARS = 4096  # losses, counts and steps, which nobody counts one by one


class _Options(Protocol):
    @property
    def checkpoint(self) -> str | Checkpoint: ...
    @property
    def memory_budget(self) -> int | None: ...
    @property
    def device(self) -> Device | None: ...
    @property
    def offload(self) -> str | int: ...
    @property
    def host(self) -> int: ...


def choose_policy(
    root: Region, captured: Captured, live: nn.Module | None, mesh: DeviceMesh, options: _Options
) -> Policy:
    """What the regions of a program keep; those that the model checkpoints are left alone."""
    regions = _regions(root, captured)
    device = options.device or device_of(mesh.device_type)
    mode, kind = options.checkpoint, mesh.device_type
    recorded = functools.cache(record)
    inputs: dict[Region, dict[int, int]] = {}
    if options.host:
        inputs = {
            r: each for r, each in moving_inputs(root, recorded(root)).items() if r in regions
        }

    def policy(cut: bool) -> Policy:
        budget = room = None
        if mode == "auto" or options.host:
            again = {}
            if cut:
                start = "full" if mode == "auto" else mode
                again = {
                    region: asked(recorded(region), start, device).stages for region in regions
                }
            room = _room(root, live, kind, options.memory_budget, inputs, recorded, again)
            budget = None if room is None else max(0, room)
        if not options.host or (budget is None and options.offload == "auto"):
            made = policy_of(regions, mode, device, budget, cut=cut, recorded=recorded)
        else:
            made = offloading(
                regions, mode, device, budget, options.host, inputs, cut=cut, recorded=recorded
            )
        return replace(made, fits=made.fits and (room is None or room >= 0))

    if mode != "auto":
        return policy(cut=True)
    chosen = policy(cut=False)
    if chosen.choices:  # stages take time, and leave room to keep more
        chosen = min(chosen, policy(cut=True), key=lambda each: (not each.fits, each.seconds))
    return chosen


def _regions(root: Region, captured: Captured) -> dict[Region, int]:
    """How often each region stands in the program, but for those that the model checkpoints."""
    own = {
        call.region
        for _, region in root.walk()
        for call in region.calls
        if captured.calls[call.number].checkpointed
    }
    counts = Counter(region for _, region in root.walk() if region is not root)
    return {region: count for region, count in counts.items() if region not in own}


def step_fits(
    root: Region,
    captured: Captured,
    live: nn.Module | None,
    mesh: DeviceMesh,
    options: _Options,
    policy: Policy,
) -> bool | None:
    """Whether a step under a policy fits the device, under "auto" with nothing run again.

    None where that is not known: on a CPU without `memory_budget`, and for a function (a loss) that
    is called beside a model of whose memory nothing is known here.
    """
    if live is None and options.memory_budget is None:
        return None
    if policy.choices and (options.checkpoint == "auto" or policy.moves):
        return False
    recorded = functools.cache(record)
    again = {region: choice.stages for region, choice in policy.choices.items()}
    room = _room(root, live, mesh.device_type, options.memory_budget, {}, recorded, again)
    return None if room is None else _kept_bytes(root, captured, policy, recorded) <= room


def step_bytes(root: Region, captured: Captured, live: nn.Module | None, policy: Policy) -> int:
    """What a step holds at its fullest under a policy, as far as it is estimated; of what waits on
    the host, what is passed between regions counts as well."""
    recorded = functools.cache(record)
    again = {region: choice.stages for region, choice in policy.choices.items()}
    return _taken(root, live, recorded, again) + _kept_bytes(root, captured, policy, recorded)


def _kept_bytes(
    root: Region, captured: Captured, policy: Policy, recorded: Callable[[Region], Record]
) -> int:
    """Of all regions together, on the device."""
    kept = 0
    for region, count in _regions(root, captured).items():
        choices = policy.of(region, count)
        kept += sum(n * choice.bytes for n, choice in choices)
        kept += 0 if choices else count * whole_bytes(recorded(region))
    return kept


def device_of(kind: str) -> Device:
    """The preset that is closest to this rank's device."""
    if kind != "cuda" or not torch.cuda.is_available():
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name().lower()
    for preset in ("b200", "h200", "h100"):
        if preset in name:
            return next(d for d in DEVICES.values() if d.name.startswith(preset))
    return DEVICES["a100-80gb"]


def _room(
    root: Region,
    live: nn.Module | None,
    kind: str,
    given: int | None,
    inputs: dict[Region, dict[int, int]],
    recorded: Callable[[Region], Record],
    again: dict[Region, Stages],
) -> int | None:
    """Bytes that regions may keep: the device's, less state, gathered parameters, and what the
    fullest moment of backward takes beside what regions keep. What `inputs` take is theirs. Below
    0: that alone is too much. again: in which stages regions have their values again, if not at
    once.

    None where nothing is known of the device's memory (a CPU).
    """
    if given is None:
        if kind != "cuda":
            return None
        total = torch.cuda.get_device_properties().total_memory
        given = int(total * _SHARE) >> 30 << 30  # ranks must choose alike, and devices differ a bit
    taken = _taken(root, live, recorded, again)
    return given - taken + _passed_bytes(recorded(root), inputs)


def _taken(
    root: Region,
    live: nn.Module | None,
    recorded: Callable[[Region], Record],
    again: dict[Region, Stages],
) -> int:
    """By state, gathered parameters, and the fullest moment of backward."""
    found = {region: recorded(region) for region in dict.fromkeys(r for _, r in root.walk())}
    return _state_bytes(live) + _backward_bytes(root, found, again, *_gathered_bytes(live))


def _passed_bytes(found: Record, inputs: dict[Region, dict[int, int]]) -> int:
    """What regions get from each other, of that which may move: the root's bytes count it."""
    base = {node: found.base.get(k) for k, node in enumerate(found.nodes)}
    total = 0
    for node in found.nodes:
        if isinstance(node.target, Call) and node.target.region in inputs:
            region = node.target.region
            places = [k for k, n in enumerate(region.graph.nodes) if n.op == "placeholder"]
            for k, given in zip(places[len(region.states) :], arg_nodes(node), strict=True):
                maker = base[given]
                if maker is not None and isinstance(found.nodes[maker].target, Call):
                    total += inputs[region].get(k, 0)
    return total


def _backward_bytes(
    root: Region,
    records: dict[Region, Record],
    again: dict[Region, Stages],
    whole: int,
    block: int,
    reduced: int,
) -> int:
    """What backward holds at its fullest beside state and what regions keep.

    whole: parameters that stay gathered. block: those of the largest module that come and go, two
    at a time. reduced: its gradients on their way.
    """
    peaks: dict[Region, int] = {}

    def inside(region: Region) -> int:
        if region not in peaks:
            around = block + reduced  # one more is counted for all moments
            stages = again.get(region)
            peaks[region] = around + backward_peak(records[region], (), inside, stages)
        return peaks[region]

    found = records[root]
    number = {node: k for k, node in enumerate(found.nodes)}
    held = [number[node] for node in result_nodes(found.nodes[-1])]
    return whole + block + _SCALARS + backward_peak(found, held, inside)


def _state_bytes(live: nn.Module | None) -> int:
    """Parameters, gradients, and two moments in fp32 for what is trained (AdamW). Gradients count
    though backward makes them one by one: where they are accumulated, all are there from its start.
    """
    if live is None:
        return 0
    managed = [each for module in live.modules() for each in fsdp_parameters(module)]
    others = {id(tensor): tensor for tensor in [*live.parameters(), *live.buffers()]}
    for each in managed:
        for own in each.tensors:  # where gathered, the module has that in place of its part
            others.pop(id(own), None)
    total = 0
    for tensor in [*(each.part for each in managed), *others.values()]:
        count = -(-tensor.numel() // _shards(tensor))
        total += count * tensor.element_size()
        if tensor.requires_grad:
            total += count * (tensor.element_size() + 8)
    return total


def _shards(tensor: torch.Tensor) -> int:
    """Into how many parts it is split; the same on all ranks, whose own parts differ in size."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _gathered_bytes(live: nn.Module | None) -> tuple[int, int, int]:
    """(the root's own parameters, the largest other module's, its gradients in the dtype that they
    are reduced in), of what FSDP2 manages.
    """
    if live is None:
        return 0, 0, 0
    sizes = [
        (sum(p.gathered for p in managed), sum(p.reduced for p in managed), module is live)
        for module in live.modules()
        if (managed := fsdp_parameters(module))
    ]
    rest = [(gathered, reduced) for gathered, reduced, is_root in sizes if not is_root]
    whole = sum(gathered for gathered, _, is_root in sizes if is_root)
    return whole, max((g for g, _ in rest), default=0), max((r for _, r in rest), default=0)
