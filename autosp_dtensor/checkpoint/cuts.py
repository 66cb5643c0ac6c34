"""Where having values again in stages pays: backward's fullest moment against the time it takes."""

from __future__ import annotations

import math

from ..cost import Device
from ..lower import Call
from .cost import seconds_of
from .peak import backward_moments
from .record import Record
from .stages import Cut, Stages, cut_places, staged
from .tile import Tile

__all__ = ["FREE", "forward_seconds", "lower_cuts", "seconds_again"]

FREE = 0.01  # of a region's forward: what a stage may cost where memory was not asked for
_WORTH = 0.05  # of backward's fullest moment


def lower_cuts(
    found: Record, keep: frozenset[int], device: Device, most: float = math.inf
) -> tuple[Cut, ...]:
    """The cuts by which a region's backward holds less, before them, than it would.

    What is estimated is not exact: a cut is not held to lower the fullest moment of all.

    Args:
        most: how much more time a cut may take, as a share of the region's forward.
    """
    best = staged(found, keep, cut_places(found))
    moments = backward_moments(found, stages=best)
    for cut in cut_places(found):
        if cut not in best.cuts:
            continue
        tried = staged(found, keep, (each for each in best.cuts if each != cut))
        held = backward_moments(found, stages=tried)
        before = [k for k in moments if best.of[k] == best.cuts.index(cut)]
        gain = max((held[k] - moments[k] for k in before), default=0)
        more = seconds_again(found, best, device) - seconds_again(found, tried, device)
        if gain < _WORTH * max(moments.values()) or more > most * forward_seconds(found, device):
            best, moments = tried, held
    return best.cuts


def seconds_again(found: Record, stages: Stages, device: Device) -> float:
    """Of what runs again, in each stage that it runs in, and of tiles, which run again by
    themselves: their backward begins with their forward."""
    inside = [n for n in found.nodes if isinstance(n.target, Tile) and n.target.runs_again]
    again = [found.nodes[k] for each in stages.each for k in each.again]
    return sum(seconds_of(node, device) for node in (*inside, *again))


def forward_seconds(found: Record, device: Device) -> float:
    """Of a region's own operations."""
    return sum(
        seconds_of(node, device)
        for node in found.nodes
        if node.op == "call_function" and not isinstance(node.target, Call)
    )
