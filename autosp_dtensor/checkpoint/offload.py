"""Which values wait for backward on the host.

A region's inputs cannot be computed again, so they leave when the device cannot hold them even if
nothing else is kept. What would run again goes to the host instead where the way there and back is
shorter: copies are hidden behind a region's own computation, and cost time only beyond that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

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
        self.found, self.counts, self.device, self.host = found, counts, device, host
        self.inputs = {region: inputs.get(region, {}) for region in found}
        self.choices = choices
        self._forward = {region: forward_seconds(each, device) for region, each in found.items()}
        self._took = {r: [seconds_of(n, device) for n in each.nodes] for r, each in found.items()}
        self._spare: dict[tuple[Region, tuple[Cut, ...], int], int] = {}

    def given(self) -> int:
        """Bytes of all inputs that may move."""
        return sum(sum(each.values()) * self.counts[r] for r, each in self.inputs.items())

    def on_device(self, other: dict[Region, Choice] | None = None) -> int:
        """Bytes on the device, with some choices replaced: what stays, what finds no room on the
        host, and what is on its way.
        """
        choices = {**self.choices, **(other or {})}
        whole = sum(choice.bytes * self.counts[r] for r, choice in choices.items())
        gone = sum(choice.moved * self.counts[r] for r, choice in choices.items())
        flying = max((self._flying(r, choice) for r, choice in choices.items()), default=0)
        return self.given() + whole - min(gone, self.host) + flying

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
            moments = backward_moments(self.found[region], seeded=False, stages=choice.stages)
            late = (size for k, size in moments.items() if choice.stages.of[k] >= choice.fetch)
            self._spare[key] = max(moments.values()) - max(late, default=0)
        return choice.moved + max(0, choice.moved - self._spare[key])

    def shed(self, budget: int | None) -> None:
        """Move values until the rest fits: inputs first, then what is kept, large ones first."""
        for region, at in self._candidates():
            if budget is not None and self.on_device() <= budget:
                break
            choice = self.choices[region]
            tried = self.moving(region, choice, choice.moves | {at})
            helps = budget is None or self.on_device({region: tried}) < self.on_device()
            if tried.moved > choice.moved and helps:
                self.choices[region] = tried

    def _candidates(self) -> Iterator[tuple[Region, int]]:
        sized: list[tuple[bool, int, int, Region, int]] = []
        for order, (region, choice) in enumerate(self.choices.items()):
            count = self.counts[region]
            for at, size in self.inputs[region].items():
                sized.append((True, size * count, -order, region, at))
            saved = {s.storage: s for s in self.found[region].saved if s.of is not None}
            sizes: Counter[int] = Counter()
            for each in saved.values():
                assert each.of is not None
                sizes[each.of] += each.bytes
            for at in choice.stages.hold:
                sizes[at] += 0 if at in sizes else self.found[region].sizes.get(at, 0)
            for at, size in sizes.items():
                if at in choice.keep and size:
                    sized.append((False, size * count, -order, region, at))
        sized.sort(key=lambda each: (each[0], each[1], each[2], -each[4]), reverse=True)
        for _, _, _, region, at in sized:
            yield region, at

    def grow(self, budget: int, to_host: bool) -> None:
        """Keep more, on the host or on the device: what saves most seconds per byte first, as long
        as there is room.
        """
        while True:
            best: tuple[float, Region, Choice] | None = None
            for region, choice in self.choices.items():
                count = self.counts[region]
                for step in steps(self.found[region], choice, self.device):
                    more = step.keep - choice.keep if to_host else frozenset()
                    tried = self.moving(region, step, choice.moves | more)
                    gain = self._seconds(region, choice) - self._seconds(region, tried)
                    size = tried.moved - choice.moved if to_host else tried.bytes - choice.bytes
                    value = gain * count / max(size * count, 1)
                    if gain <= 0 or (best is not None and value <= best[0]):
                        continue
                    if to_host and self._gone({region: tried}) > self.host:
                        continue
                    if self.on_device({region: tried}) <= budget:
                        best = value, region, tried
            if best is None:
                return
            self.choices[best[1]] = best[2]

    def cut(self) -> None:
        """Have values again in stages where that takes no time."""
        for region, choice in self.choices.items():
            tried = with_cuts(self.found[region], choice, self.device)
            self.choices[region] = self.moving(region, tried, choice.moves)

    def policy(self, mode: str, budget: int | None) -> Policy:
        fits = budget is None or self.on_device() <= budget
        return Policy(mode, self.choices, self.device, self.seconds(), fits)

    def _gone(self, other: dict[Region, Choice]) -> int:
        choices = {**self.choices, **other}
        return sum(choice.moved * self.counts[r] for r, choice in choices.items())

    def seconds(self) -> float:
        """Of a step, beyond one that keeps all on the device."""
        return sum(self._seconds(r, choice) * self.counts[r] for r, choice in self.choices.items())

    def _seconds(self, region: Region, choice: Choice) -> float:
        """Of one call: what runs again, and the copies' time beyond that of the computation (twice
        as long in backward as in forward).
        """
        way = seconds_to_copy(choice.moved, self.device)
        forward = self._forward[region]
        late = max(0.0, way - forward) + max(0.0, way - 2 * forward - choice.seconds)
        return choice.seconds + late
