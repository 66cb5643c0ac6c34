"""Which operations' memory is kept for backward, and which operations run again.

To keep a value costs its bytes for the whole step; not to keep it costs the time to run again what
made it, and what made that, back to values that are kept. Attention's time per byte grows with the
length of the sequence, a projection's does not: at long S attention is kept first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from ..capture.tap import Tap
from ..capture.targets import Opaque
from ..cost import DEVICES, Device
from ..errors import UsageError
from ..graph import short_name
from ..lower import Call, Collective, Region
from .cuts import FREE, lower_cuts, seconds_again
from .kinds import is_attention, is_product
from .record import Record, record
from .stages import Cut, Stages, staged
from .tile import Tile

__all__ = [
    "MODES",
    "Checkpoint",
    "Choice",
    "Policy",
    "asked",
    "choice_of",
    "kept_bytes",
    "least",
    "name_of",
    "policy_of",
    "steps",
    "whole_bytes",
    "with_cuts",
]

_GROUPS = {
    "attention": is_attention,
    "products": is_product,
    "exchanges": lambda node: isinstance(node.target, Collective) and node.target.sends,
}
MODES = ("auto", "none", "full", "sequence")


@dataclass(frozen=True)
class Checkpoint:
    """An explicit choice for `parallelize(checkpoint=...)`.

    Args:
        keep: what is kept of each region; all else runs again in backward. "attention" (its output
            and log-sum-exp), "products" (of matrices), "exchanges" (what they receive), or names of
            operations as `explain` prints them.
    """

    keep: tuple[str, ...] = ("attention",)

    def __post_init__(self) -> None:
        if isinstance(self.keep, str) or not all(isinstance(name, str) for name in self.keep):
            raise UsageError(
                "Checkpoint takes a tuple of names.",
                where="Checkpoint(keep=...)",
                have=f"keep={self.keep!r}",
                why="each name stands for operations whose results are kept",
                fix='for example Checkpoint(keep=("attention", "products"))',
            )

    def keeps(self, node: Node) -> bool:
        """Whether it names this operation."""
        name = short_name(node.target)
        return any(_GROUPS[k](node) if k in _GROUPS else k == name for k in self.keep)


@dataclass(frozen=True)
class Choice:
    """What is kept of one region, what that takes in bytes, and what running the rest again takes.

    stages: in which the rest runs again. moves: operations and inputs whose memory goes to the
    host. moved: its bytes, of which `inside` were made in the region. fetch: the stage from which
    on backward fetches what the region before needs.
    """

    keep: frozenset[int]
    stages: Stages
    bytes: int = 0
    seconds: float = 0.0
    moves: frozenset[int] = frozenset()
    moved: int = 0
    inside: int = 0
    fetch: int = 0

    @property
    def again(self) -> frozenset[int]:
        """Operations that run again, in whichever stage."""
        return self.stages.again


@dataclass(frozen=True)
class Policy:
    """A choice for each region of a program; its last calls may keep more than those before.

    last: (how many of a region's calls, their choice), of one after another, up to the last call.
    The last ones, as what they keep is the first that backward lets go of.
    """

    mode: str = "none"
    choices: dict[Region, Choice] = field(default_factory=dict)
    device: Device = DEVICES["cpu"]
    seconds: float = 0.0  # of a step, beyond one that keeps all on the device
    fits: bool = True
    last: dict[Region, tuple[tuple[int, Choice], ...]] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether anything goes to the host."""
        return any(choice.moves for region in self.choices for choice in self.all_of(region))

    def all_of(self, region: Region) -> list[Choice]:
        """The choices that its calls have, whichever they are."""
        return [choice for _, choice in self.of(region, 0)]

    def of(self, region: Region, count: int) -> list[tuple[int, Choice]]:
        """The choices for so many calls of a region that is in part run again, in order, each with
        how many calls it is for; none if nothing of it runs again."""
        if region not in self.choices:
            return []
        last = self.last.get(region, ())
        first = count - sum(each for each, _ in last)
        return [(first, self.choices[region]), *last]

    def of_call(self, region: Region, following: int) -> Choice | None:
        """The choice for one call, which so many more of the region follow."""
        for count, choice in reversed(self.last.get(region, ())):
            if following < count:
                return choice
            following -= count
        return self.choices.get(region)


def fixed(node: Node) -> bool:
    """Never run again: the user's hooks; calls of other regions, which see to themselves; losses by
    tiles, whose gradients are there.
    """
    target = node.target
    if isinstance(target, Tile):
        return target.sums_once
    return isinstance(target, Call) or (isinstance(target, Opaque) and isinstance(target.func, Tap))


def choice_of(
    found: Record, keep: Iterable[int], device: Device, cuts: Iterable[Cut] = ()
) -> Choice:
    """What keeping the memory of these operations comes to."""
    keep = always(found) | frozenset(keep)
    stages = staged(found, keep, cuts)
    seconds = seconds_again(found, stages, device)
    return Choice(keep, stages, kept_bytes(found, keep, stages.hold), seconds)


def always(found: Record) -> frozenset[int]:
    return frozenset(k for k, node in enumerate(found.nodes) if fixed(node))


def kept_bytes(found: Record, keep: frozenset[int], hold: frozenset[int]) -> int:
    """Bytes of what these operations save, and of results that are held for what runs again."""
    storages = {s.storage: s.bytes for s in found.saved if s.of in keep}
    covered = {s.of for s in found.saved if s.of in keep}
    extra = sum(found.sizes.get(k, 0) for k in hold if found.base.get(k) not in covered)
    return sum(storages.values()) + extra


def whole_bytes(found: Record) -> int:
    """Bytes that are kept if nothing runs again."""
    return sum({s.storage: s.bytes for s in found.saved if s.of is not None}.values())


def policy_of(
    regions: dict[Region, int],
    mode: str | Checkpoint,
    device: Device,
    budget: int | None = None,
    *,
    cut: bool = False,
    recorded: Callable[[Region], Record] = record,
) -> Policy:
    """A choice for each region.

    Args:
        regions: how often each stands in the program.
        mode: "none", "full", "sequence", "auto" or a Checkpoint.
        budget: bytes that all regions together may keep, for "auto"; None: as much as they do.
        cut: "auto" has values again in stages, as "full" does, also where that takes time.
        recorded: gives a region's record; who asks more than once has a cache of them.
    """
    if mode == "none" or (mode == "auto" and budget is None):
        return Policy("none", device=device)
    found = {region: recorded(region) for region in regions}
    if mode == "auto":
        assert budget is not None
        return _within(found, regions, device, budget, cut)
    choices = {r: asked(each, mode, device) for r, each in found.items()}
    return Policy(name_of(mode), choices, device, _seconds(choices, {}, regions))


def _seconds(
    choices: dict[Region, Choice],
    last: dict[Region, tuple[tuple[int, Choice], ...]],
    counts: dict[Region, int],
) -> float:
    given = Policy(choices=choices, last=last)
    return sum(n * choice.seconds for r in choices for n, choice in given.of(r, counts[r]))


def name_of(mode: str | Checkpoint) -> str:
    """What `explain` calls it."""
    return mode if isinstance(mode, str) else f"keep {', '.join(mode.keep) or 'nothing'}"


def asked(found: Record, mode: str | Checkpoint, device: Device) -> Choice:
    """What a mode that needs no budget says of one region; "none" and "auto" without one: all."""
    if mode in ("none", "auto"):
        return choice_of(found, range(len(found.nodes)), device)
    most = math.inf if mode == "full" else FREE
    if isinstance(mode, str):
        mode = Checkpoint(("attention",) if mode == "sequence" else ())
    keep = [k for k, n in enumerate(found.nodes) if n.op == "call_function" and mode.keeps(n)]
    return with_cuts(found, choice_of(found, keep, device), device, most)


def with_cuts(found: Record, choice: Choice, device: Device, most: float = FREE) -> Choice:
    """The choice with what runs again cut into stages, where backward then holds less."""
    cuts = lower_cuts(found, choice.keep, device, most)
    tried = choice_of(found, choice.keep, device, cuts)
    return tried if tried.bytes <= choice.bytes else choice


def least(found: Record, device: Device, *, cut: bool) -> Choice:
    """Nothing kept: what "auto" starts from."""
    return asked(found, "full", device) if cut else choice_of(found, (), device)


def _within(
    found: dict[Region, Record], counts: dict[Region, int], device: Device, budget: int, cut: bool
) -> Policy:
    """From nothing kept, keep what saves most seconds per byte as long as it fits. What does not
    fit for all calls of a region is kept by as many as it fits for."""
    whole = sum(whole_bytes(each) * counts[region] for region, each in found.items())
    if whole <= budget:
        return Policy("auto", device=device)
    choices = {region: least(each, device, cut=cut) for region, each in found.items()}
    left = budget - sum(choice.bytes * counts[region] for region, choice in choices.items())
    fits = left >= 0
    last: dict[Region, tuple[tuple[int, Choice], ...]] = {}
    while True:
        best: tuple[float, int, Region, Choice] | None = None
        for region, each in found.items():
            for tried in steps(each, choices[region], device) if region not in last else ():
                more = tried.bytes - choices[region].bytes
                gain = choices[region].seconds - tried.seconds
                if gain <= 0 or more > left:
                    continue
                value = gain / max(more, 1)
                if best is None or value > best[0]:
                    best = (value, more, region, tried)
        if best is None:
            break
        _, more, region, chosen = best
        count = min(counts[region], left // more if more > 0 else counts[region])
        left -= more * count
        if count < counts[region]:
            last[region] = ((count, chosen),)
        else:
            choices[region] = chosen
    if not cut:
        choices = {r: with_cuts(found[r], choice, device) for r, choice in choices.items()}
        last = {
            region: tuple((n, with_cuts(found[region], choice, device)) for n, choice in each)
            for region, each in last.items()
        }
    return Policy("auto", choices, device, _seconds(choices, last, counts), fits, last)


def steps(found: Record, choice: Choice, device: Device) -> Iterable[Choice]:
    """The choice with one more operation kept, or with one exchange and all it receives."""
    for at in choice.again:
        if found.base.get(at) == at or found.nodes[at].all_input_nodes:
            yield choice_of(found, choice.keep | {at}, device, choice.stages.cuts)
