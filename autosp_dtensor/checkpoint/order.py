"""Things after what they take, otherwise as they stand."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

__all__ = ["in_order"]

T = TypeVar("T", bound=Hashable)


def in_order(takes: Mapping[T, Collection[T]]) -> list[T]:
    """The keys, each after those that it takes. Keys on a circle, and what takes those, are left
    out.

    takes: for each thing, in the order that they stand in, others that it takes, each once.
    """
    every = list(takes)
    number = {each: k for k, each in enumerate(every)}
    users: dict[T, list[T]] = {each: [] for each in every}
    for each, taken in takes.items():
        for other in taken:
            users[other].append(each)
    missing = {each: len(taken) for each, taken in takes.items()}
    ready = [number[each] for each in every if not missing[each]]  # a heap, as it is sorted
    ordered: list[T] = []
    while ready:
        ordered.append(every[heapq.heappop(ready)])
        for user in users[ordered[-1]]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, number[user])
    return ordered
