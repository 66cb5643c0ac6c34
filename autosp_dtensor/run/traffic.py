"""What a step of a program sends: collectives by kind, and bytes, forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from ..graph import facts
from ..lower import Collective

__all__ = ["Traffic", "size_text", "traffic_of"]

# What autograd runs for each kind (`lower/collectives.py`); all others are their own transposes.
_TRANSPOSED = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "mean_grad": "all_reduce",
}


@dataclass
class Traffic:
    """Collectives of one direction, and the bytes that one rank sends in them."""

    kinds: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        return f"{counts or 'no collective'}; {size_text(self.sent)} sent per rank"


def traffic_of(nodes: Iterable[tuple[Node, int]], *, grad: bool) -> tuple[Traffic, Traffic]:
    """(forward, backward) of a program's operations with their counts.

    grad: whether a backward follows.
    """
    forward, backward = Traffic(), Traffic()
    for node, count in nodes:
        target = node.target
        if not isinstance(target, Collective) or not target.sends:
            continue
        known = facts(node)
        if target.kind != "mean_grad":
            forward.kinds[target.kind] += count
            forward.sent += count * known.bytes
        if grad and known.meta.requires_grad:
            backward.kinds[_TRANSPOSED.get(target.kind, target.kind)] += count
            backward.sent += count * known.bytes
    return forward, backward


def size_text(count: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
