"""In which stages backward has a region's values again, from its end to its start.

All at once, what attention needs would stand there while an MLP's gradients are made. So the run is
cut: behind an attention, what comes after it is had first, and around it, so that its backward has
not to wait beside what made its queries. An attention runs once: the stage that needs its result
first leaves it, with what its own backward asks for, to the stages that follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Node

from ..lower import Call, Collective
from .kinds import is_attention
from .record import Record

__all__ = ["Cut", "Stage", "Stages", "cut_places", "meets_others", "needed", "staged"]


@dataclass(frozen=True)
class Cut:
    """Before or after an operation, in the order that they run in."""

    at: int
    after: bool


@dataclass(frozen=True)
class Stage:
    """again: operations that run. leaves: attention among them whose results later stages need."""

    again: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Stages:
    """Numbers are places in the region's graph.

    of: the stage in which each operation's backward runs; 0 is the first. hold: kept operations
    whose results are taken. cuts: those before stage 1, 2, ... A stage behind an operation begins
    when the gradient of its result is there; the others when something of them is asked for.
    """

    of: tuple[int, ...]
    each: tuple[Stage, ...]
    hold: frozenset[int]
    cuts: tuple[Cut, ...]

    @property
    def again(self) -> frozenset[int]:
        return frozenset().union(*(stage.again for stage in self.each))

    @property
    def begins(self) -> dict[int, int]:
        """Operations whose result's gradient begins a stage."""
        return {cut.at: stage for stage, cut in enumerate(self.cuts, 1) if cut.after}

    def takes(self, stage: int, at: int) -> bool:
        """Whether what runs in a stage, or after it, may take the result of an attention: if
        anything of that stage comes after it."""
        of = self.of[at]
        return of > stage or (of == stage and Cut(at, after=True) not in self.cuts)

    def left_before(self, stage: int) -> frozenset[int]:
        """What earlier stages have left for this one."""
        return frozenset().union(*(each.leaves for each in self.each[:stage]))


def needed(
    nodes: list[Node], keep: Iterable[int], wanted: Iterable[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """(operations to run again so that `wanted` are had, kept ones whose results those take)."""
    number = {node: k for k, node in enumerate(nodes)}
    keep = frozenset(keep)
    again: set[int] = set()
    hold: set[int] = set()
    todo = list(wanted)
    while todo:
        at = todo.pop()
        if at in again or nodes[at].op == "placeholder":
            continue
        again.add(at)
        for each in nodes[at].all_input_nodes:
            taken = number[each]
            if each.op == "placeholder":
                continue
            if taken in keep:
                hold.add(taken)
            else:
                todo.append(taken)
    return frozenset(again), frozenset(hold)


def meets_others(node: Node) -> bool:
    """Whether other ranks have to run it as well."""
    target = node.target
    return isinstance(target, Call) or (isinstance(target, Collective) and target.sends)


def cut_places(found: Record) -> list[Cut]:
    """Around each attention that backward goes through, the last one first."""
    savers = {saved.by for saved in found.saved}
    attention = [k for k in savers if is_attention(found.nodes[k])]
    attention.sort(key=lambda k: -found.order[k])
    return [Cut(at, after) for after in (True, False) for at in attention]


def staged(found: Record, keep: frozenset[int], cuts: Iterable[Cut]) -> Stages:
    """The stages between these cuts, if `keep` is kept.

    Ranks have to meet in the same order, and what is asked for first may differ between them. So a
    stage that exchanges begins behind an attention, with the gradient of its result; cuts before
    one that would need more are left out.
    """
    left = sorted(set(cuts), key=lambda cut: -(found.order[cut.at] + cut.after))
    while True:
        stages = _between(found, keep, tuple(left))
        wrong = [
            cut
            for cut, stage in zip(left, stages.each[1:], strict=True)
            if not cut.after and any(meets_others(found.nodes[k]) for k in stage.again)
        ]
        if not wrong:
            return stages
        left.remove(wrong[0])


def _between(found: Record, keep: frozenset[int], cuts: tuple[Cut, ...]) -> Stages:
    limits = [found.order[cut.at] + cut.after for cut in cuts]
    of = tuple(sum(order < limit for limit in limits) for order in found.order)
    wanted: list[set[int]] = [set() for _ in range(len(cuts) + 1)]
    for saved in found.saved:
        if saved.of is not None and saved.of not in keep:
            wanted[of[saved.by]].add(saved.by if saved.own else saved.of)
    each: list[Stage] = []
    hold: frozenset[int] = frozenset()
    there = keep
    for number, asked in enumerate(wanted):
        again, taken = needed(found.nodes, there, asked - (there - keep))
        leaves = frozenset(k for k in again if of[k] > number and is_attention(found.nodes[k]))
        each.append(Stage(again, leaves))
        hold |= taken & keep
        there |= leaves
    return Stages(of, tuple(each), hold, cuts)
