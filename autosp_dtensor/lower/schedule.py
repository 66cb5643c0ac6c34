"""The order in which a region's operations run: exchanges early, what needs them late."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Literal

from torch.fx import Graph, Node

from ..graph import facts
from .localize import Collective
from .regions import Call

__all__ = ["Step", "schedule"]

Step = tuple[Literal["run", "start", "finish"], Node]


def schedule(graph: Graph) -> list[Step]:
    """Operations of a region in the order to run them.

    An exchange starts as soon as its input exists. While it is on its way, operations that do not
    need it run, in their own order; it is finished when nothing else is left to do. One that would
    be finished at once is not split ("run"). Collectives, and calls of regions, which hold some,
    start in the order that they stand in: ranks agree on that one. Attention by groups of heads has
    two groups there at a time: what a third one is made of waits, as long as there is anything
    else to do.
    """
    return list(_joined(_Scheduler(graph).steps()))


class _Scheduler:
    def __init__(self, graph: Graph) -> None:
        self.nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.number = {node: k for k, node in enumerate(self.nodes)}
        self.missing = {
            node: sum(each in self.number for each in node.all_input_nodes) for node in self.nodes
        }
        self.ordered = [n for n in self.nodes if _communicates(n)]
        self.begun = 0  # of those
        self.ready: list[int] = []
        self.flying: list[Node] = []
        ends: dict[tuple[int, int], Node] = {}
        for node in self.nodes:
            turn = facts(node).turn
            if turn is not None and not _communicates(node):
                ends[turn] = node
        self.ends = {node: turn for turn, node in ends.items()}
        self.open = {*ends}  # turns that have not ended
        self.waiting: dict[tuple[int, int], list[Node]] = {}  # on the end of a turn

    def steps(self) -> Iterator[Step]:
        for node in self.nodes:
            if not self.missing[node]:
                self._may_run(node)
        done = 0
        while done < len(self.nodes):
            begins = self._begins()
            if begins is not None and is_exchange(begins):
                self.flying.append(begins)
                self.begun += 1
                yield "start", begins
                continue
            first = self.ready[0] if self.ready else None
            if begins is not None and (first is None or self.number[begins] < first):
                self.begun += 1
                node = begins
                yield "run", node
            elif first is not None:
                node = self.nodes[heapq.heappop(self.ready)]
                yield "run", node
            elif self.flying:
                node = self.flying.pop(0)
                yield "finish", node
            else:  # all that is left waits for each other
                self.open.clear()
                self._let_go([*self.waiting])
                continue
            done += 1
            self._done(node)

    def _begins(self) -> Node | None:
        """The next collective, if all that it takes is there."""
        if self.begun == len(self.ordered):
            return None
        node = self.ordered[self.begun]
        return None if self.missing[node] or self._waits_for(node) in self.open else node

    def _done(self, node: Node) -> None:
        for user in node.users:
            if user in self.missing:
                self.missing[user] -= 1
                if not self.missing[user]:
                    self._may_run(user)
        if node in self.ends:
            self.open.discard(self.ends[node])
            self._let_go([self.ends[node]])

    def _may_run(self, node: Node) -> None:
        """All that an operation takes is there. Collectives go by an order of their own."""
        if _communicates(node):
            return
        before = self._waits_for(node)
        if before in self.open:
            self.waiting.setdefault(before, []).append(node)
        else:
            heapq.heappush(self.ready, self.number[node])

    def _waits_for(self, node: Node) -> tuple[int, int] | None:
        turn = facts(node).turn
        return (turn[0], turn[1] - 2) if turn else None

    def _let_go(self, turns: list[tuple[int, int]]) -> None:
        for turn in turns:
            for node in self.waiting.pop(turn, ()):
                heapq.heappush(self.ready, self.number[node])


def _communicates(node: Node) -> bool:
    target = node.target
    return isinstance(target, Call) or (isinstance(target, Collective) and target.sends)


def is_exchange(node: Node) -> bool:
    return isinstance(node.target, Collective) and node.target.kind == "all_to_all"


def _joined(steps: Iterable[Step]) -> Iterator[Step]:
    """A start that its finish follows at once is one call."""
    held: Step | None = None
    for step in steps:
        if held is not None:
            if step == ("finish", held[1]):
                yield "run", held[1]
                held = None
                continue
            yield held
            held = None
        if step[0] == "start":
            held = step
        else:
            yield step
    if held is not None:
        yield held
