"""What may be kept for backward on this rank's device, and the policy that follows."""

from __future__ import annotations

import math
from collections import Counter
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import fsdp_policy
from ..capture import Captured
from ..checkpoint import (
    DEVICES,
    Checkpoint,
    Device,
    Policy,
    Record,
    Tile,
    moving_inputs,
    offloading,
    policy_of,
    record,
    whole_bytes,
)
from ..graph import arg_nodes, result_nodes
from ..lower import Call, Region

__all__ = ["choose_policy", "device_of"]

_SHARE = 0.9  # of a device's memory: the allocator's fragments and other libraries take the rest


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
    own = {
        call.region
        for _, region in root.walk()
        for call in region.calls
        if captured.calls[call.number].checkpointed
    }
    counts = Counter(region for _, region in root.walk() if region is not root)
    regions = {region: count for region, count in counts.items() if region not in own}
    device = options.device or device_of(mesh.device_type)
    inputs: dict[Region, dict[int, int]] = {}
    if options.host:
        inputs = {r: each for r, each in moving_inputs(root, record(root)).items() if r in regions}
    budget = None
    if options.checkpoint == "auto" or options.host:
        budget = _budget(root, live, mesh.device_type, options.memory_budget, inputs)
    if not options.host or (budget is None and options.offload == "auto"):
        return policy_of(regions, options.checkpoint, device, budget)
    return offloading(regions, options.checkpoint, device, budget, options.host, inputs)


def device_of(kind: str) -> Device:
    """The preset that is closest to this rank's device."""
    if kind != "cuda" or not torch.cuda.is_available():
        return DEVICES["cpu"]
    name = torch.cuda.get_device_name().lower()
    for preset in ("b200", "h200", "h100"):
        if preset in name:
            return next(d for d in DEVICES.values() if d.name.startswith(preset))
    return DEVICES["a100-80gb"]


def _budget(
    root: Region,
    live: nn.Module | None,
    kind: str,
    given: int | None,
    inputs: dict[Region, dict[int, int]],
) -> int | None:
    """Bytes that regions may keep: the device's, less state, gathered parameters, temporaries and
    what the root keeps. What `inputs` of regions take is theirs.

    None where nothing is known of the device's memory (a CPU).
    """
    if given is None:
        if kind != "cuda":
            return None
        total = torch.cuda.get_device_properties().total_memory
        given = int(total * _SHARE) >> 30 << 30  # ranks must choose alike, and devices differ a bit
    regions = dict.fromkeys(region for _, region in root.walk())
    found = {region: record(region) for region in regions}
    taken = _state_bytes(live) + _gathered_bytes(live) + _temporary_bytes(root, found)
    passed = _passed_bytes(found[root], inputs)
    return max(0, given - taken - _root_bytes(found[root]) + passed)


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


def _root_bytes(found: Record) -> int:
    """What the root keeps: what its operations save, what regions get from each other, and its
    results, which the caller holds.
    """
    number = {node: k for k, node in enumerate(found.nodes)}
    passed = {k for k, node in enumerate(found.nodes) if isinstance(node.target, Call)}
    given = {found.base.get(number[node]) for node in result_nodes(found.nodes[-1])}
    saved = found.kept_bytes()
    more = {k for k in passed | given if k is not None and found.nodes[k] not in saved}
    return sum(saved.values()) + sum(found.sizes.get(k, 0) for k in more)


def _state_bytes(live: nn.Module | None) -> int:
    """Parameters, gradients, and two moments in fp32 for what is trained (AdamW)."""
    total = 0
    for tensor in [*live.parameters(), *live.buffers()] if live is not None else []:
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


def _gathered_bytes(live: nn.Module | None) -> int:
    """What FSDP2 gathers at one time: the root's own parameters, two other modules, a gradient."""
    if live is None:
        return 0
    managed = [path for path, module in live.named_modules() if fsdp_policy(module) is not None]
    owned = dict.fromkeys(managed, 0)
    for name, parameter in live.named_parameters():
        around = [p for p in managed if not p or name.startswith(f"{p}.")]
        if around:
            owned[max(around, key=len)] += parameter.numel() * 2
    root = owned.pop("", 0)
    rest = sorted(owned.values(), reverse=True)
    return 2 * root + sum(rest[:2]) + sum(rest[:1])


def _temporary_bytes(root: Region, records: dict[Region, Record]) -> int:
    """What backward holds beside what is kept. Of a region: all that it saves, had again, and the
    gradients of its three largest values. Of the root: the gradient of its largest value (logits),
    and of what that was made of, unless the loss goes through it by tiles.
    """
    largest = 0
    for region, found in records.items():
        made = sorted((found.sizes[k] for k, base in found.base.items() if base == k), reverse=True)
        if region is not root:
            largest = max(largest, sum(made[:3]) + whole_bytes(found))
        elif any(isinstance(n.target, Tile) and n.target.sums_once for n in found.nodes):
            largest = max(largest, sum(made[:2]))
        else:
            largest = max(largest, 2 * sum(made[:1]))
    return largest
