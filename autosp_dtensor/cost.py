"""The cost model, each formula and figure with its source: bytes that are sent, arithmetic, memory
of kernels, seconds. Placing, checkpoints, explain and plans all count by this file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .graph import Meta
from .placement import Partial, Placement, Replicate, Shard

__all__ = [
    "DEVICES",
    "Device",
    "attention_flops",
    "pairs_read",
    "product_flops",
    "seconds_to_compute",
    "seconds_to_copy",
    "seconds_to_send",
    "sent_bytes",
    "workspace",
]


@dataclass(frozen=True)
class Device:
    """Peaks of one device.

    flops: dense bf16, per second. memory: bytes per second. link: bytes per second that one device
    sends to others in its node. size: bytes of memory. host: bytes per second to host memory, one
    direction. reached: share of the peaks that large operations reach.
    """

    name: str
    flops: float
    memory: float
    link: float
    size: int
    host: float
    reached: float


# NVIDIA's data sheets: A100 SXM (2021), H100 SXM (2023), H200 SXM (2024), B200 (2025). Links are
# NVLink's one direction; to the host, PCIe's: 16 lanes of generation 4 (A100) or 5. What is reached
# is an assumption: one share for all, so that it cancels where times are compared.
_REACHED = 0.6
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", 312e12, 1.555e12, 300e9, 40 << 30, 32e9, _REACHED),
        Device("a100-80gb", 312e12, 2.039e12, 300e9, 80 << 30, 32e9, _REACHED),
        Device("h100-80gb", 989e12, 3.35e12, 450e9, 80 << 30, 64e9, _REACHED),
        Device("h200-141gb", 989e12, 4.8e12, 450e9, 141 << 30, 64e9, _REACHED),
        Device("b200-180gb", 2250e12, 7.7e12, 900e9, 180 << 30, 64e9, _REACHED),
        Device("cpu", 50e9, 10e9, 2e9, 16 << 30, 5e9, _REACHED),
    )
}


# -- seconds -----------------------------------------------------------------------------------


def seconds_to_compute(flops: float, moved: float, device: Device) -> float:
    """Of an operation: the longer of its arithmetic and its memory traffic, `moved` bytes.

    Source: the roofline model, Williams, Waterman, Patterson, 2009.
    """
    return max(flops / device.flops, moved / device.memory) / device.reached


def seconds_to_send(count: float, device: Device) -> float:
    """Of a collective in which one rank sends so many bytes."""
    return count / device.link / device.reached


def seconds_to_copy(count: float, device: Device) -> float:
    """Of so many bytes on their way to host memory, or back."""
    return count / device.host / device.reached


# -- bytes that are sent -----------------------------------------------------------------------


def sent_bytes(meta: Meta, source: Placement, target: Placement, axis_size: int) -> float:
    """Bytes that one rank sends where a placement changes. n ranks, b bytes of the whole value:

    all-to-all b(n-1)/n^2; all-gather and reduce-scatter b(n-1)/n; all-reduce twice that; taking a
    slice nothing. Source: Thakur et al., Optimization of Collective Communication Operations in
    MPICH, 2005 (ring algorithms).
    """
    if source == target or axis_size == 1 or isinstance(source, Replicate):
        return 0.0
    part = meta.nbytes * (axis_size - 1) / axis_size
    if isinstance(source, Shard):
        if not isinstance(target, Shard):
            return part
        copies = sum(target.sizes) / max(target.block, 1)  # more than 1 where intervals overlap
        return copies * part / axis_size
    if isinstance(source, Partial):
        return 2 * part if isinstance(target, Replicate) else part
    raise AssertionError(f"no way from {source} to {target}")


# -- arithmetic --------------------------------------------------------------------------------


def product_flops(out: Sequence[int], contracted: int) -> float:
    """Of a product of matrices: a multiplication and an addition for each term of each result."""
    return 2.0 * math.prod(out) * contracted


def attention_flops(pairs: float, width: int, wide: int) -> float:
    """Scores of pairs of queries and keys (of all heads), and their products with the values.

    width: of a query's head. wide: of a value's. Source: Dao et al., FlashAttention,
    arXiv:2205.14135, counts so.
    """
    return 2.0 * pairs * (width + wide)


def pairs_read(
    queries: int,
    keys: int,
    left: int | None = None,
    right: int | None = None,
    *,
    first: int | None = None,
) -> int:
    """How many pairs of one head are read where each query reads the keys of a window around it.

    left, right: keys before and after a query's own; None: all. Causal is right=0. first: the key
    at which the first query stands; None: so that the last one stands at the last key, as
    flash-attn has it (scaled_dot_product_attention's is_causal: 0).
    """
    at = keys - queries if first is None else first
    last = queries * (keys - 1) if right is None else _sum(at + right, queries, -1, keys - 1)
    start = 0 if left is None else _sum(at - left, queries, 0, keys)
    return max(0, last - start + queries)


def _sum(start: int, count: int, least: int, most: int) -> int:
    """Of start, start + 1, ..., each no less than `least` and no more than `most`."""
    below = min(max(least - start, 0), count)
    above = min(max(start + count - 1 - most, 0), count - below)
    rest = count - below - above
    first = start + below
    return below * least + above * most + rest * first + rest * (rest - 1) // 2


# -- memory ------------------------------------------------------------------------------------


def workspace(
    heads: int, key_heads: int, tokens: int, keys: int, width: int, wide: int, itemsize: int
) -> int:
    """Bytes that an attention kernel's backward allocates beside the gradients.

    tokens, keys: of all batch rows. width: of a query's head. wide: of a value's. Source: mha_bwd
    in flash-attention's csrc/flash_attn/flash_api.cpp (dq_accum, softmax_d, and where key heads are
    shared dk_expanded and dv_expanded); torch's own flash kernel is the same.
    """
    rounded = -(-width // 32) * 32
    total = 4 * tokens * heads * (rounded + 1)
    if heads != key_heads:
        total += itemsize * keys * heads * (width + wide)
    return total
