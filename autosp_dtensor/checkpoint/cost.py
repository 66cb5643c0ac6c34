"""FLOPs, bytes and seconds of an operation on one rank: the one cost model of the package.

An operation takes the longer of its arithmetic and its memory traffic, a collective its bytes over
the link (the roofline model: Williams, Waterman, Patterson, 2009). Peaks are the vendors' for dense
bf16; `reached` is the share of them that large operations reach.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from ..graph import facts, short_name
from ..lower import Collective, local_meta
from .kinds import inner, is_attention, is_product
from .tile import Tile

__all__ = ["DEVICES", "Device", "bytes_of", "flops_of", "is_attention", "is_product", "seconds_of"]


@dataclass(frozen=True)
class Device:
    """Peaks of one device.

    flops: dense bf16, per second. memory: bytes per second. link: bytes per second that one device
    sends to others in its node. size: bytes of memory. host: bytes per second to host memory, one
    direction. reached: share of the peaks.
    """

    name: str
    flops: float
    memory: float
    link: float
    size: int
    host: float
    reached: float = 0.6


# NVIDIA's data sheets: A100 SXM (2021), H100 SXM (2023), H200 SXM (2024), B200 (2025). Links are
# NVLink's one direction; to the host, PCIe's: 16 lanes of generation 4 (A100) or 5. "cpu" is a core
# of this kind of machine, to compare plans by, not to time.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 312e12, 1.555e12, 300e9, 40 << 30, 32e9),
        Device("a100-80gb", 312e12, 2.039e12, 300e9, 80 << 30, 32e9),
        Device("h100-80gb", 989e12, 3.35e12, 450e9, 80 << 30, 64e9),
        Device("h200-141gb", 989e12, 4.8e12, 450e9, 141 << 30, 64e9),
        Device("b200-180gb", 2250e12, 7.7e12, 900e9, 180 << 30, 64e9),
        Device("cpu", 50e9, 10e9, 2e9, 16 << 30, 5e9),
    )
}


def flops_of(node: Node) -> float:
    """Multiplications and additions of one rank's forward."""
    if isinstance(node.target, Tile):
        return node.target.count * sum(
            flops_of(each) for each in node.target.body.nodes if each.op == "call_function"
        )
    shapes = [local_meta(facts(each), 0, 0) for each in node.all_input_nodes]
    known = facts(node)
    out = local_meta(known, 0, 0)
    if is_attention(node):
        return _attention_flops(node, shapes)
    name = short_name(inner(node))
    if not is_product(node) or not shapes:
        return 0.0
    if name.startswith("conv"):
        return 2.0 * math.prod(out) * math.prod(shapes[1][1:])
    if name == "einsum":
        text = next((a for a in node.args if isinstance(a, str)), "")
        letters = text.replace(" ", "").partition("->")[0].split(",")
        sizes = {x: s for term, shape in zip(letters, shapes, strict=False)
                 for x, s in zip(term, shape, strict=False)}  # fmt: skip
        return 2.0 * math.prod(sizes.values())
    contracted = shapes[1] if name in ("addmm", "baddbmm") else shapes[0]
    return 2.0 * math.prod(out) * (contracted[-1] if contracted else 1)


def _attention_flops(node: Node, shapes: list[tuple[int, ...]]) -> float:
    """Scores and their product with the values: 2 S T (D + E) of each head, half of it if causal.

    Source: Dao et al., FlashAttention, arXiv:2205.14135, counts so.
    """
    query, *others = shapes
    call: Any = getattr(inner(node), "form", "")
    if call:  # [.., S, H, D]
        tokens = math.prod(query[:-1])
        whole = math.prod(others[0][:-2]) if others else tokens
        pairs = tokens * (whole / max(query[0] if len(query) == 4 else 1, 1))
        return 4.0 * pairs * query[-1] * 0.5
    lead, (s, d) = math.prod(query[:-2]), query[-2:]
    keys = others[0][-2] if others else s
    values = others[1][-1] if len(others) > 1 else d
    causal = node.kwargs.get("is_causal") or short_name(inner(node)) == "tiled_attention"
    return 2.0 * lead * s * keys * (d + values) * (0.5 if causal else 1.0)


def bytes_of(node: Node) -> int:
    """Bytes that a node reads and writes on one rank."""
    known = facts(node)
    total = sum(
        math.prod(local_meta(known, i, 0)) * meta.dtype.itemsize
        for i, meta in enumerate(known.outs)
    )
    for each in node.all_input_nodes:
        other = facts(each)
        total += math.prod(local_meta(other, 0, 0)) * other.meta.dtype.itemsize
    return total


def seconds_of(node: Node, device: Device) -> float:
    """Time of one rank's forward."""
    target = node.target
    if isinstance(target, Tile):
        inside = [each for each in target.body.nodes if each.op == "call_function"]
        return target.count * sum(seconds_of(each, device) for each in inside)
    if isinstance(target, Collective) and target.sends:
        return facts(node).bytes / device.link / device.reached
    arithmetic = flops_of(node) / device.flops
    return max(arithmetic, bytes_of(node) / device.memory) / device.reached
