"""Which operations' memory is kept for backward, and which operations run again.

To keep a value costs its bytes for the whole step; not to keep it costs the time to run again what
made it, and what made that, back to values that are kept. Attention's time per byte grows with the
length of the sequence, a projection's does not: at long S attention is kept first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from ..capture.tap import Tap
from ..capture.targets import Opaque
from ..errors import UsageError
from ..graph import short_name
from ..lower import Call, Collective, Region
from .cost import DEVICES, Device, is_attention, is_product, seconds_of
from .record import Record, record
from .tile import Tile

__all__ = [
    "MODES",
    "Checkpoint",
    "Choice",
    "Policy",
    "asked",
    "choice_of",
    "kept_bytes",
    "name_of",
    "needed",
    "policy_of",
    "steps",
    "whole_bytes",
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

    keep: None where nothing runs again and nothing moves. moves: operations and inputs whose memory
    goes to the host. moved: its bytes, of which `inside` were made in the region.
    """

    keep: frozenset[int] | None
    hold: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    bytes: int = 0
    seconds: float = 0.0
    moves: frozenset[int] = frozenset()
    moved: int = 0
    inside: int = 0


@dataclass(frozen=True)
class Policy:
    """A choice for each region of a program."""

    mode: str = "none"
    choices: dict[Region, Choice] = field(default_factory=dict)
    device: Device = DEVICES["cpu"]

    @property
    def moves(self) -> bool:
        """Whether anything goes to the host."""
        return any(choice.moves for choice in self.choices.values())

    def of(self, region: Region) -> Choice | None:
        """The choice for a region that is in part run again, else None."""
        found = self.choices.get(region)
        return None if found is None or found.keep is None else found


def fixed(node: Node) -> bool:
    """Never run again: the user's hooks; calls of other regions, which see to themselves; losses by
    tiles, whose gradients are there.
    """
    target = node.target
    if isinstance(target, Tile):
        return target.sums_once
    return isinstance(target, Call) or (isinstance(target, Opaque) and isinstance(target.func, Tap))


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


def choice_of(found: Record, keep: Iterable[int], device: Device) -> Choice:
    """What keeping the memory of these operations comes to."""
    always = {k for k, node in enumerate(found.nodes) if fixed(node)}
    keep = frozenset(keep) | always
    wanted = {
        saved.by if saved.own else saved.of
        for saved in found.saved
        if saved.of is not None and saved.of not in keep
    }
    again, hold = needed(found.nodes, keep, wanted)
    seconds = sum(seconds_of(found.nodes[k], device) for k in again)
    return Choice(keep, hold, again, kept_bytes(found, keep, hold), seconds)


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
    regions: dict[Region, int], mode: str | Checkpoint, device: Device, budget: int | None = None
) -> Policy:
    """A choice for each region.

    Args:
        regions: how often each stands in the program.
        mode: "none", "full", "sequence", "auto" or a Checkpoint.
        budget: bytes that all regions together may keep, for "auto"; None: as much as they do.
    """
    if mode == "none" or (mode == "auto" and budget is None):
        return Policy("none", device=device)
    found = {region: record(region) for region in regions}
    if mode == "auto":
        assert budget is not None
        return Policy("auto", _within(found, regions, device, budget), device)
    return Policy(
        name_of(mode), {r: asked(each, mode, device) for r, each in found.items()}, device
    )


def name_of(mode: str | Checkpoint) -> str:
    """What `explain` calls it."""
    return mode if isinstance(mode, str) else f"keep {', '.join(mode.keep)}"


def asked(found: Record, mode: str | Checkpoint, device: Device) -> Choice:
    """What a mode that needs no budget says of one region; "none" and "auto" without one: all."""
    if mode in ("none", "auto"):
        return choice_of(found, range(len(found.nodes)), device)
    if isinstance(mode, str):
        mode = Checkpoint(("attention",) if mode == "sequence" else ())
    keep = [k for k, n in enumerate(found.nodes) if n.op == "call_function" and mode.keeps(n)]
    return choice_of(found, keep, device)


def _within(
    found: dict[Region, Record], counts: dict[Region, int], device: Device, budget: int
) -> dict[Region, Choice]:
    """From nothing kept, keep what saves most seconds per byte as long as it fits."""
    if sum(whole_bytes(each) * counts[region] for region, each in found.items()) <= budget:
        return {}
    choices = {region: choice_of(each, (), device) for region, each in found.items()}
    left = budget - sum(choice.bytes * counts[region] for region, choice in choices.items())
    while True:
        best: tuple[float, Region, Choice] | None = None
        for region, each in found.items():
            for tried in steps(each, choices[region], device):
                more = (tried.bytes - choices[region].bytes) * counts[region]
                gain = choices[region].seconds - tried.seconds
                if gain <= 0 or more > left:
                    continue
                value = gain * counts[region] / max(more, 1)
                if best is None or value > best[0]:
                    best = (value, region, tried)
        if best is None:
            return choices
        _, region, chosen = best
        left -= (chosen.bytes - choices[region].bytes) * counts[region]
        choices[region] = chosen


def steps(found: Record, choice: Choice, device: Device) -> Iterable[Choice]:
    """The choice with one more operation kept, or with one exchange and all it receives."""
    assert choice.keep is not None
    for at in choice.again:
        if found.base.get(at) == at or found.nodes[at].all_input_nodes:
            yield choice_of(found, choice.keep | {at}, device)
