"""Masks as variable-length kernels know them: runs of queries, each with its keys and a window.

A run's queries read its keys like flash-attn's: the last query stands at the last key, and a query
at key p reads p - left to p + right. Documents, padding, windows, chunks and prefixes are all runs;
nobody has to know which.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["FLASH_ATTN", "Pass", "Run", "Runs", "passes_of", "runs_of"]

FLASH_ATTN = "flash-attn"
_MOST_PASSES = 4
_MOST_KEYS = 4  # times: keys that several runs read are there once for each


class Run(NamedTuple):
    """Queries top:bottom of a batch row, keys left:right; -1: the window does not matter."""

    batch: int
    top: int
    bottom: int
    left: int
    right: int
    before: int
    after: int


@dataclass(frozen=True)
class Runs:
    """That a variable-length kernel may run a mask. known: its runs where no data says them, those
    of one batch row for all; None: looked for while the program runs. scale: that of scores, where
    the mask is an expression of them. kernel: which one; it stands in the program, so that ranks
    with other libraries are told."""

    known: tuple[Run, ...] | None = None
    scale: float | None = None
    kernel: str = FLASH_ATTN

    def passes(self, rows: int, queries: int, keys: int, device: torch.device) -> list[Pass] | None:
        assert self.known is not None
        return _passes_of_known(self.known, rows, queries, keys, device)


@dataclass(frozen=True)
class Pass:
    """One call of the kernel. queries, keys: which tokens of all rows it takes, None: all."""

    window: tuple[int, int]
    queries: torch.Tensor | None
    keys: torch.Tensor | None
    query_cuts: torch.Tensor
    key_cuts: torch.Tensor
    most_queries: int
    most_keys: int


def runs_of(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Runs [N, 7], as `Run` has them, of the keys first..last [B, S] of each query."""
    rows, length = first.shape
    reads = last >= first
    more, further = first.diff(dim=1), last.diff(dim=1)
    starts = torch.ones_like(reads)
    steps = (more >= 0) & (more <= 1) & (further >= 0) & (further <= 1)
    near = reads[:, 1:] & reads[:, :-1] & (first[:, 1:] <= last[:, :-1])
    starts[:, 1:] = ~(near & steps)
    # Within a run the first key stands still and then moves, the last one moves and stands still.
    turns = ((more[:, :-1] == 1) & (more[:, 1:] == 0)) | (
        (further[:, :-1] == 0) & (further[:, 1:] == 1)
    )
    starts[:, 2:] |= turns & ~starts[:, 1:-1]
    # Queries past the last key of a run that moved there (padding): the rest has its own window.
    at = torch.arange(length).expand(rows, -1)
    begin = torch.where(starts, at, 0).cummax(1).values
    past = (last[:, 1:] == at[:, :-1]) & (last[:, :-1] == at[:, :-1])
    starts[:, 1:] |= past & (last.gather(1, begin)[:, 1:] < at[:, :-1])

    top = starts.flatten().nonzero()[:, 0]
    bottom = torch.cat([top[1:], torch.tensor([rows * length])])
    kept = reads.flatten()[top]
    top, bottom = top[kept], bottom[kept]
    first, last = first.flatten(), last.flatten()
    left, right = first[top], last[bottom - 1] + 1
    before = torch.where(first[bottom - 1] > left, right - 1 - first[bottom - 1], -1)
    free = last[bottom - 1] == last[top]
    after = torch.where(free, -1, last[top] + 1 - right + bottom - top - 1)
    row = top // length
    return torch.stack(
        [row, top - row * length, bottom - row * length, left, right, before, after], 1
    )


def passes_of(
    runs: torch.Tensor, rows: int, queries: int, keys: int, device: torch.device
) -> list[Pass] | None:
    """Runs of one window together; None where that takes too many calls or copies of keys."""
    row, top, bottom, left, right, before, after = runs.unbind(1)
    if int((right - left).sum()) > _MOST_KEYS * rows * keys:
        return None
    windows = [tuple(each) for each in torch.unique(runs[:, 5:], dim=0).tolist()]
    rest = torch.ones_like(row, dtype=torch.bool)
    found: list[Pass] = []
    for window in sorted(windows, key=lambda w: w.count(-1)):
        taken = rest & _fits(before, window[0], right - left - 1)
        taken &= _fits(after, window[1], bottom - top - 1)
        if not bool(taken.any()):
            continue
        if len(found) == _MOST_PASSES:
            return None
        rest &= ~taken
        q = _tokens(row * queries + top, bottom - top, taken, rows * queries, device)
        k = _tokens(row * keys + left, right - left, taken, rows * keys, device)
        found.append(Pass((window[0], window[1]), q[0], k[0], q[1], k[1], q[2], k[2]))
    return found


def _fits(own: torch.Tensor, window: int, least: torch.Tensor) -> torch.Tensor:
    """Runs that have this side of a window, or whom it does not cut."""
    free = torch.ones_like(own, dtype=torch.bool) if window == -1 else least <= window
    return (own == window) | ((own == -1) & free)


def _tokens(
    start: torch.Tensor, size: torch.Tensor, taken: torch.Tensor, count: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor, int]:
    """(which tokens, None if all in order; where each run's begin; the most of one)"""
    start, size = start[taken], size[taken]
    cuts = torch.cat([torch.zeros(1, dtype=torch.int64), size.cumsum(0)])
    total, most = int(cuts[-1]), int(size.max())
    index = None
    if total != count or bool((start != cuts[:-1]).any()):
        index = (torch.arange(total) + (start - cuts[:-1]).repeat_interleave(size)).to(device)
    return index, cuts.to(device, torch.int32), most


@functools.lru_cache(maxsize=64)
def _passes_of_known(
    known: tuple[Run, ...], rows: int, queries: int, keys: int, device: torch.device
) -> list[Pass] | None:
    runs = torch.tensor(known, dtype=torch.int64).reshape(-1, len(Run._fields)).repeat(rows, 1)
    runs[:, 0] = torch.arange(rows).repeat_interleave(len(known))
    return passes_of(runs, rows, queries, keys, device)
