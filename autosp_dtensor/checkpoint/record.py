"""What autograd saves in a region, from a run on one rank's tensors without data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from .._torch import FakeTensorMode
from ..capture.targets import Opaque
from ..graph import arg, facts
from ..lower import Call, Collective, Drawn, Region, bound, local_meta, schedule
from ..lower.layout import take_shard
from ..placement import Shard
from .defer import Deferred
from .kinds import inner

__all__ = ["Record", "Saved", "record", "run_fake"]


@dataclass(frozen=True)
class Saved:
    """One tensor that operation `by` saves: memory of operation `of`, or made inside `by` itself.

    of: None where the region was given it.
    """

    by: int
    of: int | None
    own: bool
    storage: int
    bytes: int


@dataclass
class Record:
    """A region's operations and what each saves. Numbers are places in its graph.

    base: for each operation, the one that made the memory of its result (itself, or that of what
    it is a view of); None where the region was given it. order: when each runs.
    """

    region: Region
    nodes: list[Node] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    base: dict[int, int | None] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)

    def kept_bytes(self) -> dict[Node, int]:
        """Bytes that backward keeps of each operation's memory, if nothing is computed again."""
        once = {s.storage: s for s in self.saved if s.of is not None}
        kept: dict[Node, int] = {}
        for each in once.values():
            assert each.of is not None
            node = self.nodes[each.of]
            kept[node] = kept.get(node, 0) + each.bytes
        return kept


def record(region: Region) -> Record:
    """Run the region on rank 0's fake tensors and see what is saved."""
    found = Record(region, list(region.graph.nodes))
    runs = {node: k for k, (kind, node) in enumerate(schedule(region.graph)) if kind != "start"}
    found.order = [runs.get(n, len(runs) * 2 if n.op == "output" else -1) for n in found.nodes]
    owners: dict[int, int | None] = {}
    alive: list[Any] = []
    at = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        alive.append(tensor)
        own = key not in owners
        of = at if own else owners[key]
        if of is not None:
            found.saved.append(Saved(at, of, own, key, storage.nbytes()))
        return tensor

    values: dict[Node, Any] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with FakeTensorMode(), torch.enable_grad(), hooks:
        for at, node in enumerate(found.nodes):
            if node.op == "output":
                break
            values[node] = result = run_fake(node, values)
            given = node.op == "placeholder"
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    owners.setdefault(storage._cdata, None if given else at)
                    found.base.setdefault(at, owners[storage._cdata])
                    found.sizes[at] = found.sizes.get(at, 0) + storage.nbytes()
            if is_opaque(node):
                _saves_all(found, at, node, values)
    return found


def is_opaque(node: Node) -> bool:
    """Whether it is unknown what an operation saves: it is taken to be all it takes and gives."""
    return isinstance(inner(node), Opaque)


def _saves_all(found: Record, at: int, node: Node, values: dict[Node, Any]) -> None:
    numbers = {each: k for k, each in enumerate(found.nodes)}
    for each in (*node.all_input_nodes, node):
        value = values[each]
        of = found.base.get(numbers[each])
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor) and of is not None and tensor.requires_grad:
                storage = tensor.untyped_storage()
                found.saved.append(Saved(at, of, False, storage._cdata, storage.nbytes()))


def run_fake(node: Node, values: dict[Node, Any]) -> Any:
    """What a node of a lowered graph gives on rank 0, without data and without communication."""
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
        if target.kind in ("scale_grad", "mean_grad"):
            return values[arg(node, 0)].view_as(values[arg(node, 0)])  # the same memory
        return empty()
    if is_opaque(node):
        return empty()
    if isinstance(target, Deferred):  # holds what it is made of
        inputs = node.all_input_nodes
        parts = [n for n in inputs if isinstance(facts(n).placement, Shard)]
        return values[next(iter(parts or inputs))]  # on one rank, what is split is whole
    if isinstance(target, Drawn):
        target = target.target
    target = getattr(target, "without_data", target)
    return target(*bound(args, 0), **bound(kwargs, 0))
