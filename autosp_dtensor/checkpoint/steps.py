"""The operations of a tile, one after another, for one part of the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from ..graph import result_nodes
from ..lower import bound
from ..place.rule import Slot, fill

__all__ = ["Steps"]


@dataclass(frozen=True)
class Step:
    """A call; values stand in its arguments as slots. dead: what no later step takes."""

    target: Callable[..., Any]
    args: Any
    kwargs: Any
    dead: tuple[int, ...]


@dataclass(frozen=True)
class Steps:
    """A body with one part's sizes. key: equal for parts whose steps are equal."""

    steps: tuple[Step, ...]
    inputs: int
    results: tuple[int, ...]
    key: str

    @staticmethod
    def of(body: Graph, part: int) -> Steps:
        """part: the rank on the axis of tiles."""
        number = {node: k for k, node in enumerate(n for n in body.nodes if n.op != "output")}
        calls = [node for node in number if node.op == "call_function"]
        results = result_nodes(next(n for n in body.nodes if n.op == "output"))

        def slot(value: Any) -> Any:
            return Slot(number[value]) if isinstance(value, Node) else value

        def slots(value: Any) -> Any:
            return map_aggregate(bound(value, part), slot)

        last: dict[Node, Node] = {}
        for node in calls:
            for used in (*node.all_input_nodes, node):
                last[used] = node
        made = []
        for node in calls:
            dead = [number[u] for u, at in last.items() if at is node and u not in results]
            made.append(Step(node.target, slots(node.args), slots(node.kwargs), tuple(dead)))  # type: ignore[arg-type]
        key = "\n".join(f"{step.args} {step.kwargs}" for step in made)
        return Steps(tuple(made), len(number) - len(calls), tuple(number[r] for r in results), key)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results for one part of each input that is cut, and the others whole."""
        values: list[Any] = [*tensors]
        del tensors
        for step in self.steps:
            args, kwargs = fill(step.args, values), fill(step.kwargs, values)
            values.append(step.target(*args, **kwargs))
            del args, kwargs
            for k in step.dead:
                values[k] = None
        return tuple(values[k] for k in self.results)
