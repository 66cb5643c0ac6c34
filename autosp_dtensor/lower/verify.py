"""Run the lowered program on fake local tensors and hold every shape against its placement."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .._torch import FakeTensorMode
from ..capture.targets import Opaque
from ..graph import arg, describe, exact, facts
from ..placement import Shard
from .layout import take_shard
from .localize import Collective, Drawn, bound, local_meta
from .regions import LoweredBlock

__all__ = ["verify_lowered"]


def verify_lowered(graph: Graph, axis_size: int, mode: FakeTensorMode) -> None:
    """Run each distinct call on the local shapes of the first and the last rank.

    A wrong rewrite of sizes cannot pass.

    Raises:
        AssertionError: a local result has another shape or dtype than its placement says.
    """
    seen: set[Any] = set()
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                _verify_placed(node)
                if isinstance(node.target, LoweredBlock):
                    continue  # verified on its own
                key = _signature(node)
                if key in seen:
                    continue
                seen.add(key)
                for rank in sorted({0, axis_size - 1}):
                    _verify(node, rank)


def _signature(node: Node) -> Any:
    known = facts(node)

    def shown(value: Node) -> Any:
        return facts(value).outs, facts(value).placements

    args = exact((node.args, node.kwargs), shown)
    return (node.target, args, known.outs, known.placements)


def _verify_placed(node: Node) -> None:
    known = facts(node)
    assert len(known.placements) == len(known.outs), (
        f"{node} has {len(known.placements)} placements"
    )
    for meta, placement in zip(known.outs, known.placements, strict=True):
        if isinstance(placement, Shard):
            length = placement.outer * placement.block
            assert length == meta.shape[placement.dim], (
                f"{node}: {placement} does not fit {describe(meta)}"
            )


def _local(node: Node, rank: int) -> Any:
    known = facts(node)
    made = tuple(
        torch.empty(local_meta(known, i, rank), dtype=meta.dtype, device=meta.device)
        for i, meta in enumerate(known.outs)
    )
    return made[0] if known.single else made


def _verify(node: Node, rank: int) -> None:
    known = facts(node)
    target: Any = node.target
    if isinstance(target, Collective):
        if target.kind == "slice":
            out = take_shard(_local(arg(node, 0), rank), target.moves[0][1], rank)
            assert tuple(out.shape) == local_meta(known, 0, rank), f"{node}: {tuple(out.shape)}"
        return
    if isinstance(target, Drawn):
        target = target.target
    args, kwargs = map_aggregate(
        (node.args, node.kwargs), lambda v: _local(v, rank) if isinstance(v, Node) else v
    )
    if isinstance(target, Opaque) and hasattr(target, "without_data"):
        return  # the user's stand-in knows the shapes of the whole alone
    target = getattr(target, "without_data", target)
    result = target(*bound(args, rank), **bound(kwargs, rank))
    outs = [
        t
        for t in (result if isinstance(result, (tuple, list)) else [result])
        if isinstance(t, torch.Tensor)
    ]
    for index, (out, meta) in enumerate(zip(outs, known.outs, strict=False)):
        want = local_meta(known, index, rank)
        assert tuple(out.shape) == want and out.dtype == meta.dtype, (
            f"{known.source}: local {getattr(target, '__name__', target)} gives "
            f"{tuple(out.shape)} {out.dtype} on rank {rank}, "
            f"the placement {known.placements[index]} of {describe(meta)} says {want}"
        )
