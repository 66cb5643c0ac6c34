"""The placed program as text: what runs where, what is sent, what is kept for backward."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from ._torch import FakeTensorMode
from .capture.targets import Opaque
from .errors import UsageError
from .graph import arg, describe, facts, short_name
from .lower import Call, Collective, Drawn, Region, bound, local_meta
from .lower.layout import take_shard
from .placement import Shard
from .run.program import Program
from .run.traffic import size_text, traffic_of
from .source import call_site

__all__ = ["explain_program"]


def explain_program(program: Program) -> str:
    """One line per operation, equal regions once with a count, then totals; equal on every rank.

    Columns: operation (`>` marks communication); the global shape of its result, `@sp` marks the
    split dim; bytes that one rank sends, or keeps for backward; the source line.
    """
    n = program.mesh.size()
    lines = [f"sp={n}", ""]
    paths: dict[Region, list[str]] = {}
    for path, region in program.root.walk():
        paths.setdefault(region, []).append(path)
    kept = 0
    for region, places in paths.items():
        known = _kept_bytes(region)
        kept += sum(known.values()) * len(places)
        more = f" and {len(places) - 1} more like it" if len(places) > 1 else ""
        lines.append(f"{places[0] or 'root'}{more}")
        shown = [n for n in region.graph.nodes if n.op == "call_function" and not _silent(n)]
        lines.extend(_row(node, known) for node in shown)
        lines.append(f"  keeps {size_text(sum(known.values()))} for backward")
        lines.append("")
    lines.extend(_totals(program, kept))
    return "\n".join(lines)


def _silent(node: Node) -> bool:
    return (
        node.target is operator.getitem
        and isinstance(node.args[1], int)
        and facts(node).option is None
    )


def _row(node: Node, kept: dict[Node, int]) -> str:
    known = facts(node)
    target: Any = node.target
    if isinstance(target, Call):
        return f"  [{target.path}]"
    name = target.kind if isinstance(target, Collective) else short_name(target)
    mark = "> " if isinstance(target, Collective) and target.sends else "  "
    shape = describe(known.meta, known.placement)
    if len(known.outs) > 1:
        shape += f" +{len(known.outs) - 1}"
    note = (
        f"sends {size_text(known.bytes)}"
        if known.bytes
        else f"keeps {size_text(kept[node])}"
        if kept.get(node)
        else ""
    )
    where = (
        known.source.rpartition("(")[2].rstrip(")") if not isinstance(target, Collective) else ""
    )
    return f"{mark}{name[:14]:<15}{shape[:29]:<30}{note:<15}{where[-18:]}".rstrip()


def _totals(program: Program, kept: int) -> list[str]:
    forward, backward = traffic_of(program.nodes(), grad=program.grad)
    return [
        f"forward:  {forward}",
        f"backward: {backward}",
        f"kept for backward: {size_text(kept)} per rank",
    ]


def _kept_bytes(region: Region) -> dict[Node, int]:
    """Bytes that autograd keeps of each node's result, from a run on rank 0's fake tensors."""
    mode = FakeTensorMode()
    owner: dict[int, Node] = {}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    values: dict[Node, Any] = {}
    with mode, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for node in region.graph.nodes:
            if node.op == "output":
                break
            values[node] = _run_fake(node, values)
            for tensor in (
                values[node] if isinstance(values[node], (tuple, list)) else [values[node]]
            ):
                if isinstance(tensor, torch.Tensor) and node.op != "placeholder":
                    owner.setdefault(tensor.untyped_storage()._cdata, node)
    result: dict[Node, int] = {}
    for storage, count in kept.items():
        if storage in owner:
            result[owner[storage]] = result.get(owner[storage], 0) + count
    return result


def _run_fake(node: Node, values: dict[Node, Any]) -> Any:
    known = facts(node)
    target: Any = node.target

    def empty() -> Any:
        made = tuple(
            torch.empty(local_meta(known, i, 0), dtype=m.dtype, device=m.device).requires_grad_(
                m.requires_grad
            )
            for i, m in enumerate(known.outs)
        )
        return made[0] if known.single else made

    if node.op == "placeholder" or isinstance(target, Call):
        return empty()
    args, kwargs = map_aggregate(
        (node.args, node.kwargs), lambda v: values[v] if isinstance(v, Node) else v
    )
    if isinstance(target, Collective):
        if target.kind == "slice":
            placed = target.moves[0][1]
            assert isinstance(placed, Shard)
            return take_shard(values[arg(node, 0)], placed, 0)
        return empty()
    if isinstance(target, Opaque):
        return empty()
    if isinstance(target, Drawn):
        target = target.target
    target = getattr(target, "without_data", target)
    return target(*bound(args, 0), **bound(kwargs, 0))


def latest(program: Program | None) -> Program:
    if program is None:
        raise UsageError(
            "there is no program to explain yet.",
            where=call_site(),
            have="no call so far",
            why="programs are traced at the first call",
            fix="call the model once",
        )
    return program
