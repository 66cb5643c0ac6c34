"""The sizes of an attention in a graph, and what its kernel's backward takes beside gradients."""

from __future__ import annotations

from torch.fx import Node

from ..graph import facts
from ..lower import Drawn, bound, local_meta
from ..place.attention.heads import attend
from .by_heads import ByHeads
from .head_groups import Heads, call_of, groups_of, heads_of, named, workspace
from .kinds import inner

__all__ = ["kernel_bytes", "sizes_of"]


def sizes_of(node: Node, rank: int) -> Heads | None:
    """Of one rank's call; None for what is no kernel of heads."""
    call, args, reads = call_of(inner(node)), bound(node.args, rank), None
    target = node.target.target if isinstance(node.target, Drawn) else node.target
    if target is attend:
        reads, args = args[2], args[4:]
    given = None if call is None else named(call, args, node.kwargs)
    if call is None or given is None:
        return None
    tensors = {name: each for name, each in given.items() if isinstance(each, Node)}
    shapes = {name: local_meta(facts(each), 0, rank) for name, each in tensors.items()}
    return heads_of(call, shapes, own_keys=reads is not None)


def kernel_bytes(node: Node) -> int | None:
    """Bytes that rank 0's backward holds beside what it takes and gives; None where that is not
    known. Groups of heads hold one group's gradients, and the sums of its key heads' in fp32."""
    sizes, itemsize = sizes_of(node, 0), facts(node).meta.dtype.itemsize
    if sizes is None:
        return None
    called = node.args[0] if node.target is attend else node.target
    if not isinstance(called, ByHeads):
        return workspace(sizes, itemsize)
    group = max(groups_of(sizes, itemsize, called.most), key=lambda each: each.queries[1])
    one = sizes.of(group)
    keys = one.keys * one.key_heads * (one.width + one.wide)
    gradients = itemsize * (one.tokens * one.heads * one.width + keys)
    sums = 4 * keys if group.queries[1] < sizes.each else 0
    return workspace(one, itemsize) + gradients + sums
