"""The longest sequence that fits, by few runs of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .measure import Setting, Step, measure

__all__ = ["find", "longest"]

_SHALLOW = (4, 6)
_AGREES = 0.005


def find(
    setting: Setting,
    capacity: int,
    tell: Callable[[Step, int], None] = lambda step, layers: None,
    shallow: Callable[[int], Callable[[], nn.Module]] | None = None,
    layers: int = 0,
    near: int = 0,
) -> Step:
    """The longest length whose step fits into `capacity` bytes, within 2%, inside a `fake_group`.

    Where all layers are alike, models of 4 and 6 of them say how memory grows with the depth, and
    the search is made on that line. What is returned was measured on the whole model. Either so
    was a length at most 2% above that does not fit; or the line, right within 0.5% at what was
    measured, says that of it.

    Args:
        tell: called with each step that was measured, and the layers of its model (0: all).
        shallow: makes the model with fewer layers; layers: how many it has.
        near: where to start, if that is known: the whole model is measured around it.
    """
    unit = 128 * setting.sp

    def at(length: int, which: Setting = setting) -> Step:
        step = measure(which, length)
        tell(step, 0)
        return step

    if near:
        return longest(at, capacity, unit, near)
    # Where "auto" reaches the longest length, it keeps nothing; before, it fills what there is, and
    # no line goes through that.
    mode: Any = "full" if setting.checkpoint == "auto" else setting.checkpoint
    if shallow is None or layers <= 2 * max(_SHALLOW):
        plain = replace(setting, checkpoint=mode)
        found = longest(lambda n: at(n, plain), capacity, unit)
        step = found if plain == setting else at(found.length)
        if step.peak <= capacity or found.peak > capacity:
            return step
        return longest(at, capacity, unit, found.length)
    makers = {depth: shallow(depth) for depth in _SHALLOW}

    def deep(length: int) -> int:
        found = []
        for depth, make in makers.items():
            each = replace(setting, make=make, checkpoint=mode)
            step = measure(each, length, history=True)
            tell(step, depth)
            found.append(_phases(step))
        low, high = _SHALLOW
        lines = zip(*found, strict=True)
        return max(a + (layers - low) * (b - a) // (high - low) for a, b in lines)

    lengths = [32 * unit, 128 * unit]
    peaks = [deep(length) for length in lengths]
    guess, slope = _crossing(lengths, peaks, capacity, unit)
    if guess > unit and guess not in lengths:
        lengths.append(guess)
        peaks.append(deep(guess))
        guess, slope = _crossing(lengths, peaks, capacity, unit)
    step = at(max(unit, guess))
    said = peaks[-1] + slope * (step.length - lengths[-1])
    if step.peak <= capacity and abs(said - step.peak) <= _AGREES * step.peak:
        return step
    known = {step.length: step}
    return longest(lambda n: known.get(n) or at(n), capacity, unit, step.length)


def _crossing(lengths: list[int], peaks: list[int], capacity: int, unit: int) -> tuple[int, float]:
    """(the last whole unit below which the line through the two latest points stays within the
    capacity, bytes per token on it)."""
    slope = max((peaks[-1] - peaks[-2]) / (lengths[-1] - lengths[-2]), 1e-9)
    return int(lengths[-1] + (capacity - peaks[-1]) / slope) // unit * unit, slope


def _phases(step: Step) -> tuple[int, int, int]:
    """Peaks of a step up to the first sharded gradient, from there to the second, and after that.

    Each is a line in the depth: until the first block's gradient is there, all of what blocks keep
    is; later, what each block takes away and adds is the same.
    """
    peaks, phase, gradients = [0, 0, 0], 0, 0
    for live in step.history:
        more = live.get("gradients", 0)
        if more > gradients and phase < 2:
            phase += 1
        gradients = more
        peaks[phase] = max(peaks[phase], sum(live.values()))
    return peaks[0], peaks[1], peaks[2]


def longest(
    at: Callable[[int], Step], capacity: int, unit: int, start: int = 0, nearly: float = 0.02
) -> Step:
    """The longest length, in whole units, whose peak stays within the capacity.

    Peaks are nearly linear in the length, in pieces. So the line through the two nearest lengths
    says where to look next, and halving takes over where that does not close in. It ends when
    a length at most `nearly` above (or one unit) does not fit.
    """
    low: Step | None = None
    high: Step | None = None
    tried = max(unit, start // unit * unit)
    before: list[Step] = []
    while True:
        step = at(tried)
        before = [*before[-1:], step]
        if step.peak <= capacity:
            low = step
        else:
            high = step
        if low is None and tried == unit:
            return step
        gap = max(unit, int(low.length * nearly) // unit * unit) if low else unit
        if low and high and high.length - low.length <= gap:
            return low
        tried = _next(low, high, before, capacity, unit, gap)


def _next(
    low: Step | None, high: Step | None, before: list[Step], capacity: int, unit: int, gap: int
) -> int:
    near = low or high
    assert near is not None
    # One step alone: as if half of its memory grew with the length.
    slope = near.peak / near.length / 2
    if len(before) == 2 and before[0].length != before[1].length:
        first, second = before if low is None or high is None else (low, high)
        slope = max((second.peak - first.peak) / (second.length - first.length), 1e-9)
    target = int(near.length + (capacity - near.peak) / slope) // unit * unit
    if low is None:
        assert high is not None
        return max(unit, min(target, high.length - unit))
    if high is None:
        return min(max(target, low.length + gap), 8 * low.length)
    if target - low.length <= gap // 2:  # on the border: show that no more fits
        target = low.length + gap
    if not low.length < target < high.length or _stuck(before, capacity, high.length - low.length):
        target = (low.length + high.length) // 2 // unit * unit
    return max(low.length + unit, min(target, high.length - unit))


def _stuck(before: list[Step], capacity: int, gap: int) -> bool:
    """Whether the last two steps fell on the same side, and did not bring that side much nearer."""
    if len(before) < 2:
        return False
    first, second = before
    return (first.peak <= capacity) == (second.peak <= capacity) and (
        abs(second.length - first.length) < gap // 2
    )
