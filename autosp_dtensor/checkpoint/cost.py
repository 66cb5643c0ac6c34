"""FLOPs, bytes and seconds of an operation of a lowered graph on one rank, by `../cost.py`."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from ..cost import (
    Device,
    attention_flops,
    pairs_read,
    product_flops,
    seconds_to_compute,
    seconds_to_send,
)
from ..graph import facts, short_name
from ..lower import Collective, local_meta
from ..place.masks.runs import Runs
from .head_sizes import call_sizes
from .kinds import inner, is_attention, is_product, sequences_read
from .operands import local_bytes
from .tile import Tile

__all__ = ["bytes_of", "flops_of", "seconds_of"]


def flops_of(node: Node) -> float:
    """Multiplications and additions of one rank's forward."""
    if isinstance(node.target, Tile):
        return node.target.count * sum(
            flops_of(each) for each in node.target.body.nodes if each.op == "call_function"
        )
    if is_attention(node):
        return _attention_flops(node)
    shapes = [local_meta(facts(each), 0, 0) for each in node.all_input_nodes]
    out = local_meta(facts(node), 0, 0)
    name = short_name(inner(node))
    if not is_product(node) or not shapes:
        return 0.0
    if name.startswith("conv"):
        return product_flops(out, math.prod(shapes[1][1:]))
    if name == "einsum":
        text = next((a for a in node.args if isinstance(a, str)), "")
        letters = text.replace(" ", "").partition("->")[0].split(",")
        sizes = {x: s for term, shape in zip(letters, shapes, strict=False)
                 for x, s in zip(term, shape, strict=False)}  # fmt: skip
        return product_flops((*sizes.values(),), 1)
    contracted = shapes[1] if name in ("addmm", "baddbmm") else shapes[0]
    return product_flops(out, contracted[-1] if contracted else 1)


def _attention_flops(node: Node) -> float:
    """Of the pairs that a call's arguments let it read, as far as they say."""
    name, out = short_name(inner(node)), local_meta(facts(node), 0, 0)
    shapes = [local_meta(facts(each), 0, 0) for each in node.all_input_nodes]
    if name == "flex_weights":  # its scores are a product of their own
        return product_flops(shapes[0], shapes[1][-1])
    if name == "tiled_attention":
        (*lead, queries, width), (keys, _), wide = shapes[0], shapes[1][-2:], shapes[2][-1]
        pairs = _tiled_pairs(node, queries, keys)
        return attention_flops(math.prod(lead) * pairs, width, wide)
    known = call_sizes(node, 0)
    if known is None:  # a kernel of the user's: its result, for each key that it reads
        keys = max(sequences_read(node), default=0) or out[-2]
        return attention_flops(math.prod(out[:-1]) * keys, out[-1], out[-1])
    call, sizes, given = known
    queries, keys = sizes["m"], sizes.get("t", sizes["m"])
    lead, times = sizes["h"], float(sizes.get("b", 1))
    if "b" not in call.out:  # rows of their own lengths, one after another
        longest = given.get("max_seqlen_k", given.get("max_seqlen"))
        longest = min(longest, keys) if isinstance(longest, int) and longest > 0 else keys
        times, queries, keys = queries / longest, longest, longest
    left, right = _window(given)
    first = 0 if name == "scaled_dot_product_attention" else None
    pairs = lead * times * pairs_read(queries, keys, left, right, first=first)
    return attention_flops(pairs, sizes["d"], sizes.get("e", sizes["d"]))


def _window(given: dict[str, Any]) -> tuple[int | None, int | None]:
    """Keys before and after a query's own, by whichever names a call has for them; None: all."""
    left, right = given.get("window_size") or (None, None)
    if isinstance(given.get("sliding_window"), int):  # with the query's own
        left = given["sliding_window"] - 1
    if given.get("causal") or given.get("is_causal"):
        right = 0
    return None if left is None or left < 0 else left, None if right is None or right < 0 else right


def _tiled_pairs(node: Node, queries: int, keys: int) -> int:
    """Of the runs that a mask is proved to be; what the data say is taken for causal."""
    runs = node.kwargs.get("runs")
    known = runs.known if isinstance(runs, Runs) else None
    if known is None:
        return pairs_read(queries, keys, right=0)
    wide = [(None if r.before < 0 else r.before, None if r.after < 0 else r.after) for r in known]
    return sum(
        pairs_read(r.bottom - r.top, r.right - r.left, *window)
        for r, window in zip(known, wide, strict=True)
    )


def bytes_of(node: Node) -> int:
    """Bytes that a node reads and writes on one rank."""
    return local_bytes(node) + sum(local_bytes(each) for each in node.all_input_nodes)


def seconds_of(node: Node, device: Device) -> float:
    """Time of one rank's forward."""
    target = node.target
    if isinstance(target, Tile):
        inside = [each for each in target.body.nodes if each.op == "call_function"]
        return target.count * sum(seconds_of(each, device) for each in inside)
    if isinstance(target, Collective) and target.sends:
        return seconds_to_send(facts(node).bytes, device)
    return seconds_to_compute(flops_of(node), bytes_of(node), device)
