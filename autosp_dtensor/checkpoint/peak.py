"""What backward of a graph holds at its fullest, from what each operation saves and takes."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from ..graph import facts, result_nodes, short_name
from ..lower import Call, Collective, Region, local_meta
from ..placement import Shard
from .head_sizes import kernel_bytes
from .kinds import is_attention, is_product
from .record import Record, record
from .stages import Stages
from .tile import Tile

__all__ = ["backward_moments", "backward_peak"]

# Operations that work tile by tile hold a few tiles of fp32 beside what they take and give.
_TILES = 512 << 20


def backward_peak(
    found: Record,
    held: Iterable[int] = (),
    inside: Callable[[Region], int] = lambda region: 0,
    stages: Stages | None = None,
) -> int:
    """Bytes at the fullest moment of a graph's backward; all that it saves is there at its start,
    or at that of its stage.

    Args:
        held: operations whose memory somebody else holds all the time (results).
        inside: what the call of another region takes, its results' and inputs' gradients with it.
        stages: in which what it saves is had again; None: at once.
    """
    return max(backward_moments(found, held, inside, stages).values())


def backward_moments(
    found: Record,
    held: Iterable[int] = (),
    inside: Callable[[Region], int] = lambda region: 0,
    stages: Stages | None = None,
) -> dict[int, int]:
    """Bytes at the fullest moment of each operation's backward, and at the start, by the last one.

    Gradients are followed from the results to the inputs: one exists from the first operation that
    gives it to the end of the one that takes it; those of the graph's own inputs stay.
    """
    saved = _Saved(found, held, stages)
    flying = _flying(found)
    gradients = _Gradients()
    output = found.nodes[-1]
    number = {node: k for k, node in enumerate(found.nodes)}
    results = [n for n in result_nodes(output) if bytes_of_gradient(n)]
    losses = [n for n in results if facts(n).meta.numel == 1]
    for node in losses or results:  # who has a loss calls backward on that alone
        gradients.add(number[node], bytes_of_gradient(node))
    # Had again, one at a time.
    moments = {len(found.nodes) - 1: saved.bytes + max(found.sizes.values(), default=0)}
    for k in range(len(found.nodes) - 2, -1, -1):
        node = found.nodes[k]
        if node.op == "placeholder" or k not in gradients.of:
            continue
        fullest = saved.comes_to(k) + gradients.bytes
        within = _beside(node, found.base.get(k) == k)
        if isinstance(node.target, Call):  # it lets go of its results' gradients as it goes on
            within = 0
            fullest += max(0, inside(node.target.region) - gradients.of_this_alone(k))
        if isinstance(node.target, Tile) and node.target.sums_once:  # in forward
            fullest += within
            within = 0
        others = 0 if isinstance(node.target, Collective) else flying[facts(node).turn]
        within += others
        passes = _passes_on(node, found.base.get(k) == k)
        for each in node.all_input_nodes:
            if size := bytes_of_gradient(each):
                same = passes and size == bytes_of_gradient(node)
                gradients.add(number[each], size, k if same else None)
                fullest = max(fullest, saved.bytes + gradients.bytes + within)
        moments[k] = max(fullest, saved.bytes + gradients.bytes + within)
        gradients.drop(k)
        added = gradients.settle()
        saved.used_by(k)
        if others:  # a sum over groups is made beside its terms
            moments[k] = max(moments[k], saved.bytes + gradients.bytes + 2 * added + others)
    return moments


def bytes_of_gradient(node: Node) -> int:
    """Bytes of the gradients of what a node gives on one rank."""
    if node.op == "output":
        return 0
    known = facts(node)
    return sum(
        math.prod(local_meta(known, i, 0)) * meta.dtype.itemsize
        for i, meta in enumerate(known.outs)
        if meta.requires_grad
    )


def _flying(found: Record) -> Counter[tuple[int, int] | None]:
    """What exchanges of one group of heads send and receive while another one's backward runs."""
    sent: Counter[tuple[int, int] | None] = Counter()
    for node in found.nodes:
        turn = facts(node).turn
        if turn is not None and isinstance(node.target, Collective) and node.target.sends:
            sent[turn] += 2 * bytes_of_gradient(node)
    return sent


def _passes_on(node: Node, own: bool) -> bool:
    """Whether an operation's gradient is that of what it takes, in the same memory."""
    return not own or short_name(node.target) in ("add", "add_", "getitem")


def _beside(node: Node, own: bool) -> int:
    """What an operation's backward holds beside the gradients that it takes and gives."""
    target = node.target
    if not own or is_product(node):
        return 0
    if isinstance(target, Tile):
        return _inside_tile(target)
    if "tiled" in short_name(target):
        return _TILES
    size = max(bytes_of_gradient(each) for each in (node, *node.all_input_nodes))
    if is_attention(node):
        known = kernel_bytes(node)
        return 2 * size if known is None else known
    return 2 * size if isinstance(target, Collective) and target.sends else size


_known: weakref.WeakKeyDictionary[Tile, int] = weakref.WeakKeyDictionary()


def _inside_tile(tile: Tile) -> int:
    """One tile's own fullest moment, and the sums of weights' gradients in fp32."""
    if tile in _known:
        return _known[tile]
    weights = [
        facts(node).meta
        for node in tile.body.nodes
        if node.op == "placeholder" and not isinstance(facts(node).placement, Shard)
    ]
    sums = sum(meta.numel * 4 for meta in weights if meta.requires_grad)
    _known[tile] = sums + backward_peak(record(Region(tile.body)))
    return _known[tile]


class _Saved:
    """Memory that operations save, from the start of their stage until the first of them (the last
    in backward) has used it. What an attention leaves to later stages is there from the start.
    """

    def __init__(self, found: Record, held: Iterable[int], stages: Stages | None) -> None:
        number = {node: k for k, node in enumerate(found.nodes)}
        stay = {found.base.get(k) for k in held} - {None}
        self._of = stages.of if stages is not None else (0,) * len(found.nodes)
        left = stages.left_before(len(stages.each)) if stages is not None else ()
        self._largest = max(found.sizes.values(), default=0)
        first: dict[tuple[Any, int], int] = {}
        size: dict[tuple[Any, int], int] = {}
        of: dict[int, list[tuple[Any, int]]] = {}

        def keep(key: tuple[Any, int], made_by: int, by: int, count: int) -> None:
            if key not in size:
                of.setdefault(made_by, []).append(key)
            size[key] = count
            first[key] = min(by, first.get(key, by))

        for s in found.saved:
            if s.of is not None:
                keep((s.storage, 0 if s.of in left else self._of[s.by]), s.of, s.by, s.bytes)
        taken = [
            (found.base.get(number[each]), k)
            for k, node in enumerate(found.nodes)
            if isinstance(node.target, Call)
            for each in node.all_input_nodes
        ]
        for base, by in [*taken, *((base, -1) for base in stay)]:
            if base is not None:  # regions are taken to save what they are given
                for key in of.get(base) or [(("value", base), 0)]:
                    keep(key, base, by, size.get(key, found.sizes.get(base, 0)))
        self._begins: Counter[int] = Counter()
        self._ends: Counter[int] = Counter()
        for key, by in first.items():
            self._begins[key[1]] += size[key]
            self._ends[by] += size[key]
        self._stage = 0
        self.bytes = self._begins[0]

    def comes_to(self, k: int) -> int:
        """Bytes while what an operation's backward asks for is had again, one result at a time, if
        it is not there yet."""
        while self._stage < self._of[k]:
            self._stage += 1
            self.bytes += self._begins[self._stage]
            if self._stage == self._of[k]:
                return self.bytes + self._largest
        return self.bytes

    def used_by(self, k: int) -> None:
        self.bytes -= self._ends[k]


class _Gradients:
    """Gradients on their way, by the operation whose result's they are."""

    def __init__(self) -> None:
        self.bytes = 0
        self.of: dict[int, list[int]] = {}
        self._users: list[int] = []
        self._sizes: list[int] = []

    def add(self, k: int, size: int, shared_with: int | None = None) -> None:
        """One more gradient of k's result: memory of its own, or that of another's."""
        if shared_with is None:
            self._users.append(1)
            self._sizes.append(size)
            self.bytes += size
            self.of.setdefault(k, []).append(len(self._sizes) - 1)
            return
        for which in self.of[shared_with]:
            self._users[which] += 1
            self.of.setdefault(k, []).append(which)

    def of_this_alone(self, k: int) -> int:
        """Bytes that go with the gradient of k's result."""
        return sum(self._sizes[which] for which in self.of[k] if self._users[which] == 1)

    def drop(self, k: int) -> None:
        for which in self.of.pop(k):
            self._users[which] -= 1
            if not self._users[which]:
                self.bytes -= self._sizes[which]

    def settle(self) -> int:
        """Several gradients of one result become their sum. Bytes of the largest one."""
        largest = 0
        for k, parts in list(self.of.items()):
            if len(parts) > 1:
                size = max(self._sizes[which] for which in parts)
                self.drop(k)
                self.add(k, size)
                largest = max(largest, size)
        return largest
