"""One region -> one plain Python function for this rank; values are freed at their last use."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import Node

from ..capture.tap import Tap
from ..capture.targets import Opaque
from ..checkpoint import Tile
from ..graph import arg_nodes, exact, facts, result_nodes
from ..lower import Call, Collective, Drawn, Region, Step, bound, schedule
from ..lower import collectives as wire
from ..lower.exchange import Exchange, all_to_all
from ..lower.layout import take_shard
from ..lower.random import Seeded, mix
from ..lower.schedule import is_exchange

__all__ = ["Link", "compile_part", "compile_region"]


class Link:
    """How a rank takes part in collectives: its group, its number, the size of the axis."""

    def __init__(
        self, group: Any, rank: int, size: int, tap: Callable[..., Any] | None = None
    ) -> None:
        self.group, self.rank, self.size, self.tap = group, rank, size, tap


def compile_region(
    region: Region,
    link: Link,
    shared: dict[Any, Callable[..., Any]],
    *,
    marked: bool = False,
    cuts: Iterable[int] = (),
) -> Callable[..., tuple[Any, ...]]:
    """A function of (seed, children, states..., inputs...) that returns the region's results.

    children: what to call for each of `region.calls`, in order.

    Args:
        shared: compiled functions by source and constants; regions that are equal get the same one.
        marked: the function takes a frame after `children` and tells it which operation runs.
        cuts: operations whose results the frame gives back to go on with.
    """
    steps = schedule(region.graph)
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    output = next(n for n in region.graph.nodes if n.op == "output")
    writer = _Writer(link, region, marked, frozenset(cuts))
    return _compiled(writer, writer.write(steps, inputs, list(result_nodes(output))), shared)


def compile_part(
    region: Region, link: Link, shared: dict[Any, Callable[..., Any]], numbers: frozenset[int]
) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """Some operations of a region again: a function of (seed, children, frame, values...).

    Returns:
        it, and the numbers of the nodes whose values it takes.
    """
    number = {node: k for k, node in enumerate(region.graph.nodes)}
    steps = [step for step in schedule(region.graph) if number[step[1]] in numbers]
    taken = {
        each for _, node in steps for each in node.all_input_nodes if number[each] not in numbers
    }
    inputs = sorted(taken, key=lambda n: number[n])
    writer = _Writer(link, region, True)
    return _compiled(writer, writer.write(steps, inputs, []), shared), tuple(
        number[n] for n in inputs
    )


def _compiled(writer: _Writer, source: str, shared: dict[Any, Callable[..., Any]]) -> Any:
    key = (source, tuple(writer.keys))
    if key not in shared:
        scope: dict[str, Any] = dict(writer.constants)
        exec(compile(source, "<autosp region>", "exec"), scope)
        shared[key] = scope["region"]
    return shared[key]


class _Writer:
    def __init__(
        self, link: Link, region: Region, marked: bool, cuts: frozenset[int] = frozenset()
    ) -> None:
        self.link, self.marked, self.cuts = link, marked, cuts
        self.number = {node: k for k, node in enumerate(region.graph.nodes)}
        self.children = {call: index for index, call in enumerate(region.calls)}
        self.constants: dict[str, Any] = {}
        self.keys: list[Any] = []
        self.draws: dict[Node, int] = {}
        self._names: dict[Any, str] = {}

    def write(self, steps: list[Step], inputs: list[Node], results: list[Node]) -> str:
        names = {node: f"v{number}" for node, number in self.number.items()}
        drawn = [n for n in self.number if isinstance(n.target, Drawn)]
        self.draws = {node: number for number, node in enumerate(drawn, 1)}
        last = _last_uses(steps, results)
        lines: list[str] = []
        for number, (kind, node) in enumerate(steps):
            if self.marked:
                lines.append(f"frame.at = {self.number[node]}")
            dead = [names[n] for n in last.get(number, ())]
            if kind != "finish" and is_exchange(node):  # lets go of what it has packed
                given = ", ".join(self._text(a, names) for a in bound(node.args, self.link.rank))
                lines.append(f"given = [{given}]")
                if gone := [name for name in dead if name != names[node]]:
                    lines.append("del " + ", ".join(gone))
                    dead = [name for name in dead if name not in gone]
            lines.append(self._line(kind, node, names))
            if self.marked and kind != "start":
                lines.append(f"frame.made({self.number[node]}, {names[node]})")
            if self.number[node] in self.cuts:
                lines.append(f"{names[node]} = frame.cut({self.number[node]}, {names[node]})")
            if dead:
                lines.append("del " + ", ".join(dead))
        lines.append(f"return ({''.join(f'{names[n]}, ' for n in results)})")
        head = [
            "seed",
            "children",
            *(["frame"] if self.marked else []),
            *(names[n] for n in inputs),
        ]
        return f"def region({', '.join(head)}):\n" + "".join(f"    {line}\n" for line in lines)

    def _line(self, kind: str, node: Node, names: dict[Node, str]) -> str:
        if kind == "run":
            return f"{names[node]} = {self._call(node, names)}"
        if kind == "finish":
            only = "[0]" if len(node.target.moves) == 1 else ""  # type: ignore[union-attr]
            return f"{names[node]} = {names[node]}.finish(){only}"
        return f"{names[node]} = {self._exchange(Exchange, node.target)}"

    def _exchange(self, call: Any, target: Any) -> str:
        """Of what the line before put into `given`."""
        group, moves = self._constant(self.link.group, key="group"), self._constant(target.moves)
        given = [str(self.link.rank), moves, "given", f"tokens={target.tokens}"]
        if any(target.contiguous):
            given.append(f"contiguous={target.contiguous}")
        return f"{self._constant(call)}({group}, {', '.join(given)})"

    def _call(self, node: Node, names: dict[Node, str]) -> str:
        target: Any = node.target
        if isinstance(target, Call):
            index = self.children[target]
            seed = f"{self._constant(mix)}(seed, {-1 - index})"
            args = ", ".join([seed, *(names[a] for a in arg_nodes(node))])
            return f"children[{index}]({args})"
        rank = self.link.rank
        args = [self._text(a, names) for a in bound(node.args, rank)]
        if target is operator.getitem and isinstance(node.args[1], int):
            return f"{args[0]}[{node.args[1]}]"
        kwargs = [f"{k}={self._text(v, names)}" for k, v in bound(node.kwargs, rank).items()]
        if isinstance(target, Collective):
            return self._collective(target, args)
        if isinstance(target, Tile):
            call = self._constant(target.bind(rank), key=(target, rank))
            return f"{call}({', '.join(args)})"
        if isinstance(target, Opaque) and isinstance(target.func, Tap):
            assert self.link.tap is not None
            shown = [facts(n) for n in arg_nodes(node)]
            hooks = self.link.tap(
                target.func, tuple(f.placement for f in shown), tuple(f.meta for f in shown)
            )
            return f"{self._constant(hooks, key=target.func)}({', '.join(args)})"
        if isinstance(target, Drawn):
            number = self.draws[node]
            key = (target, rank if target.sharded else None, number)
            name = self._constant(Seeded(target.target, number, key[1]), key=key)
            return f"{name}({', '.join(['seed', *args, *kwargs])})"
        return f"{self._constant(target)}({', '.join([*args, *kwargs])})"

    def _collective(self, target: Collective, args: list[str]) -> str:
        link = self.link
        group = self._constant(link.group, key="group")
        moves, rank = self._constant(target.moves), link.rank
        if target.kind == "all_to_all":
            call = self._exchange(all_to_all, target)
            return call if len(target.moves) > 1 else f"{call}[0]"
        if target.kind == "slice":
            return f"{self._constant(take_shard)}({args[0]}, {moves}[0][1], {rank})"
        if target.kind == "relayout":
            return f"{self._constant(wire.relayout)}({group}, {rank}, *{moves}[0], {args[0]})"
        if target.kind == "all_gather":
            return f"{self._constant(wire.all_gather)}({group}, {rank}, {moves}[0][0], {args[0]})"
        if target.kind == "reduce_scatter":
            name = self._constant(wire.reduce_scatter)
            return f"{name}({group}, {rank}, {moves}[0][1], {args[0]})"
        if target.kind == "all_reduce":
            return f"{self._constant(wire.all_reduce)}({group}, {args[0]})"
        if target.kind == "scale_grad":
            return f"{self._constant(wire.scale_grad)}({target.factor!r}, {args[0]})"
        assert target.kind == "mean_grad", target.kind
        return f"{self._constant(wire.mean_grad)}({group}, {link.size}, {args[0]})"

    def _text(self, value: Any, names: dict[Node, str]) -> str:
        """An argument as source; a subclass (an enum, numpy's floats) has no text that means it."""
        kind = type(value)
        if isinstance(value, Node):
            return names[value]
        if value is None or value is Ellipsis or kind in (bool, int, str):
            return repr(value)
        if kind is float and math.isfinite(value):
            return repr(value)
        if isinstance(value, tuple):
            parts = "".join(self._text(v, names) + ", " for v in value)
            return f"{self._constant(kind)}({parts})" if hasattr(kind, "_fields") else f"({parts})"
        if isinstance(value, list):
            return f"[{', '.join(self._text(v, names) for v in value)}]"
        if isinstance(value, dict):
            items = (f"{self._text(k, names)}: {self._text(v, names)}" for k, v in value.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._text(p, names) for p in parts)})"
        return self._constant(value, key=exact(value))

    def _constant(self, value: Any, key: Any = None) -> str:
        key = value if key is None else key
        try:
            known = (type(key), key)
            hash(known)
        except TypeError:
            known = (type(key), id(key))
        if known not in self._names:
            name = f"c{len(self._names)}"
            self._names[known] = name
            self.constants[name] = value
            self.keys.append(known)
        return self._names[known]


def _last_uses(steps: list[Step], results: list[Node]) -> dict[int, list[Node]]:
    """For each step, the values that no later one uses; an exchange's input goes when it starts."""
    last: dict[Node, int] = {}
    for number, (kind, node) in enumerate(steps):
        if kind != "finish":
            for used in node.all_input_nodes:
                last[used] = number
        if kind != "start":
            last.setdefault(node, number)
    returned = set(results)
    dead: dict[int, list[Node]] = {}
    for value, number in last.items():
        if value not in returned:
            dead.setdefault(number, []).append(value)
    return dead
