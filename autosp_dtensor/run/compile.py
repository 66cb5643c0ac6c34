"""From a canonical graph to regions and what they keep; attention by groups of heads where better.

Groups of heads lower what backward holds where their queries, keys and values are had again in it.
Whether they are follows from the policy, so a program that runs something again is compiled both
ways, and the better one is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph

from ..capture import Captured
from ..checkpoint import (
    Checkpoint,
    Deferred,
    Policy,
    absorb,
    open_inputs,
    tile_free,
    tile_losses,
    tile_run_again,
)
from ..cost import Device
from ..lower import Region, cut_regions, lower
from ..place import LEAST_GROUP, in_groups, place
from ..placement import Placement
from .budget import choose_policy, step_bytes, step_fits

__all__ = ["Compiled", "Options", "Source", "compile_best"]

_GAIN = 0.02  # of a step's bytes: what groups of heads are to lower them by at least
_MORE = 1.05  # of the time that running again takes: what they may take of it


@dataclass(frozen=True)
class Options:
    """What `parallelize` was asked for."""

    seq_dim: int = 1
    check_ranks: bool = True
    checkpoint: str | Checkpoint = "auto"
    memory_budget: int | None = None
    tile: str | int = "auto"
    device: Device | None = None  # that is planned for, if not this one
    offload: str | int = "none"
    host: int = 0  # bytes of host memory for it, the same on all ranks


@dataclass(frozen=True)
class Source:
    """What is compiled, and for what.

    blocks, regions: paths of modules that repeat, and whose calls become regions. checkpointed:
    those that the model checkpoints. placements: of each input that comes split. opened: inputs
    that the program makes of what they are made of.
    """

    captured: Captured
    live: nn.Module | None
    mesh: DeviceMesh
    options: Options
    placements: list[Placement | None]
    blocks: frozenset[str]
    regions: frozenset[str]
    checkpointed: frozenset[str]
    opened: dict[int, Deferred]


@dataclass(frozen=True)
class Compiled:
    """placed, flat: graphs of the whole program. root: its regions. policy: what those keep."""

    placed: Graph
    flat: Graph
    root: Region
    policy: Policy


def compile_best(source: Source, graph: Graph) -> Compiled:
    """graph: the canonical graph, which is placed in place."""
    tile, grad = source.options.tile, torch.is_grad_enabled()
    least = LEAST_GROUP if tile == "auto" else 1
    borders = source.blocks | source.regions
    grouped = None
    if tile != "none" and grad:
        grouped = in_groups(graph, source.mesh.size(), least, borders)
    if grouped is not None and tile != "auto":
        return _compile(source, grouped)
    plain = _compile(source, graph)
    if grouped is None or not plain.policy.choices:
        return plain
    other = _compile(source, grouped)
    return other if _is_better(source, other, plain) else plain


def _is_better(source: Source, grouped: Compiled, plain: Compiled) -> bool:
    """Under "auto" what takes less time, as less room is needed; else what lowers a step's bytes,
    at hardly more time ("full" asks for few bytes)."""
    new, old = grouped.policy, plain.policy
    mode = source.options.checkpoint
    if mode == "auto" and (new.fits or old.fits):
        return (not new.fits, new.seconds) < (not old.fits, old.seconds)
    if mode != "full" and new.seconds > _MORE * old.seconds:
        return False
    sizes = [
        step_bytes(each.root, source.captured, source.live, each.policy)
        for each in (grouped, plain)
    ]
    return sizes[0] < (1 - _GAIN) * sizes[1]


def _compile(source: Source, graph: Graph) -> Compiled:
    captured, live, mesh, options = source.captured, source.live, source.mesh, source.options
    grad = torch.is_grad_enabled()
    written = frozenset(index for origin, index in captured.writes if origin.kind == "buffer")
    placed = place(
        graph,
        mesh.size(),
        source.placements,
        options.seq_dim,
        written,
        source.blocks,
        source.regions,
    )
    flat = lower(
        placed,
        mesh.size(),
        captured.fake_mode,
        whole_border=bool(source.opened),
        by_head=options.device is None,  # else a plan for another device
    )
    moved = absorb(flat, {*source.regions}, {*source.checkpointed}, options.tile)
    root = cut_regions(flat, {*source.regions}, moved)
    open_inputs(root, source.opened)
    tile_free(root, len(captured.template.tensors), options.tile, grad=grad)
    policy = choose_policy(root, captured, live, mesh, options) if grad else Policy()
    if options.tile == "auto" and grad:
        step = root, captured, live, mesh, options
        if tile_losses(root, lambda: not step_fits(*step, policy)):
            policy = choose_policy(*step)
        if tile_run_again(policy):
            policy = choose_policy(*step)
    return Compiled(placed, flat, root, policy)
