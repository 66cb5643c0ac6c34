"""Run the lowered program on fake local tensors and hold every shape against its placement."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .._torch import FakeTensorMode
from ..capture.targets import Opaque
from ..graph import Meta, arg, describe, exact, facts
from ..place.rule import bound
from ..placement import Shard
from .layout import take_shard
from .localize import Collective, Drawn, local_meta
from .regions import LoweredBlock

__all__ = ["verify_lowered"]


def verify_lowered(graph: Graph, axis_size: int, mode: FakeTensorMode) -> None:
    """Run each distinct call on the local shapes of the first and the last rank.

    A wrong rewrite of sizes cannot pass. A call that is the same on both runs once.

    Raises:
        AssertionError: a local result has another shape or dtype than its placement says.
    """
    seen: set[Any] = set()
    samples = _Samples()
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function":
                _verify_placed(node)
                if isinstance(node.target, LoweredBlock):
                    continue  # verified on its own
                for rank in sorted({0, axis_size - 1}):
                    key = _call_on(node, rank)
                    if key not in seen:
                        seen.add(key)
                        _verify(node, rank, samples)


def _call_on(node: Node, rank: int) -> Any:
    """All that the check of a node on one rank looks at."""

    def shown(value: Node) -> Any:
        known = facts(value)
        return known.single, *(
            (local_meta(known, i, rank), out.dtype, out.device) for i, out in enumerate(known.outs)
        )

    target = node.target
    args = exact((bound(node.args, rank), bound(node.kwargs, rank)), shown)
    return target, args, shown(node), rank if isinstance(target, Collective) else None


class _Samples:
    """Local tensors without data, made once for each shape: making one takes as long as a call."""

    def __init__(self) -> None:
        self._made: dict[Any, list[torch.Tensor]] = {}

    def of(self, node: Node, rank: int, used: Counter[Any]) -> Any:
        """What a rank holds of a value. used: what the same call has got already, since two
        arguments are two tensors."""
        known = facts(node)
        out = tuple(
            self._one(local_meta(known, i, rank), meta, used) for i, meta in enumerate(known.outs)
        )
        return out[0] if known.single else out

    def _one(self, shape: tuple[int, ...], meta: Meta, used: Counter[Any]) -> torch.Tensor:
        key = shape, meta.dtype, meta.device
        made, number = self._made.setdefault(key, []), used[key]
        used[key] += 1
        if number == len(made):
            made.append(torch.empty(shape, dtype=meta.dtype, device=meta.device))
        return made[number]


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


def _verify(node: Node, rank: int, samples: _Samples) -> None:
    known = facts(node)
    used: Counter[Any] = Counter()
    target: Any = node.target
    if isinstance(target, Collective):
        if target.kind == "slice":
            out = take_shard(samples.of(arg(node, 0), rank, used), target.moves[0][1], rank)
            assert tuple(out.shape) == local_meta(known, 0, rank), f"{node}: {tuple(out.shape)}"
        return
    if isinstance(target, Drawn):
        target = target.target
    args, kwargs = map_aggregate(
        (node.args, node.kwargs),
        lambda v: samples.of(v, rank, used) if isinstance(v, Node) else v,
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
