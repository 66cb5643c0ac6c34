"""All the stages, in order."""

from __future__ import annotations

import logging
import time
from collections import Counter

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._torch import fsdp_policy
from ..capture import Call, Captured, capture
from ..checkpoint import Host
from ..errors import MeshError, PlacementError
from ..graph import parents
from ..place import canonicalize
from ..place.seeds import find_sequences, seed_inputs
from ..placement import Shard
from .compile import Options, Source, compile_best
from .constants import Constants
from .lazy import openable
from .program import Program
from .rounded import warn_of_rounded
from .traffic import traffic_of

__all__ = ["build", "check_devices", "sequence_length"]

log = logging.getLogger("autosp_dtensor")


def build(call: Call, mesh: DeviceMesh, options: Options, host: Host | None = None) -> Program:
    """capture -> place -> lower -> regions -> run."""
    started = time.perf_counter()
    live = call.target if isinstance(call.target, nn.Module) else None
    warn_of_rounded(call, live)
    captured = capture(call)
    _check_length(captured, call, mesh.size(), options)
    constants = Constants(live)
    checkpointed = {call.scope.path for call in captured.calls if call.checkpointed}
    opened = openable(call) if options.tile != "none" else {}
    source = Source(
        captured,
        live,
        mesh,
        options,
        list(call.placements),
        frozenset(block_paths(live)),
        frozenset(region_paths(live, checkpointed)),
        frozenset(checkpointed),
        opened,
    )
    made = compile_best(source, canonicalize(captured.graph, mesh.size(), constants.read))
    grad = torch.is_grad_enabled()
    program = Program(
        captured, made.placed, made.flat, made.root, mesh, live, constants, made.policy, grad=grad
    )
    program.opened = frozenset(opened)
    program.host = host if made.policy.moves else None
    program.bind()
    _log_summary(program, call, time.perf_counter() - started)
    return program


def block_paths(live: nn.Module | None) -> set[str]:
    """The outermost modules that a model repeats: members of module lists; of dicts and sequences,
    which also hold single layers, those of which there are several and which hold modules."""
    if live is None:
        return set()
    found: set[str] = set()
    for path, module in live.named_modules():
        members: dict[str, nn.Module] = {}
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            members = dict(module.named_children())
        if not isinstance(module, nn.ModuleList):
            inner = {name: type(each) for name, each in members.items() if any(each.children())}
            counts = Counter(inner.values())
            members = {name: members[name] for name, kind in inner.items() if counts[kind] > 1}
        found |= {f"{path}.{name}".lstrip(".") for name in members}
    return {path for path in found if not any(outer in found for outer in parents(path))}


def region_paths(live: nn.Module | None, checkpointed: set[str]) -> set[str]:
    """Modules whose calls are regions of their own: FSDP2's, and checkpointed ones."""
    if live is None:
        return set()
    managed = {p for p, module in live.named_modules() if p and fsdp_policy(module) is not None}
    return managed | {path for path in checkpointed if path}


def sequence_length(call: Call, options: Options) -> int | None:
    """Length of a call's sequence, by the rule that placing uses; None where no input has one."""
    tensors = [(tuple(t.shape), t.is_floating_point()) for t in call.tensors]
    found = find_sequences(tensors, options.seq_dim)
    return None if found is None else found[0]


def _check_length(captured: Captured, call: Call, axis_size: int, options: Options) -> None:
    homes = seed_inputs(captured.graph, list(call.placements), axis_size, options.seq_dim)
    split = any(isinstance(placement, Shard) for placement in call.placements)
    if not homes and not split and axis_size > 1 and torch.is_grad_enabled():
        raise PlacementError(
            f"no input has a sequence at dim {options.seq_dim}.",
            where=call.name,
            have=call.describe(),
            why="there is nothing to split: every rank would compute all of it",
            fix="pass seq_dim= to parallelize: 1 for [B, S], 0 for [S, B]",
        )
    length = min((shard.block for shard in homes.values()), default=axis_size)
    if length < axis_size:
        raise PlacementError(
            f"dim {options.seq_dim} of the inputs has {length} entries, fewer than mesh axis 'sp' "
            f"has ranks ({axis_size}).",
            where=call.name,
            have=call.describe(),
            why=f"dim {options.seq_dim} is taken as the sequence (seq_dim={options.seq_dim}), and "
            "every rank holds at least one entry of it",
            fix="if it is the sequence, use a smaller sp, or longer (packed) sequences; if it is "
            "not (the channels of images), pass seq_dim=; under torch.no_grad() short calls run "
            "unsharded",
        )


def check_devices(call: Call, live: nn.Module | None, mesh: DeviceMesh) -> None:
    kinds: dict[str, str] = {}
    for name, parameter in live.named_parameters() if live is not None else ():
        kinds.setdefault(parameter.device.type, f"parameter {name}")
    for number, tensor in enumerate(call.tensors):
        device = (
            tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
        )
        kinds.setdefault(device, f"input {number}")
    if "meta" in kinds:
        raise MeshError(
            f"{kinds['meta']} is on the meta device.",
            where=call.name,
            have=", ".join(f"{n} on {k}" for k, n in kinds.items()),
            why="it has no data",
            fix='materialize the model first: model.to_empty(device="cuda"), then initialize it',
        )
    wrong = {kind: name for kind, name in kinds.items() if kind != mesh.device_type}
    if wrong:
        kind, name = next(iter(wrong.items()))
        raise MeshError(
            f"{name} is on '{kind}', the mesh is on '{mesh.device_type}'.",
            where=call.name,
            have=", ".join(f"{n} on {k}" for k, n in kinds.items()),
            why="ranks exchange values on the mesh's device",
            fix=f'move it: .to("{mesh.device_type}")',
        )


def _log_summary(program: Program, call: Call, seconds: float) -> None:
    regions = sum(bool(path) for path, _ in program.root.walk())
    forward, backward = traffic_of(program.nodes(), grad=program.grad)
    log.info(
        "traced %s(%s) in %.2f s: %d operations, %d regions (%d distinct); "
        "a step: forward %s, backward %s",
        call.name,
        call.describe(),
        seconds,
        sum(count for _, count in program.nodes()),
        regions,
        program.distinct,
        forward,
        backward,
    )
