"""Which values wait for backward on the host.

A region's inputs cannot be computed again, so they leave when the device cannot hold them even if
nothing else is kept. What would run again goes to the host instead where the way there and back is
shorter: copies are hidden behind a region's own computation, and cost time only beyond that.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..cost import Device, seconds_to_copy
from ..graph import arg_nodes, result_nodes
from ..lower import Call, Region
from .choose import Checkpoint, Choice, Policy, asked, kept_bytes, least, name_of, steps, with_cuts
from .cost import seconds_of
from .cuts import forward_seconds
from .operands import local_bytes
from .peak import backward_moments
from .record import Record, record
from .stages import Cut, Stages

__all__ = ["moving_inputs", "offloading"]


def moving_inputs(root: Region, found: Record) -> dict[Region, dict[int, int]]:
    """For each region called from the root, the inputs whose memory nobody else holds, in some of
    its calls at least: their places in its graph, and bytes, as the mean of all its calls. What
    several regions get (rotary tables) and what the root itself saves or gives back stays on the
    device anyway.

    Args:
        found: the root's record.
    """
    number = {node: k for k, node in enumerate(found.nodes)}
    base = {node: found.base.get(k) for node, k in number.items()}
    calls = [node for node in found.nodes if isinstance(node.target, Call)]
    takers = Counter(each for call in calls for each in set(arg_nodes(call)))
    held = {number[node] for node in found.kept_bytes()}
    held |= {k for node in result_nodes(found.nodes[-1]) if (k := base[node]) is not None}
    total: dict[Region, Counter[int]] = {}
    times = Counter(node.target.region for node in calls if isinstance(node.target, Call))
    for node in calls:
        assert isinstance(node.target, Call)
        region = node.target.region
        inputs = [(k, n) for k, n in enumerate(region.graph.nodes) if n.op == "placeholder"]
        sizes = total.setdefault(region, Counter())
        for (k, placeholder), given in zip(
            inputs[len(region.states) :], arg_nodes(node), strict=True
        ):
            if takers[given] == 1 and base[given] is not None and base[given] not in held:
                sizes[k] += local_bytes(placeholder)
    return {
        region: {k: size // times[region] for k, size in sizes.items()}
        for region, sizes in total.items()
    }


def offloading(
    regions: dict[Region, int],
    mode: str | Checkpoint,
    device: Device,
    budget: int | None,
    host: int,
    inputs: dict[Region, dict[int, int]],
    *,
    cut: bool = False,
    recorded: Callable[[Region], Record] = record,
) -> Policy:
    """As `policy_of`, with host memory to put values in.

    Args:
        budget: bytes that what regions keep and their inputs may take together on the device; None:
            everything moves.
        host: bytes of host memory.
        inputs: of each region, those that may move; from `moving_inputs`.
        cut, recorded: as in `policy_of`.
    """
    found = {region: recorded(region) for region in regions}

    def started(choices: dict[Region, Choice]) -> _Plan:
        return _Plan(found, regions, device, host, inputs, choices)

    plan = started({region: asked(each, mode, device) for region, each in found.items()})
    if budget is not None and mode in ("none", "auto") and plan.on_device() <= budget:
        return Policy(name_of(mode), device=device)
    if mode != "auto" or budget is None:
        plan.shed(budget)
        return plan.policy(name_of(mode), budget)
    plans = []
    for order in ((False, True), (True, False)):  # what is kept first takes the other's room
        plan = started({region: least(each, device, cut=cut) for region, each in found.items()})
        plan.shed(budget)
        for to_host in order:
            plan.grow(budget, to_host)
        plans.append(plan)
    plan = min(plans, key=_Plan.seconds)
    if not cut:
        plan.cut()
    return plan.policy("auto", budget)


@dataclass(frozen=True)
class _Part:
    """Calls of a region, one after another, that have the same choice."""

    region: Region
    count: int
    choice: Choice


class _Plan:
    """Choices for regions while they change; `counts`: how often each region runs."""

    def __init__(
        self,
        found: dict[Region, Record],
        counts: dict[Region, int],
        device: Device,
        host: int,
        inputs: dict[Region, dict[int, int]],
        choices: dict[Region, Choice],
    ) -> None:
        self.found, self.device, self.host = found, device, host
        self.inputs = {region: inputs.get(region, {}) for region in found}
        self.parts = [_Part(region, counts[region], choice) for region, choice in choices.items()]
        self._forward = {region: forward_seconds(each, device) for region, each in found.items()}
        self._took = {
            region: [seconds_of(n, device) if n.op == "call_function" else 0.0 for n in each.nodes]
            for region, each in found.items()
        }
        self._spare: dict[tuple[Region, tuple[Cut, ...], int], int] = {}

    def on_device(self, parts: Sequence[_Part] | None = None) -> int:
        """Bytes on the device: what stays, what finds no room on the host, and what is on its way.

        parts: what is tried, instead of those there are.
        """
        parts = self.parts if parts is None else parts
        given = sum(sum(self.inputs[each.region].values()) * each.count for each in parts)
        whole = sum(each.choice.bytes * each.count for each in parts)
        flying = max((self._flying(each.region, each.choice) for each in parts), default=0)
        return given + whole - min(self._gone(parts), self.host) + flying

    def _gone(self, parts: Sequence[_Part]) -> int:
        return sum(each.choice.moved * each.count for each in parts)

    def moving(self, region: Region, choice: Choice, moves: frozenset[int]) -> Choice:
        """The choice with these operations and inputs on the host."""
        found = self.found[region]
        moves = frozenset(k for k in moves if k in choice.keep or k in self.inputs[region])
        inside = kept_bytes(found, moves, choice.stages.hold & moves)
        taken = sum(size for k, size in self.inputs[region].items() if k in moves)
        moved = inside + taken
        fetch = self._fetch(region, choice.stages, moved)
        return replace(choice, moves=moves, moved=moved, inside=inside, fetch=fetch)

    def _fetch(self, region: Region, stages: Stages, moved: int) -> int:
        """The last stage that, with those after it, takes as long as to fetch so many bytes."""
        way, rest = seconds_to_copy(moved, self.device), 0.0
        took = self._took[region]
        for stage in range(len(stages.each) - 1, 0, -1):
            rest += sum(2 * took[k] for k, of in enumerate(stages.of) if of == stage)
            rest += sum(took[k] for k in stages.each[stage].again)
            if rest >= way:
                return stage
        return 0

    def _flying(self, region: Region, choice: Choice) -> int:
        """Bytes of moved values on the device beside all else at the fullest moment: those in use,
        and those on the way, if it is late enough."""
        if not choice.fetch:
            return 2 * choice.moved
        key = region, choice.stages.cuts, choice.fetch
        if key not in self._spare:
            moments = backward_moments(self.found[region], stages=choice.stages)
            late = (size for k, size in moments.items() if choice.stages.of[k] >= choice.fetch)
            self._spare[key] = max(moments.values()) - max(late, default=0)
        return choice.moved + max(0, choice.moved - self._spare[key])

    def shed(self, budget: int | None) -> None:
        """Move values until the rest fits: inputs first, then what is kept, large ones first."""
        for number, at in self._candidates():
            if budget is not None and self.on_device() <= budget:
                break
            part = self.parts[number]
            choice = self.moving(part.region, part.choice, part.choice.moves | {at})
            tried = [*self.parts]
            tried[number] = replace(part, choice=choice)
            helps = budget is None or self.on_device(tried) < self.on_device()
            if choice.moved > part.choice.moved and helps:
                self.parts = tried

    def _candidates(self) -> Iterator[tuple[int, int]]:
        sized: list[tuple[bool, int, int, int]] = []
        for number, part in enumerate(self.parts):
            for at, size in self.inputs[part.region].items():
                sized.append((True, size * part.count, -number, -at))
            found = self.found[part.region]
            saved = {s.storage: s for s in found.saved if s.of is not None}
            sizes: Counter[int] = Counter()
            for each in saved.values():
                assert each.of is not None
                sizes[each.of] += each.bytes
            for at in part.choice.stages.hold:
                sizes[at] += 0 if at in sizes else found.sizes.get(at, 0)
            for at, size in sizes.items():
                if at in part.choice.keep and size:
                    sized.append((False, size * part.count, -number, -at))
        for _, _, number, at in sorted(sized, reverse=True):
            yield -number, -at

    def grow(self, budget: int, to_host: bool) -> None:
        """Keep more, on the host or on the device: what saves most seconds per byte first, as long
        as there is room. What has none for all calls of a part is kept by as many as it has it for;
        they are a part of their own then."""
        full: list[_Part] = []
        while True:
            best: tuple[float, int, list[_Part], list[_Part]] | None = None
            for number, part in enumerate(self.parts):
                if part in full:
                    continue
                for step in steps(self.found[part.region], part.choice, self.device):
                    more = step.keep - part.choice.keep if to_host else frozenset()
                    choice = self.moving(part.region, step, part.choice.moves | more)
                    gain = self._seconds(part) - self._seconds(replace(part, choice=choice))
                    size = choice.moved - part.choice.moved if to_host else (
                        choice.bytes - part.choice.bytes
                    )  # fmt: skip
                    value = gain / max(size, 1)
                    if gain <= 0 or (best is not None and value <= best[0]):
                        continue
                    count = self._room_for(number, choice, budget, to_host)
                    if count:
                        split = _split(part, choice, count)
                        best = value, number, split, split if count < part.count else []
            if best is None:
                return
            _, number, split, closed = best
            self.parts[number : number + 1] = split
            full += closed

    def _room_for(self, number: int, choice: Choice, budget: int, to_host: bool) -> int:
        """For how many calls of a part there is room if they have this choice."""

        def fits(count: int) -> bool:
            tried = [*self.parts]
            tried[number : number + 1] = _split(self.parts[number], choice, count)
            return self.on_device(tried) <= budget and (
                not to_host or self._gone(tried) <= self.host
            )

        most = self.parts[number].count
        if fits(most):
            return most
        return bisect.bisect_left(range(1, most), True, key=lambda count: not fits(count))

    def cut(self) -> None:
        """Have values again in stages where that takes no time."""
        for number, part in enumerate(self.parts):
            choice = with_cuts(self.found[part.region], part.choice, self.device)
            choice = self.moving(part.region, choice, part.choice.moves)
            self.parts[number] = replace(part, choice=choice)

    def policy(self, mode: str, budget: int | None) -> Policy:
        fits = budget is None or self.on_device() <= budget
        first: dict[Region, Choice] = {}
        last: dict[Region, tuple[tuple[int, Choice], ...]] = {}
        for each in self.parts:
            if each.region in first:
                last[each.region] = *last.get(each.region, ()), (each.count, each.choice)
            first.setdefault(each.region, each.choice)
        return Policy(mode, first, self.device, self.seconds(), fits, last)

    def seconds(self) -> float:
        """Of a step, beyond one that keeps all on the device."""
        return sum(self._seconds(each) * each.count for each in self.parts)

    def _seconds(self, part: _Part) -> float:
        """Of one call: what runs again, and the copies' time beyond that of the computation (twice
        as long in backward as in forward).
        """
        way = seconds_to_copy(part.choice.moved, self.device)
        forward = self._forward[part.region]
        late = max(0.0, way - forward) + max(0.0, way - 2 * forward - part.choice.seconds)
        return part.choice.seconds + late


def _split(part: _Part, choice: Choice, count: int) -> list[_Part]:
    """A part whose last calls, so many, have another choice."""
    parts = replace(part, count=part.count - count), replace(part, count=count, choice=choice)
    return [each for each in parts if each.count]
