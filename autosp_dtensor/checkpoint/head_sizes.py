"""The sizes of an attention in a graph, and what its kernel's backward takes beside gradients."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..capture.flash import FlashCall
from ..graph import facts
from ..lower import Drawn, bound, local_meta
from ..place.attention.heads import attend
from .by_heads import ByHeads
from .head_groups import Heads, call_of, groups_of, heads_of, kernel_of, named
from .kinds import inner

__all__ = ["call_sizes", "kernel_bytes", "sizes_of"]

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def sizes_of(node: Node, rank: int) -> Heads | None:
    """Of one rank's call; None for what is no kernel of heads."""
    call, (args, reads) = call_of(inner(node)), _arguments(node, rank)
    given = None if call is None else named(call, args, node.kwargs)
    if call is None or given is None:
        return None
    tensors = {name: each for name, each in given.items() if isinstance(each, Node)}
    shapes = {name: local_meta(facts(each), 0, rank) for name, each in tensors.items()}
    return heads_of(call, shapes, own_keys=reads is not None)


def call_sizes(node: Node, rank: int) -> tuple[FlashCall, dict[str, int], dict[str, Any]] | None:
    """One rank's call of a kernel: the sizes of its dims by letter, and its arguments by name."""
    call, (args, _) = kernel_of(inner(node)), _arguments(node, rank)
    if call is None:
        return None
    given = dict(zip(_SDPA if "query" in call.dims else call.dims, args, strict=False))
    given |= node.kwargs
    sizes: dict[str, int] = {}
    for name, text in call.dims.items():
        if isinstance(each := given.get(name), Node):
            shape = local_meta(facts(each), 0, rank)
            for letter, size in zip(reversed(text.split()), reversed(shape), strict=False):
                sizes[letter] = max(size, sizes.get(letter, 1))
    return call, sizes, given


def _arguments(node: Node, rank: int) -> tuple[tuple[Any, ...], Any]:
    """Those of the kernel itself, and which key head each query head reads, if not as usual."""
    target = node.target.target if isinstance(node.target, Drawn) else node.target
    args = bound(node.args, rank)
    return (args[4:], args[2]) if target is attend else (args, None)


def kernel_bytes(node: Node) -> int | None:
    """Bytes that rank 0's backward holds beside what it takes and gives; None where that is not
    known. Groups of heads hold one group's gradients, and the sums of its key heads' in fp32."""
    sizes, itemsize = sizes_of(node, 0), facts(node).meta.dtype.itemsize
    if sizes is None:
        return None
    called = node.args[0] if node.target is attend else node.target
    if not isinstance(called, ByHeads):
        return sizes.workspace(itemsize)
    group = max(groups_of(sizes, itemsize, called.most), key=lambda each: each.queries[1])
    one = sizes.of(group)
    keys = one.keys * one.key_heads * (one.width + one.wide)
    gradients = itemsize * (one.tokens * one.heads * one.width + keys)
    sums = 4 * keys if group.queries[1] < sizes.each else 0
    return one.workspace(itemsize) + gradients + sums
